"""What `--json` writes: one shape for problems, graded files and sweeps."""

import json
import shlex
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone

import torch

from referee.child.yardsticks import COMPILED
from referee.judge.verdict import Run, Verdict
from referee.report import tables as report
from referee.report.schema import SCHEMA
from referee.timing import Step, Timings


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


def record(facts: dict, verdict: Verdict, file: str | None) -> dict:
    """The record of a verdict.

    Args:
        facts: problem, shape and dtype.
        file: None for this project's own.
    """
    return {
        "problem": facts["problem"],
        "file": file,
        "shape": list(facts["shape"]),
        "dtype": facts["dtype"],
        "import_seconds": verdict.import_seconds,
        "verdict": verdict.word,
        "reason": verdict.reason,
        "accuracy": verdict.accuracy,
        "cases": verdict.count,
        "refused": verdict.refused,
        "notes": verdict.notes,
        "errors": verdict.errors,
        "runs": [_run(run) for run in verdict.runs],
    }


def _run(run: Run) -> dict:
    return {
        "setting": run.setting,
        "time": run.word,
        "forward": _forward(run.timings),
        "step": _step(run.step) if run.step else None,
    }


def _forward(timings: Timings) -> dict:
    return {
        "unit": timings.rate.unit,
        "work": timings.work,
        "work_unit": timings.rate.work,
        "moved_bytes": timings.moved,
        "yardstick": timings.rate.yardstick,
        "floor_seconds": timings.floor,
        "roofline_seconds": None,
        "summary": [_with_role(row, timings) for row in report.rates(timings)],
        "seconds": timings.seconds,
        "wall_seconds": timings.wall,
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
