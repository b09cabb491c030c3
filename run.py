"""This project's command line: `python run.py --help`.

referee/project/project_command.py reads the arguments and runs the work. This file describes the
project to it: its problems, its solution, and the sizes to measure.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036, older Pythons run this
    sys.exit(f"Python {sys.version.split()[0]} is too old, 3.10 is needed")

# isort: split
# `console` is imported before torch. After `end_on_interrupt`, Ctrl-C ends the process at once,
# even while torch is imported, which takes seconds.
from problems.torch_check import end_without_torch
from referee import console
from referee.contestants import server

if __name__ == "__main__":
    console.program = "run.py"
    console.end_on_interrupt()
    end_without_torch(console.program)
    server.start_ahead()  # its process imports torch too, at the same time as this one

# isort: split
import argparse
from pathlib import Path

import torch

from model import PROBLEMS
from problems import sizes
from referee.project import project_command
from referee.project.project import Project
from referee.records import Subject
from referee.reference.dtypes import DTYPES
from referee.reference.problem import Problem

DESCRIPTION = "Compares the replacements with their references: first the outputs, then the time."
OUR_SOLUTION = Path(__file__).resolve().parent / "model_new.py"
# A sweep (--sweep) times many sizes, in these dtypes unless the user asks for others. On a CPU,
# more than one would take too long.
SWEEP_DTYPES = {"cpu": ["float32"], "cuda": ["float32", "float16", "bfloat16"]}
SWEEP_SETTINGS = 2  # how many precision settings a sweep measures
# A run is a quick check if no option, such as --full, asks for more or other work
# (`project_command.is_quick_check`).
QUICK_SETTINGS = 1  # how many precision settings it measures
QUICK_SECONDS = {"cpu": 17, "cuda": 10}  # how long it takes for one problem in one dtype


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    project = Project(
        program="run.py",
        description=DESCRIPTION,
        problems=list(PROBLEMS),
        sweep_problems=list(sizes.PROBLEM_CLASSES),  # those that have sizes for a sweep
        own_solution=OUR_SOLUTION,
        choose_subjects=_choose_subjects,
        make_problem=_make_problem,
        bundle=_bundle,
        quick_seconds=QUICK_SECONDS,
        documents="README.md and referee/README.md",
    )
    return project_command.main(arguments, project)


def _bundle(problem: str) -> str:
    """Return our solution of a problem as the text of one file."""
    # The import is here so that other commands do not need the package `kernels`.
    from kernels.build.bundle import bundle

    return bundle(problem)


def _choose_subjects(args: argparse.Namespace, device: torch.device) -> list[Subject]:
    """Return what to measure, for all problems and dtypes that the options ask for.

    Raises:
        ValueError: a size does not fit, or a problem does not take a dtype.
    """
    if args.sweep:
        names = list(sizes.PROBLEM_CLASSES)
        dtypes = SWEEP_DTYPES[device.type]
    else:
        names = list(PROBLEMS)
        dtypes = ["float32"]
    if args.problem:
        names = [args.problem]
    if args.dtype:
        dtypes = args.dtype  # a list, as --dtype takes several
    subjects: list[Subject] = []
    for name in names:
        for dtype in dtypes:
            subjects += _subjects_of(name, dtype, args, device)
    return subjects


def _subjects_of(
    name: str, dtype: str, args: argparse.Namespace, device: torch.device
) -> list[Subject]:
    """Return what to measure of a problem in one dtype: one size, or the sizes of a sweep."""
    # A sweep has shapes of its own, but its dtype is checked by this call, too.
    shape, note = sizes.choose_shape(name, args.rows, DTYPES[dtype], device)
    if args.sweep:
        return _sweep_subjects(name, dtype, device)
    if project_command.is_quick_check(args):
        return [_quick_subject(name, dtype, device, shape, note)]
    return [Subject(name, dtype, shape, note=note)]


def _quick_subject(
    name: str, dtype: str, device: torch.device, shape: tuple[int, ...], note: str
) -> Subject:
    """Return the subject of a quick check, which measures fewer precision settings.

    Its note names those that it leaves out.
    """
    settings = sizes.precision_settings(name, DTYPES[dtype], device)
    notes = [note] if note else []
    omitted = settings[QUICK_SETTINGS:]
    if omitted:
        notes.append(f"--full also measures {', '.join(omitted)}")
    return Subject(name, dtype, shape, settings[:QUICK_SETTINGS], "; ".join(notes))


def _sweep_subjects(name: str, dtype: str, device: torch.device) -> list[Subject]:
    """Return a sweep's subjects for a problem in one dtype: each shape at each setting."""
    subjects = []
    for setting in sizes.precision_settings(name, DTYPES[dtype], device)[:SWEEP_SETTINGS]:
        for shape, elements in sizes.sweep_shapes(name, device):
            subjects.append(Subject(name, dtype, shape, (setting,), elements=elements))
    return subjects


def _make_problem(subject: Subject, device: torch.device) -> Problem:
    """Return the referee's object for the problem of a subject."""
    problem = sizes.make_problem(subject.problem, subject.shape, DTYPES[subject.dtype], device)
    # The precision settings to measure; if empty, all of the problem's.
    problem.some_settings = subject.settings
    return problem


if __name__ == "__main__":
    sys.exit(console.run(main))
