"""The verdict on a file, and the words for exceptions and crashes."""

import signal
from dataclasses import dataclass, field
from pathlib import Path

from referee.comparison.accuracy import ErrorSizes
from referee.contestants.errors import (
    EndedError,
    ForgedError,
    RaisedError,
    UnstoppableError,
    WokenError,
)
from referee.message_lines import first_error_line, printable
from referee.times.timings import TimesOfSetting
from referee.verdict_words import CORRECT, ERROR

# A hint for an honest author after an invalid reply.
HOW_REPLIES_STAY_VALID = (
    "a file may not write to descriptors that it has not opened, or change json or the referee"
)


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
        self.reason = printable(reason)  # it may quote the solution


@dataclass
class Verdict:
    """The verdict on a file, and what the report says of it.

    Attributes:
        file: the graded file's path.
        word: the verdict in a word: CORRECT, WRONG, ...
        reason: why it is not correct, or "".
        accuracy: the accuracy class of the results, or "" if it is not known.
        case_count: the number of untimed forwards and training steps that were compared.
        import_seconds: how long the import took.
        has_walls: whether its process had a namespace of its own; None if none was started.
        refused: the kinds of inputs that it did not take, and need not take; also a forward that
            autograd records.
        notes: sentences for the report's line that do not change the verdict.
        errors: rows of the solution's and the reference's errors against float64.
        times: the times, an entry for each precision setting.
        details: a traceback, and the end of what the file printed.
        has_traceback: whether `details` begins with a traceback; a crash has none.
    """

    file: Path
    word: str = CORRECT
    reason: str = ""
    accuracy: str = ""
    case_count: int = 0
    import_seconds: float = 0.0
    has_walls: bool | None = None
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[dict] = field(default_factory=list)
    times: list[TimesOfSetting] = field(default_factory=list)
    details: str = ""
    has_traceback: bool = False

    def note_errors(
        self, name: str, setting: str, quantity: str, solution: ErrorSizes, reference: ErrorSizes
    ) -> None:
        """Add a row to `errors`.

        Args:
            name: the row's name.
            setting: the precision of float32 products.
            quantity: the result that has the errors: "output", or "gradient of x" for example.
            solution: the errors of the solution's result against float64.
            reference: the errors of the reference's own.
        """
        row: dict[str, object] = {"name": name, "setting": setting, "quantity": quantity}
        for owner, errors in (("solution", solution), ("reference", reference)):
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
        return ERROR, f"sends an invalid reply ({error}) while {stage}; {HOW_REPLIES_STAY_VALID}"
    if isinstance(error, UnstoppableError):
        return ERROR, f"does not obey SIGSTOP while {stage}"
    if isinstance(error, WokenError):
        # It ran before the request that has found this out, and `stage` is that request's.
        return ERROR, f"runs although it is stopped, perhaps woken by a timer; found while {stage}"
    status, printed = error.args
    printed_lines = [line for line in printed.splitlines() if line.strip()]
    last_line = f": {first_error_line(printed_lines[-1])}" if printed_lines else ""
    return ERROR, f"{_describe_status(status)} while {stage}{last_line}"


def _describe_status(status: int) -> str:
    """Return in words how a process has ended; a negative status is that of a signal."""
    if status >= 0:
        return f"exits with status {status}"
    if status == -signal.SIGKILL:  # the kernel sends it, for example, if memory is short
        return "is killed by SIGKILL, perhaps because memory was short,"
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
