"""This project's two problems, as the referee is given them from outside.

`relu` and `linear_relu_divide` have the cases, bounds and yardsticks that these problems know
better than any reference file. `sizes` chooses the shape of x. `benchmark` measures the figures
beside the headline.
"""
