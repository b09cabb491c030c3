"""`Project`: what a project with problems of its own tells the referee's command."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from referee.records import Subject
from referee.reference.problem import Problem


@dataclass(frozen=True)
class Project:
    """A project with problems and a solution of its own.

    Attributes:
        program: the file that is run, "run.py" for example. Messages begin with this name.
        description: the first line of --help.
        problems: the names of its problems.
        sweep_problems: the problems that --sweep can measure.
        own_solution: the file that is graded if the user names none.
        choose_subjects: returns the problems, dtypes and sizes to grade on, for the options and a
            device. It raises ValueError if the options cannot be followed.
        make_problem: makes the problem of a subject.
        bundle: returns the text of the project's solution of a problem as one file.
        quick_seconds: what a quick check of a problem in one dtype takes, on "cpu" and on "cuda".
        documents: the files that say how its results are made, for the last line of a comparison.
    """

    program: str
    description: str
    problems: list[str]
    sweep_problems: list[str]
    own_solution: Path
    choose_subjects: Callable[[argparse.Namespace, torch.device], list[Subject]]
    make_problem: Callable[[Subject, torch.device], Problem]
    bundle: Callable[[str], str]
    quick_seconds: dict[str, int]
    documents: str
