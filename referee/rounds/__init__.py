"""Timed rounds: contestants take turns, and each turn is a timed request."""
