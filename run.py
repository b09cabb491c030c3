"""This project's command line: `python run.py --help`.

It is the referee's, `referee/command.py`, which is given this project's problems and solution.
"""

from referee import console  # first: the imports that follow take seconds

if __name__ == "__main__":
    console.end_on_interrupt()

# isort: split
import argparse
import importlib
import sys
from itertools import product
from pathlib import Path

import torch

from model import PROBLEMS
from problems import sizes
from referee import command
from referee.cases import DTYPES
from referee.problem import Problem
from referee.session import Subject

DESCRIPTION = "Compares the replacements with their references: first the outputs, then the time."
OURS = Path(__file__).resolve().parent / "model_new.py"
# Unless others are asked for. A CPU has no time for more than one.
SWEEP_DTYPES = {"cpu": ("float32",), "cuda": ("float32", "float16", "bfloat16")}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    project = command.Project(
        description=DESCRIPTION,
        problems=list(PROBLEMS),
        swept=list(sizes.KINDS),
        ours=OURS,
        subjects=_subjects,
        make=_make,
        bundle=_bundle,
    )
    return command.main(arguments, project)


def _bundle(problem: str) -> str:
    return importlib.import_module("kernels.build.bundle").bundle(problem)


def _subjects(args: argparse.Namespace, device: torch.device) -> list[Subject]:
    """Return each problem in each dtype; of a sweep, at each size under its first two settings."""
    subjects: list[Subject] = []
    every = list(sizes.KINDS) if args.sweep else list(PROBLEMS)
    for name in [args.problem] if args.problem else every:
        for dtype in args.dtype or (SWEEP_DTYPES[device.type] if args.sweep else ["float32"]):
            entry = PROBLEMS[name]
            shape, note = sizes.choose_shape(name, entry, args.rows, DTYPES[dtype], device)
            if args.sweep:
                subjects += _sweep(name, dtype, device)
            else:
                subjects.append(Subject(name, dtype, shape, note=note))
    return subjects


def _sweep(name: str, dtype: str, device: torch.device) -> list[Subject]:
    settings = sizes.settings(name, DTYPES[dtype], device)[:2]
    pairs = product(settings, sizes.sweep(name, PROBLEMS[name], device))
    return [
        Subject(name, dtype, shape, (setting,), elements=elements)
        for setting, (shape, elements) in pairs
    ]


def _make(subject: Subject, device: torch.device) -> Problem:
    """Return the problem of a subject."""
    entry, dtype = PROBLEMS[subject.problem], DTYPES[subject.dtype]
    problem = sizes.make(subject.problem, entry, subject.shape, dtype, device)
    problem.some_settings = subject.settings
    return problem


if __name__ == "__main__":
    sys.exit(console.run(main))
