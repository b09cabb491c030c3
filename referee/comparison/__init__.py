"""Comparison of results with the reference's: error budgets, accuracy, distances."""
