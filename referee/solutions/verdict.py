"""The outcome of a file, and how exceptions and crashes read in it."""

import signal
from dataclasses import dataclass, field
from pathlib import Path

import torch

from model import Problem
from referee.error_line import first_error_line
from referee.progress import Progress
from referee.remote import RaisedError
from referee.solutions.oracle import Oracle
from referee.stats import speed_up
from referee.step import Step
from referee.timing import LEAST_JUDGED, Rounds, Timings

CORRECT, WRONG, CHEATING, ERROR, LATE = "correct", "wrong", "cheating", "error", "time limit"
# By how much the ratio of two processes that run the same code is off: which addresses they got.
PLACEMENT = {"cpu": 1.1, "cuda": 1.01}
# Ratios of eager to itself beyond which the machine is too noisy to tell anything.
WIDEST_CONTROL = 1.3


class FoundError(Exception):
    """The verdict is known: its word, and the reason."""


@dataclass
class Verdict:
    """The outcome of a file.

    Attributes:
        word: correct, wrong, cheating, error or time limit.
        reason: what is wrong, in words.
        accuracy: the class reached, "" if not known.
        refused: kinds of inputs that the problem does not ask for and the solution refuses.
        timings: of a correct solution.
        step: those of its training step, where it has a backward.
    """

    file: Path
    word: str = CORRECT
    reason: str = ""
    accuracy: str = ""
    count: int = 0
    import_seconds: float = 0.0
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timings: Timings | None = None
    step: Step | None = None

    @property
    def ratio(self) -> tuple[float, float, float] | None:
        """Eager's time in parts of the solution's, with its interval; None where too noisy."""
        timings = self.timings
        if timings is None or self.too_noisy:
            return None
        names = timings.names
        return speed_up(timings.seconds[names.eager], timings.seconds[names.solution])

    @property
    def too_noisy(self) -> bool:
        """Whether eager's own two times differ so much that no ratio means anything."""
        seconds, names = self.timings.seconds, self.timings.names
        if len(seconds[names.eager]) < LEAST_JUDGED:
            return True
        _, low, high = speed_up(seconds[names.eager], seconds[names.again])
        return high > WIDEST_CONTROL or low < 1 / WIDEST_CONTROL

    @property
    def is_tie(self) -> bool:
        """Whether the interval includes 1, if moved by as much as processes, or eager's differ."""
        seconds, names = self.timings.seconds, self.timings.names
        control, *_ = speed_up(seconds[names.eager], seconds[names.again])
        _, low, high = self.ratio
        bias = max(control, 1 / control, PLACEMENT[self.timings.device])
        return low / bias <= 1 <= high * bias


@dataclass(frozen=True)
class Task:
    """The conditions on which files are graded, as `outcome.Task`.

    Attributes:
        name: the problem's.
        problem: one of this project's; None for a reference file.
        oracle: of the reference file; None for a problem of this project.
    """

    name: str
    problem: Problem | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wanted: Rounds
    timeout: float
    progress: Progress
    oracle: Oracle | None = None


def of_exception(raised: RaisedError, stage: str) -> tuple[str, str]:
    """The verdict on an exception, in a stage of the grading."""
    about = raised.args[0]
    name, text, line = (about.get(key) for key in ("type", "text", "line"))
    if about.get("exits"):
        return CHEATING, f"exits with status 0 while {stage}"
    where = f", line {line}" if isinstance(line, int) else ""
    return ERROR, f"{first_error_line(f'{name}')}: {first_error_line(str(text))}{where}"


def of_crash(status: int, printed: str, stage: str) -> tuple[str, str]:
    """The verdict on a process that is gone."""
    if status == 0:
        return CHEATING, f"exits with status 0 while {stage}"
    last = [line for line in printed.splitlines() if line.strip()][-1:]
    said = f": {first_error_line(last[0])}" if last else ""
    if status > 0:
        return ERROR, f"exits with status {status} while {stage}{said}"
    name = signal.Signals(-status).name
    reason = "killed, as for want of memory," if name == "SIGKILL" else f"crashes ({name})"
    return ERROR, f"{reason} while {stage}{said}"
