"""The verdict on a file, and the words for exceptions and crashes."""

import signal
from dataclasses import dataclass, field
from pathlib import Path

from referee.contestant import EndedError, ForgedError, RaisedError, was_killed
from referee.reference_file import first_error_line
from referee.timing import LEAST_JUDGED, Step, Timings, speed_up, spread

CORRECT, WRONG, ERROR, LATE = "correct", "wrong", "error", "time limit"
INTERRUPTED, LEFT_OUT = "interrupted", "left out"
TIE, FASTER = "a tie", "faster"
# Two processes that run the same code differ by this factor, by the addresses that they got.
# On a GPU, launches also make calls vary from round to round: by a factor of 1.25 where these take
# longest, and of 1.002 where the device does. On a CPU, what slows a round slows all contestants.
PLACEMENT = {"cpu": 1.1, "cuda": 1.01}
# Ratios of eager to itself beyond which the machine is too noisy to tell anything.
WIDEST_CONTROL = 1.3


class FoundError(Exception):
    """A step has found the verdict; the arguments are its word, and the reason."""


@dataclass
class Run:
    """The times under one setting of float32's precision, "" where there is only one."""

    setting: str
    timings: Timings
    step: Step | None = None

    @property
    def word(self) -> str:
        """The solution's time beside eager's, in a word: see `compare_times`."""
        names, seconds = self.timings.names, self.timings.seconds
        rows = (seconds[name] for name in (names.eager, names.again, names.solution))
        return compare_times(*rows, self.timings.device)


def compare_times(eager: list[float], again: list[float], times: list[float], device: str) -> str:
    """Return "faster", "slower", "a tie" or "too noisy" for times beside eager's.

    It is a tie if the ratio's interval includes 1 once it is widened by what two processes, or
    eager's own two times, differ by. On a GPU, what eager varies by over the rounds widens it, too.

    Args:
        eager: seconds of each round.
        again: eager's once more, the control.
        times: the solution's.
        device: "cpu" or "cuda".
    """
    control, low, high = speed_up(eager, again)
    is_noisy = high > WIDEST_CONTROL or low < 1 / WIDEST_CONTROL
    if is_noisy or len(eager) < LEAST_JUDGED:
        return "too noisy"
    ratio, low, high = speed_up(eager, times)
    bias = max(control, 1 / control, PLACEMENT[device])
    if device == "cuda":
        fast, slow = spread(eager + again)
        bias = max(bias, slow / fast)
    if low / bias <= 1 <= high * bias:
        return TIE
    return FASTER if ratio > 1 else "slower"


@dataclass
class Verdict:
    """The findings about a file."""

    file: Path
    word: str = CORRECT
    reason: str = ""
    accuracy: str = ""  # the class reached, "" if not known
    count: int = 0  # of cases that were compared
    import_seconds: float = 0.0
    walls: bool = False  # its processes had a namespace of their own
    refused: list[str] = field(default_factory=list)  # kinds of inputs that need not be taken
    notes: list[str] = field(default_factory=list)
    errors: list[dict] = field(default_factory=list)  # of each result and eager's, to float64
    runs: list[Run] = field(default_factory=list)
    details: str = ""  # a traceback, or the end of what the file printed


def outcome(error: EndedError | ForgedError | RaisedError, stage: str) -> tuple[str, str]:
    """Return the verdict and the reason for a process that did not answer properly.

    Args:
        error: what happened instead of an answer.
        stage: of the grading, for the reason.
    """
    if isinstance(error, RaisedError):
        return of_exception(error, stage)
    if isinstance(error, ForgedError):
        return ERROR, f"sends a reply of its own while {stage}"
    status, printed = error.args
    last = [line for line in printed.splitlines() if line.strip()][-1:]
    said = f": {first_error_line(last[0])}" if last else ""
    if status >= 0:
        return ERROR, f"exits with status {status} while {stage}{said}"
    reason = f"crashes ({_signal_name(-status)})"
    if was_killed(status):
        reason = "killed, as for want of memory,"
    return ERROR, f"{reason} while {stage}{said}"


def _signal_name(number: int) -> str:
    """Return "SIGSEGV", say; most real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def of_exception(raised: RaisedError, stage: str) -> tuple[str, str]:
    """Return the verdict and the reason for an exception that a stage of the grading met."""
    about = raised.args[0]
    if about.get("exits"):
        return ERROR, f"exits with status 0 while {stage}"
    name, text = (first_error_line(str(about.get(key))) for key in ("type", "text"))
    where = f", line {about['line']}" if isinstance(about.get("line"), int) else ""
    return ERROR, f"{name}: {text}{where}"
