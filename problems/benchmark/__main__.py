"""Runs `python -m problems.benchmark`: options.py explains the command line, command.py runs it."""

import sys

from problems.benchmark import options
from problems.torch_check import end_without_torch

if __name__ == "__main__":
    options.make_parser().parse_args()  # --help and wrong options end here, also without torch
    end_without_torch("problems.benchmark")

# isort: split
from problems.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
