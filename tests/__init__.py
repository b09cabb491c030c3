"""Tests of the two problems' modules, their kernels, `run.py`, `problems/` and the documents.

The tests of the referee itself are in `referee/tests`. Besides the test files, this folder has

support/        what several test files share: comparisons, operands, tables of graded files
cache/          tests of the cache of builds, in which many processes build a tiny extension
emulator/       C++ programs that run CUDA kernels on the CPU (`test_emulator.py`)
solutions/      files that are graded: honest ones, and designs for a GPU (`test_solutions.py`)
third_problem/  what a third problem adds to a copy of the project (`test_third_problem.py`)
"""
