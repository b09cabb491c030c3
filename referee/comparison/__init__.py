"""Comparison of results with the reference's: error budgets, accuracy, distances.

Names of tensors in these modules:

    got         a result of the solution
    eager       the reference's, as torch computes it in the problem's dtype
    exact       the reference's in float64
    expected    the right values in float64: exact ones, or eager's where there are none
"""
