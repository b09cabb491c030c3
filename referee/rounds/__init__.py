"""Timed rounds: timed calls take turns, and each turn is a timed request."""
