"""Comparison of results with the reference's: error budgets, accuracy, distances.

Names of tensors in these modules:

    got         a result of the solution
    eager       the reference's, as torch computes it in the problem's dtype
    exact       the reference's in float64
    expected    the right values in float64: exact ones, or eager's where there are none

How far a timed result may be off follows from the reference's result for one draw of inputs, the
budget draw:

    ReferenceTensor        one result of the reference for the budget draw
      |
    ReferenceValues        its values: eager, and exact if there is a result in float64
      |                    how far off is eager?
    ErrorSizes             eager's largest error, its mean error, the size of the result
      |                    times the factors for the dtype, see `budget._Leniency`
    Budget                 how far off an element may be, and the mean; `Limits` holds both, and
      |                    `ReferenceTensor.compare` judges a result for the budget draw by them
      |                    larger, because eager is off itself
    OtherDraws             judges a result for other inputs by its distance from eager's
      |                    `RoundedOtherwise` yields results that may excuse wrong elements
    Requirements           what stays when the values are freed: `Limits`, `OtherDraws`, the form
"""
