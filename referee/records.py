"""The results of a command, in the one shape that is printed, drawn and written as JSON."""

import json
import platform
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from referee.names import COMPILED
from referee.report import SCALE, SCHEMA
from referee.timing import Names, Step, speed_up, spread
from referee.verdict import Run, Verdict, compare_times

KEYS = ("median_ms", "p10_ms", "p90_ms", "ratio", "ratio_low", "ratio_high")


class Subject(NamedTuple):
    """A problem in a dtype and at a size, on which files are graded."""

    problem: str
    dtype: str
    shape: tuple[int, ...]
    settings: tuple[str, ...] = ()  # of the precision of products; () are all of the problem
    note: str = ""  # why the shape is not the headline's
    elements: int = 0  # of a call's largest tensor, in a sweep


def document(command: str, kind: str, about: dict) -> dict:
    """Return the JSON file's content, without records yet.

    Args:
        command: the command line.
        kind: "comparison", "grading" or "sweep".
        about: the environment.
    """
    return {
        "schema": SCHEMA,
        "command": command,
        "kind": kind,
        "environment": about,
        "records": [],
        "complete": True,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def as_json(content: dict) -> str:
    """Return the text of the JSON file with this content."""
    return json.dumps(content, indent=1) + "\n"


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Return the device, the versions and all else that the numbers depend on."""
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else _processor(),
        "threads": None if is_gpu else torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return platform.processor() or platform.machine()


def record(subject: Subject, verdict: Verdict, file: str | None) -> dict:
    """Return the record of a verdict on a file, None for this project's own."""
    return {
        "problem": subject.problem,
        "shape": list(subject.shape),
        "dtype": subject.dtype,
        "file": file,
        "verdict": verdict.word,
        "reason": verdict.reason,
        "accuracy": verdict.accuracy,
        "cases": verdict.count,
        "import_seconds": verdict.import_seconds,
        "refused": verdict.refused,
        "notes": verdict.notes,
        "errors": verdict.errors,
        "runs": [of_run(run) for run in verdict.runs],
    }


def of_run(run: Run) -> dict:
    """Return the record of the times under a setting."""
    timings, rate = run.timings, run.timings.rate
    rows = _summary(timings.seconds, timings.names, timings.device)
    medians = {row["name"]: row["median_ms"] for row in rows}
    for row in rows:
        row["rate"] = timings.work / (row["median_ms"] * 1e-3) / SCALE[rate.unit]
        yardstick = medians.get(rate.yardstick, row["median_ms"])
        row["percent_of_yardstick"] = 100 * yardstick / row["median_ms"]
    forward = {
        "unit": rate.unit,
        "work": timings.work,
        "work_unit": rate.work,
        "moved_bytes": timings.moved,
        "yardstick": rate.yardstick,
        "floor_seconds": timings.floor,
        "roofline_seconds": None,
        "summary": rows,
        "seconds": timings.seconds,
        "wall_seconds": timings.wall,
        "notes": timings.notes,
    }
    step = of_step(run.step) if run.step else None
    return {"setting": run.setting, "time": run.word, "forward": forward, "step": step}


def of_step(step: Step) -> dict:
    """Return the record of the times of a training step."""
    forward, backward = step.forward, step.backward
    seconds = {"forward": forward.seconds, "backward": backward.seconds}
    seconds["step"] = {  # the sum of the two in the same round
        name: [f + b for f, b in zip(times, backward.seconds[name], strict=True)]
        for name, times in forward.seconds.items()
    }
    names, device = forward.names, forward.device
    return {
        "summary": {half: _summary(timed, names, device) for half, timed in seconds.items()},
        "seconds": seconds,
        "wall_seconds": {"forward": forward.wall, "backward": backward.wall},
        "kept_bytes": step.kept,
        "notes": forward.notes + backward.notes,
    }


def _summary(
    timed: dict[str, list[float]], names: Names, device: str
) -> list[dict[str, float | str]]:
    """Return one row a contestant out of its seconds; times in ms, ratios to eager's."""
    roles = {names.solution: "solution", names.eager: "eager", names.again: "control"}
    roles[COMPILED] = "compiled"
    rows = []
    for name, seconds in timed.items():
        times = (value * 1e3 for value in (median(seconds), *spread(seconds)))
        values = zip(KEYS, (*times, *speed_up(timed[names.eager], seconds)), strict=True)
        said = compare_times(timed[names.eager], timed[names.again], seconds, device)
        role = roles.get(name, "yardstick")
        rows.append({"name": name, "role": role, "said": said, **dict(values)})
    return rows
