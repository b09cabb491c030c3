"""Runs the command line of `problems/benchmark/command.py`."""

import sys

from problems.benchmark.command import main

sys.exit(main())
