"""The process in which a solution, or eager, runs. It does what it is asked, and judges nothing.

It shares `shared`, `results`, `cuda_ipc`, `clock` and `gradients_of` with the referee; nothing of
the referee's own, no reference and no expected result, is in it.
"""
