"""The result of grading a problem, and how the graders are called."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from model import Problem
from referee.correctness import Checks
from referee.errors import Comparison
from referee.progress import Progress
from referee.step import Step
from referee.timing import Rounds, Timings


class Task(NamedTuple):
    """A solution to grade, and on what.

    Attributes:
        shape: of x.
        wanted: how long to time.
    """

    problem: Problem
    solution: type[nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wanted: Rounds
    progress: Progress


@dataclass
class Run:
    """The times under one setting, "" where there is only one."""

    setting: str
    timings: Timings
    step: Step | None = None

    @property
    def problems(self) -> list[str]:
        """The faults, in words."""
        found = self.timings.problems + (self.step.problems if self.step else [])
        return [f"{self.setting}: {p}" if self.setting else p for p in found]


@dataclass
class Outcome:
    """Cases compared, errors measured at the timed size, and times if nothing was wrong."""

    checks: Checks = field(default_factory=Checks)
    errors: list[Comparison] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """All that is wrong, in words."""
        return self.checks.failures + [problem for run in self.runs for problem in run.problems]

    def trim(self) -> None:
        """Keeps the whole rounds of what was interrupted."""
        for run in self.runs:
            run.timings.trim(run.timings.rounds)
            if run.step and run.step.rounds:
                run.step.trim()
            else:
                run.step = None
        self.runs = [run for run in self.runs if run.timings.rounds]
