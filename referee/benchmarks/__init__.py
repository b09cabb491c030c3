"""Figures beside the headline, operands for tests and grading: `python -m referee.benchmark`."""
