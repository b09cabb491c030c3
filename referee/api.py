"""The Python API: `Reference`, `grade`, `Result`.

from referee import Reference, grade

result = grade(Reference("problem.py"), "solution.py", device="cpu")
print(result.verdict, result.reason, result.speedup)
"""

import os
from dataclasses import dataclass
from pathlib import Path

from referee import records, timing
from referee.command import TIMEOUT, choose_device
from referee.engine import Engine, read_files, referee_at_work
from referee.grading import Options
from referee.problem import Problem
from referee.records import Subject
from referee.reference_file import load
from referee.report import by_role
from referee.shared import dtype_name
from referee.timing import Rounds
from referee.verdict import Verdict


class Reference:
    """A KernelBench problem file, against which solutions are graded.

    Args:
        path: a file with `Model`, `get_inputs` and `get_init_inputs`.
        name: of the problem, in results; by default the file's.

    Raises:
        referee.reference_file.BadReferenceError: the file does not import, or a name is missing.
    """

    def __init__(self, path: str | os.PathLike, name: str | None = None) -> None:
        self.path = Path(path)
        self.name = name or self.path.stem
        self.file = load(self.path)


@dataclass(frozen=True)
class Result:
    """The verdict on one solution.

    Attributes:
        file: the solution.
        verdict: "correct", "wrong", "error" or "time limit".
        reason: why it is not correct, in a sentence; "" if it is.
        accuracy: the class of its results: "exact", "float32-grade" and so on.
        speedup: eager's time in parts of the solution's, the median over rounds; None where
            nothing was timed.
        interval: the 95% interval of that.
        milliseconds: the solution's median time.
        time: how the solution's time compares with eager's: "faster", "slower", "a tie" or "too
            noisy".
        step_speedup: the same of a training step; None where the file is forward only.
        notes: what else there is to say.
        record: everything, as `--json` writes it.
    """

    file: Path
    verdict: str
    reason: str
    accuracy: str
    speedup: float | None
    interval: tuple[float, float] | None
    milliseconds: float | None
    time: str
    step_speedup: float | None
    notes: tuple[str, ...]
    record: dict

    @property
    def is_correct(self) -> bool:
        """Return whether the solution is right."""
        return self.verdict == "correct"


def grade(
    reference: Reference,
    *solutions: str | os.PathLike,
    device: str | None = None,
    trials: int | None = None,
    timeout: float = TIMEOUT,
) -> Result | list[Result]:
    """Grade solutions against a reference.

    Args:
        reference: what is right.
        solutions: files that define `ModelNew`.
        device: "cpu", "cuda" or "cuda:N"; by default the best there is.
        trials: timed rounds; by default some seconds' worth.
        timeout: seconds for each solution, its compilation included.

    Returns:
        The result of a solution, or a list of them for several.

    Raises:
        ValueError: there is no such device.
        referee.reference_file.BadReferenceError: the file is no problem that can be graded.
    """
    there, _why_no_gpu = choose_device(device)
    options = Options(Rounds(trials, timing.CPU_SECONDS), timeout)
    files = read_files([Path(path) for path in solutions])
    problem = Problem(reference.name, reference.file, there)
    with referee_at_work(own_builds=True) as server:
        engine = Engine(problem, server, options, lambda *_: None)
        try:
            results = [_result(problem, engine.grade(file)) for file in files]
        finally:
            engine.close()
    return results[0] if len(results) == 1 else results


def _result(problem: Problem, verdict: Verdict) -> Result:
    subject = Subject(problem.name, dtype_name(problem.dtype), problem.shape)
    record = records.record(subject, verdict, str(verdict.file))
    speedup = interval = milliseconds = step_speedup = None
    time = ""
    if record["runs"]:
        run = record["runs"][0]
        row = by_role(run["forward"]["summary"], "solution")
        speedup, interval = row["ratio"], (row["ratio_low"], row["ratio_high"])
        milliseconds, time = row["median_ms"], run["time"]
        if run["step"]:
            step_speedup = by_role(run["step"]["summary"]["step"], "solution")["ratio"]
    return Result(
        file=verdict.file,
        verdict=verdict.word,
        reason=verdict.reason,
        accuracy=verdict.accuracy,
        speedup=speedup,
        interval=interval,
        milliseconds=milliseconds,
        time=time,
        step_speedup=step_speedup,
        notes=tuple(verdict.notes),
        record=record,
    )
