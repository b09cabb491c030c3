"""The Python API: `Reference`, `grade`, `grade_all`, `Result` and `BadReferenceError`.

    from referee import Reference, grade

    result = grade(Reference("problem.py"), "solution.py", device="cpu")
    print(result.verdict, result.speedup, result.reason)

`referee/__init__.py` exports these names.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from referee import records
from referee.contestants.forms import dtype_name
from referee.devices import choose_device
from referee.engine import Engine, read_files, referee_at_work
from referee.grading import TIMEOUT, Options
from referee.records import Subject
from referee.reference.file import BadReferenceError, load
from referee.reference.problem import Problem
from referee.report import by_role
from referee.report.graded_files import counted_ratio
from referee.times.round_limit import CPU_SECONDS, RoundLimit
from referee.verdict import Verdict
from referee.verdict_words import CORRECT

__all__ = ["BadReferenceError", "Reference", "Result", "grade", "grade_all"]


class Reference:
    """A KernelBench problem file, against which solutions are graded.

    Args:
        path: a file that defines `Model`, `get_inputs` and `get_init_inputs`.
        name: the problem's name in results; by default the file's name without ".py".

    Attributes:
        path: the file's path.
        name: the problem's name.
        file: the loaded file.

    Raises:
        OSError: the file cannot be read.
        BadReferenceError: the file cannot be imported, or a name is missing.
    """

    def __init__(self, path: str | os.PathLike, name: str | None = None) -> None:
        self.path = Path(path)
        self.name = self.path.stem if name is None else name
        self.file = load(self.path)


@dataclass(frozen=True)
class Result:
    """The verdict on one solution.

    Attributes:
        file: the solution's path.
        verdict: "correct", "wrong", "error" or "time limit".
        reason: why the solution is not correct; "" if it is.
        accuracy: the accuracy class of its results, "exact" or "float32-grade" for example.
        notes: other facts, each in a sentence.
        record: all results, as `--json` writes them; "details" has the traceback of an exception.
        speedup: eager's time of a forward divided by the solution's, the median over rounds. Above
            1 the solution is faster. None if nothing was timed.
        interval: the 95% interval of `speedup`, (low, high); None if nothing was timed.
        milliseconds: the solution's median time of a forward; None if nothing was timed.
        time: "faster", "slower", "a tie" or "too noisy": the solution's time compared with eager's.
            "" if nothing was timed.
        step_speedup: like `speedup`, of a training step; None if no step was timed.
        score: `speedup` as the command's ranking counts it: 1 in a tie, because that ratio is
            noise; 0 if the solution is not correct or not timed, or its time too noisy.
    """

    file: Path
    verdict: str
    reason: str
    accuracy: str
    notes: tuple[str, ...]
    record: dict = field(repr=False)
    speedup: float | None = None
    interval: tuple[float, float] | None = None
    milliseconds: float | None = None
    time: str = ""
    step_speedup: float | None = None
    score: float = 0.0

    @property
    def is_correct(self) -> bool:
        """Return whether the solution is right."""
        return self.verdict == CORRECT


def grade(
    reference: Reference,
    solution: str | os.PathLike,
    device: str | None = None,
    trials: int | None = None,
    timeout: float = TIMEOUT,
) -> Result:
    """Grade one solution against a reference: see `grade_all`."""
    [result] = grade_all(reference, [solution], device, trials, timeout)
    return result


def grade_all(
    reference: Reference,
    solutions: Iterable[str | os.PathLike],
    device: str | None = None,
    trials: int | None = None,
    timeout: float = TIMEOUT,
) -> list[Result]:
    """Grade solutions against a reference, one after the other.

    All files are read before the first solution starts. Until the function returns, the first
    thread of the caller's process must start no other process, and no thread that has started one
    may end: the referee would take these processes for the solution's and end them.

    Args:
        reference: the problem.
        solutions: the paths of files that define `ModelNew`.
        device: "cpu", "cuda" or "cuda:N"; by default a GPU if there is one.
        trials: how many rounds are timed; by default 10 on a GPU, and on a CPU as many as fit into
            some seconds.
        timeout: seconds that each solution may run, its compilation included.

    Returns:
        One result for each solution, in their order.

    Raises:
        OSError: a solution cannot be read.
        ValueError: the device does not exist, or `trials` or `timeout` is not positive.
        BadReferenceError: the problem cannot be graded, or needs more memory than there is.
        torch.OutOfMemoryError: a GPU has no memory for copies that the referee makes of the
            problem's inputs or results before it starts a solution.
    """
    if trials is not None and trials < 1:
        raise ValueError(f"expected trials of 1 or more, or None; got {trials}")
    if not timeout > 0:
        raise ValueError(f"expected a timeout of more than 0 seconds; got {timeout}")
    chosen_device, _ = choose_device(device)
    options = Options(RoundLimit(trials, CPU_SECONDS), timeout)
    files = read_files([Path(path) for path in solutions])
    problem = Problem(reference.name, reference.file, chosen_device)
    with referee_at_work(separate_builds=True) as server:
        engine = Engine(problem, server, options, lambda *_: None)
        try:
            return [_result(problem, engine.grade(file)) for file in files]
        finally:
            engine.close()


def _result(problem: Problem, verdict: Verdict) -> Result:
    """Return a verdict as a `Result`."""
    subject = Subject(problem.name, dtype_name(problem.dtype), problem.shape)
    record = records.make_record(subject, verdict, str(verdict.file))
    return Result(
        file=verdict.file,
        verdict=verdict.word,
        reason=verdict.reason,
        accuracy=verdict.accuracy,
        notes=tuple(verdict.notes),
        record=record,
        score=counted_ratio(record),
        **_times(record["runs"]),
    )


def _times(runs: list[dict]) -> dict[str, object]:
    """Return the attributes of a `Result` about times, from the first of its record's runs.

    If nothing was timed, there are none, and the `Result` keeps its defaults.
    """
    if not runs:
        return {}
    run = runs[0]
    row = by_role(run["forward"]["summary"], "solution")
    step_speedup = None
    if run["step"]:
        step_speedup = by_role(run["step"]["summary"]["step"], "solution")["ratio"]
    return {
        "speedup": row["ratio"],
        "interval": (row["ratio_low"], row["ratio_high"]),
        "milliseconds": row["median_ms"],
        "time": run["time"],
        "step_speedup": step_speedup,
    }
