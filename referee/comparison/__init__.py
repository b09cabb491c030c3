"""Comparison of results with the reference's: error budgets, accuracy, distances.

Names of tensors in these modules:

    got         a result of the solution
    eager       the reference's, as torch computes it in the problem's dtype
    exact       the reference's in float64
    expected    the right values in float64: exact ones, or eager's where there are none

How far off a result may be follows from the reference's result for one draw of inputs, the budget
draw. From top to bottom, each is made from the one above it. Beside an arrow is what is added:

    ReferenceTensor        one result of the reference for the budget draw. `compare` judges a
      |                    solution's result for that draw: `checks.forward` calls it
    ReferenceValues        its values: eager, and exact if there is a result in float64
      |                    how far off is eager?
    ErrorSizes             eager's largest error, its mean error, the size of the result
      |                    times the factors for the dtype, see `budget._Leniency`
    Budget                 how far off an element may be, and the mean
      |                    with the form of the result
    ResultSpec             what stays when the values are freed. `find_mistake` judges a result for
                           other draws by its distance from eager's: `checks.timed_forwards` calls
                           it. The budget is then larger, because eager is off itself

Both `compare` and `find_mistake` call `ReferenceValues.measure`, which computes the errors of a
result block by block, to save memory. `find_mistake` has eager's values alone.

Both may excuse wrong elements: `RoundedOtherwise` yields the reference's
results with other roundings, see `second_look`.

A training step has several results and gradients. A `Quantity` is one of them over several steps:
it judges a result by its mistake in a single step, and a gradient by `gradient_rules`.
"""
