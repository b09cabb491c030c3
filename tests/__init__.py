"""Tests of the two problems' modules, their kernels, `run.py`, `problems/` and the documents.

Each folder's `__init__.py` says what its files test.

relu/        the ReLU of the first problem
linear/      the second problem, Linear -> ReLU -> divide: results, arithmetic, choice of kernels
pytorch/     both modules in torch: compile, vmap, export, settings, lack of memory and others
builds/      the tools, the build, the cache of builds, the one-file bundle
emulator/    CUDA kernels on a CPU
grading/     `run.py`: its command line, its output, and the files that it grades
benchmark/   `problems.benchmark`, and pictures
project/     the documents, `problems/`, and what a third problem needs
support/     what several test files share: comparisons, operands, new processes

The tests of the referee itself are in `referee/tests`.
"""
