"""The process in which a solution, or eager, runs. It does what it is asked, and judges nothing.

Both sides use `shared`, `results`, `cuda_ipc`, `names` and `gradients_of`. No expected result, and
none of the referee's objects, is in this process.
"""
