"""The verdict on a file, and the words for exceptions and crashes."""

import signal
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from referee.comparison.accuracy import Errors
from referee.contestants.errors import (
    EndedError,
    ForgedError,
    RaisedError,
    UnstoppableError,
    was_killed,
)
from referee.messages import first_error_line
from referee.times.timing import LEAST_JUDGED, StepTimings, Timings, speed_up, spread
from referee.words import CORRECT, ERROR, FASTER, SLOWER, TIE, TOO_NOISY

# Two processes that run the same code differ by this factor, because they got other addresses. In a
# short call they differ by so many seconds.
PLACEMENT = {"cpu": 1.1, "cuda": 1.01}
PLACEMENT_SECONDS = {"cpu": 0.0, "cuda": 3e-7}
# If eager differs from itself by a larger factor, the machine is noisy.
WIDEST_CONTROL = 1.3


class NotCorrectError(Exception):
    """Ends a grading, because the file is not correct or cannot be graded.

    Args:
        word: the verdict in a word: WRONG or ERROR, or LEFT_OUT in a sweep.
        reason: why the file is not correct.

    Both are attributes, too.
    """

    def __init__(self, word: str, reason: str) -> None:
        super().__init__(word, reason)
        self.word = word
        self.reason = reason


@dataclass
class Run:
    """The times under one precision setting.

    Attributes:
        setting: the precision of float32 products; "" where there is only one.
        timings: the times of forwards.
        training_step: the times of training steps, or None.
    """

    setting: str
    timings: Timings
    training_step: StepTimings | None = None

    @property
    def time(self) -> str:
        """The solution's time beside eager's, in a word: see `compare_times`."""
        names, seconds = self.timings.names, self.timings.seconds
        return compare_times(
            eager=seconds[names.eager],
            control=seconds[names.control],
            solution=seconds[names.solution],
            device=self.timings.device,
            lateness=self.timings.lateness,
        )


def compare_times(
    eager: list[float],
    control: list[float],
    solution: list[float],
    device: str,
    lateness: float = 1.0,
) -> str:
    """Return FASTER, SLOWER, TIE or TOO_NOISY for a solution's times beside eager's.

    The ratio's interval is widened by the noise, a factor by which times of the same code differ.
    If it then includes 1, it is a tie, or TOO_NOISY if the machine is noisy. It is also TOO_NOISY
    if there are few rounds. The noise is the largest of

        - PLACEMENT, by which two processes differ, or PLACEMENT_SECONDS if they are more;
        - the ratio of eager to itself, the control; on a noisy machine, the end of the control's
          interval that is farther from 1;
        - on a GPU, the spread of eager's times over the rounds, which is large where a call waits
          for launches; and the lateness. On a CPU, what slows a round slows all timed calls in it.

    Args:
        eager: eager's seconds of a call, for each round.
        control: the seconds of eager's second turns.
        solution: the solution's.
        device: "cpu" or "cuda".
        lateness: by which factor late launches lengthen eager's calls, see `Sample.lateness`.
    """
    if len(eager) < LEAST_JUDGED:
        return TOO_NOISY
    shortest = min(median(eager), median(solution))
    placement = max(PLACEMENT[device], 1 + PLACEMENT_SECONDS[device] / shortest)
    control_ratio, low_control, high_control = speed_up(eager, control)
    noise = max(control_ratio, 1 / control_ratio, placement)
    widest_control = max(high_control, 1 / low_control)
    is_noisy = widest_control > WIDEST_CONTROL
    if is_noisy:
        noise = max(noise, widest_control)
    if device == "cuda":
        fast, slow = spread(eager + control)
        noise = max(noise, slow / fast, lateness)
    ratio, low, high = speed_up(eager, solution)
    if low / noise <= 1 <= high * noise:
        return TOO_NOISY if is_noisy else TIE
    return FASTER if ratio > 1 else SLOWER


@dataclass
class Verdict:
    """The findings about a file.

    Attributes:
        file: the graded file's path.
        word: the verdict in a word: CORRECT, WRONG, ...
        reason: why it is not correct, or "".
        accuracy: the accuracy class of the results, or "" if it is not known.
        count: the number of forwards and backwards that were compared.
        import_seconds: how long the import took.
        walls: whether its processes had a namespace of their own.
        refused: the kinds of inputs that it did not take, and need not take.
        notes: sentences for the report's line that do not change the verdict.
        errors: rows of the solution's and eager's errors against float64.
        runs: the times, one run for each precision setting.
        details: a traceback, and the end of what the file printed.
        has_traceback: whether `details` begins with a traceback; a crash has none.
    """

    file: Path
    word: str = CORRECT
    reason: str = ""
    accuracy: str = ""
    count: int = 0
    import_seconds: float = 0.0
    walls: bool = False
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[dict] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    details: str = ""
    has_traceback: bool = False

    def note_errors(
        self, name: str, setting: str, quantity: str, solution: Errors, eager: Errors
    ) -> None:
        """Add a row to `errors`.

        Args:
            name: the row's name.
            setting: the precision of float32 products.
            quantity: the result that has the errors: "output", or "gradient of x" for example.
            solution: the errors of the solution's result against float64.
            eager: the errors of eager's.
        """
        row: dict[str, object] = {"name": name, "setting": setting, "quantity": quantity}
        for owner, errors in (("solution", solution), ("reference", eager)):
            row[f"{owner}_max"] = errors.largest
            row[f"{owner}_mean"] = errors.mean
            row[f"{owner}_relative"] = errors.relative
        self.errors.append(row)


def outcome(error: EndedError | ForgedError | RaisedError, stage: str) -> tuple[str, str]:
    """Return the verdict's word and the reason for a process that did not answer properly.

    Args:
        error: what happened instead of an answer.
        stage: the stage of the grading, for the reason: "checking the backward", say.
    """
    if isinstance(error, RaisedError):
        return outcome_of_exception(error, stage)
    if isinstance(error, ForgedError):
        return ERROR, f"sends a reply of its own while {stage}"
    if isinstance(error, UnstoppableError):
        return ERROR, f"does not obey SIGSTOP while {stage}"
    status, printed = error.args
    printed_lines = [line for line in printed.splitlines() if line.strip()]
    last_line = f": {first_error_line(printed_lines[-1])}" if printed_lines else ""
    return ERROR, f"{_describe_status(status)} while {stage}{last_line}"


def _describe_status(status: int) -> str:
    """Return in words how a process has ended; a negative status is that of a signal."""
    if status >= 0:
        return f"exits with status {status}"
    if was_killed(status):
        return "killed, as for want of memory,"
    return f"crashes ({_signal_name(-status)})"


def _signal_name(number: int) -> str:
    """Return a signal's name, "SIGSEGV", say; most real-time signals have none but a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def outcome_of_exception(raised: RaisedError, stage: str) -> tuple[str, str]:
    """Return the verdict's word and the reason for an exception in the solution's code.

    Args:
        raised: the exception, as the process describes it.
        stage: the stage of the grading, for the reason.
    """
    description = raised.args[0]
    if description.get("exits"):  # by `sys.exit()`, which is an exception, too
        return ERROR, f"exits with status 0 while {stage}"
    kind = first_error_line(str(description.get("type")))
    text = first_error_line(str(description.get("text")))
    line = description.get("line")
    place = f", line {line}" if isinstance(line, int) else ""
    return ERROR, f"{kind}: {text}{place}"
