"""Runs the command line of `problems/benchmark/command.py`."""

import sys

from problems.torch_check import end_without_torch

if __name__ == "__main__":
    end_without_torch("problems.benchmark")

# isort: split
from problems.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
