"""The outcome of a file, and how exceptions and crashes read in it."""

import signal
from dataclasses import dataclass, field
from pathlib import Path

from referee.console import Progress
from referee.judge.oracle import Oracle
from referee.reference_file import first_error_line
from referee.remote import EndedError, ForgedError, RaisedError
from referee.timing import LEAST_JUDGED, Rounds, Step, Timings, speed_up

CORRECT, WRONG, CHEATING, ERROR, LATE = "correct", "wrong", "cheating", "error", "time limit"
INTERRUPTED, LEFT_OUT = "interrupted", "left out"
TIE = "a tie"
# By how much the ratio of two processes that run the same code is off: which addresses they got.
PLACEMENT = {"cpu": 1.1, "cuda": 1.01}
# Ratios of eager to itself beyond which the machine is too noisy to tell anything.
WIDEST_CONTROL = 1.3


class FoundError(Exception):
    """The verdict is known: its word, and the reason."""


@dataclass
class Run:
    """The times under one setting, "" where there is only one."""

    setting: str
    timings: Timings
    step: Step | None = None

    @property
    def word(self) -> str:
        """The ratio of eager's time to the solution's; a tie where the interval includes 1, if
        moved by as much as processes, or eager's own two times, differ.
        """
        names, seconds = self.timings.names, self.timings.seconds
        eager = seconds[names.eager]
        control, low, high = speed_up(eager, seconds[names.again])
        is_noisy = high > WIDEST_CONTROL or low < 1 / WIDEST_CONTROL
        if is_noisy or len(eager) < LEAST_JUDGED:
            return "too noisy"
        ratio, low, high = speed_up(eager, seconds[names.solution])
        bias = max(control, 1 / control, PLACEMENT[self.timings.device])
        if low / bias <= 1 <= high * bias:
            return TIE
        return "faster" if ratio > 1 else "slower"


@dataclass
class Verdict:
    """The outcome of a file."""

    file: Path
    word: str = CORRECT
    reason: str = ""
    accuracy: str = ""  # the class reached, "" if not known
    count: int = 0  # of cases that were compared
    import_seconds: float = 0.0
    refused: list[str] = field(default_factory=list)  # kinds of inputs that need not be taken
    notes: list[str] = field(default_factory=list)
    errors: list[dict] = field(default_factory=list)  # of each result and eager's, to float64
    runs: list[Run] = field(default_factory=list)


@dataclass(frozen=True)
class Task:
    """The conditions on which files are graded."""

    name: str  # the problem's
    oracle: Oracle
    settings: tuple[str, ...]  # of the precision of float32 products
    wanted: Rounds
    yardsticks: tuple[str, ...]  # names of what is timed beside eager
    timeout: float  # s, for a file
    progress: Progress
    only_times: bool = False  # as a sweep does


def outcome(error: EndedError | ForgedError | RaisedError, stage: str) -> tuple[str, str]:
    """The verdict on what a process did instead of answering, in a stage of the grading."""
    if isinstance(error, RaisedError):
        return of_exception(error, stage)
    if isinstance(error, ForgedError):
        return CHEATING, f"forged a reply to the referee, while {stage}"
    status, printed = error.args
    if status == 0:
        return CHEATING, f"exits with status 0 while {stage}"
    last = [line for line in printed.splitlines() if line.strip()][-1:]
    said = f": {first_error_line(last[0])}" if last else ""
    if status > 0:
        return ERROR, f"exits with status {status} while {stage}{said}"
    name = signal.Signals(-status).name
    reason = "killed, as for want of memory," if name == "SIGKILL" else f"crashes ({name})"
    return ERROR, f"{reason} while {stage}{said}"


def of_exception(raised: RaisedError, stage: str) -> tuple[str, str]:
    """The verdict on an exception, in a stage of the grading."""
    about = raised.args[0]
    if about.get("exits"):
        return CHEATING, f"exits with status 0 while {stage}"
    name, text = (first_error_line(str(about.get(key))) for key in ("type", "text"))
    where = f", line {about['line']}" if isinstance(about.get("line"), int) else ""
    return ERROR, f"{name}: {text}{where}"
