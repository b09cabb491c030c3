"""What `--json` writes: one shape for problems, graded files and sweeps."""

import json
import shlex
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone

import torch

from referee.outcome import Outcome, Run
from referee.report import ranking
from referee.report import tables as report
from referee.report.schema import SCHEMA
from referee.solutions import CORRECT, WRONG, Verdict
from referee.step import Step
from referee.sweep import Size
from referee.timing import COMPILED, Timings

INTERRUPTED, LEFT_OUT = "interrupted", "left out"


@dataclass
class Document:
    """All that a command measured.

    Attributes:
        command: as it was typed.
        kind: of the records: "comparison", "grading" or "sweep".
        environment: `report.environment`.
        complete: whether nobody interrupted.
    """

    command: str
    kind: str
    environment: dict
    records: list[dict] = field(default_factory=list)
    complete: bool = True
    date: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )

    @staticmethod
    def start(arguments: list[str] | None, kind: str, device: torch.device) -> "Document":
        """For a command of run.py that begins; `arguments` are by default the process's."""
        command = shlex.join(["run.py", *(sys.argv[1:] if arguments is None else arguments)])
        return Document(f"python {command}", kind, report.environment(device))

    def content(self) -> dict:
        """The JSON file's."""
        return {"schema": SCHEMA, **vars(self)}

    def json(self) -> str:
        """The JSON file's text."""
        return json.dumps(self.content(), indent=1) + "\n"


def of_outcome(facts: dict, outcome: Outcome, import_seconds: float, complete: bool = True) -> dict:
    """The record of one of this project's replacements.

    Args:
        facts: problem, shape and dtype.
    """
    word = WRONG if outcome.problems else CORRECT if complete else INTERRUPTED
    return {
        **_record(**facts, verdict=word, problems=outcome.problems, seconds=import_seconds),
        "cases": outcome.checks.count,
        "errors": [comparison.row() for comparison in outcome.errors],
        "runs": [_run(run) for run in outcome.runs],
    }


def of_verdict(facts: dict, verdict: Verdict) -> dict:
    """The record of a graded file; `facts` as of `of_outcome`."""
    seconds, timings = verdict.import_seconds, verdict.timings
    runs = [Run("", timings, verdict.step)] if timings else []
    return {
        **_record(**facts, verdict=verdict.word, problems=[verdict.reason], seconds=seconds),
        "file": str(verdict.file),
        "accuracy": verdict.accuracy,
        "cases": verdict.count,
        "refused": verdict.refused,
        "notes": verdict.notes,
        "runs": [{**_run(run), "time": ranking.word(verdict)} for run in runs],
    }


def of_size(size: Size, import_seconds: float) -> dict:
    """The record of a size of a sweep."""
    word, problems = LEFT_OUT, [size.left_out]
    if size.run:
        word, problems = WRONG if size.problems else CORRECT, size.problems
    facts = {"problem": size.problem, "shape": size.shape, "dtype": size.dtype}
    record = _record(**facts, verdict=word, problems=problems, seconds=import_seconds)
    record["runs"] = [_run(size.run)] if size.run else []
    for run in record["runs"]:
        run["forward"]["roofline_seconds"] = size.limit
    return record


def _record(
    problem: str,
    shape: tuple[int, ...],
    dtype: str,
    verdict: str,
    problems: list[str],
    seconds: float,
) -> dict:
    """The keys of every record, in their order."""
    return {
        "problem": problem,
        "file": None,
        "shape": list(shape),
        "dtype": dtype,
        "import_seconds": seconds,
        "verdict": verdict,
        "reason": "; ".join(problems),
        "accuracy": "",
        "cases": 0,
        "refused": [],
        "notes": [],
        "errors": [],
        "runs": [],
    }


def _run(run: Run) -> dict:
    forward = _forward(run.timings)
    [ours] = (row for row in forward["summary"] if row["role"] == "solution")
    return {
        "setting": run.setting,
        "time": _word(ours),
        "forward": forward,
        "step": _step(run.step) if run.step else None,
    }


def _forward(timings: Timings) -> dict:
    return {
        "unit": timings.rate.unit,
        "work": timings.work,
        "work_unit": timings.rate.work,
        "yardstick": timings.rate.yardstick,
        "floor_seconds": timings.floor,
        "roofline_seconds": None,
        "summary": [_with_role(row, timings) for row in report.rates(timings)],
        "seconds": timings.seconds,
        "wall_seconds": timings.wall,
        "problems": timings.problems,
        "notes": timings.notes,
    }


def _step(step: Step) -> dict:
    seconds, names = step.seconds(), step.forward.names
    return {
        "summary": {
            half: [_with_role(row, step.forward) for row in report.summary(timed, names.eager)]
            for half, timed in seconds.items()
        },
        "seconds": seconds,
        "wall_seconds": {"forward": step.forward.wall, "backward": step.backward.wall},
        "kept_bytes": step.kept,
        "problems": step.problems,
        "notes": step.notes,
    }


def _with_role(row: dict, timings: Timings) -> dict:
    names = timings.names
    roles = {
        names.solution: "solution",
        names.eager: "eager",
        names.again: "control",
        COMPILED: "compiled",
    }
    return {"name": row["name"], "role": roles.get(row["name"], "yardstick"), **row}


def _word(row: dict) -> str:
    """The word for the interval of a row's ratio."""
    if report.is_tie(row):
        return "a tie"
    return "faster" if row["ratio_low"] > 1 else "slower"
