"""Makes records: results in the form in which they are printed, drawn and written as JSON.

A document is the content of a JSON file. Its records are nested like this:

    document           a command's results
      records          a file on a problem, in one dtype and size
        runs           what was timed under one precision setting
          forward      "summary": a row for each timed call; "seconds": all samples
          step         the same of a training step, or None

RESULTS.md explains the keys.
"""

import json
import platform
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from referee.call_names import COMPILED
from referee.report import SCALE, SCHEMA
from referee.times.gain import compare_times
from referee.times.ratios import p10_and_p90, speed_up
from referee.times.timings import StepTimings, TimesOfSetting, Timings
from referee.verdict import Verdict


class Subject(NamedTuple):
    """A problem in a dtype and at a size, on which files are graded.

    Attributes:
        problem: its name.
        dtype: of the input, without "torch.".
        shape: of the input.
        settings: float32's precision settings to measure; empty for all that the problem has.
        note: why the shape is not the problem's own, and what a quick check leaves out; "" if
            neither applies.
        elements: of a call's largest tensor; set only in a sweep.
    """

    problem: str
    dtype: str
    shape: tuple[int, ...]
    settings: tuple[str, ...] = ()
    note: str = ""
    elements: int = 0


def document(command: str, kind: str, about: dict) -> dict:
    """Return the JSON file's content, without records yet.

    Args:
        command: the command line.
        kind: "comparison" of the project's own solution, "grading" of files, or "sweep".
        about: the device and the versions, as `environment` returns them.
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
    """Return the device, the versions, and what else the numbers depend on."""
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
    """Return the name of the CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(": ")
            if key.startswith("model name"):
                return value
    return platform.processor() or platform.machine()


def make_record(subject: Subject, verdict: Verdict, file: str | None) -> dict:
    """Return the record of a verdict.

    Args:
        subject: on which the file was graded.
        verdict: the verdict.
        file: the file's path; None for the project's own solution.
    """
    return {
        "problem": subject.problem,
        "shape": list(subject.shape),
        "dtype": subject.dtype,
        "file": file,
        "verdict": verdict.word,
        "reason": verdict.reason,
        "details": verdict.details,
        "accuracy": verdict.accuracy,
        "cases": verdict.case_count,
        "import_seconds": verdict.import_seconds,
        "walls": verdict.has_walls,
        "refused": verdict.refused,
        "notes": verdict.notes,
        "errors": verdict.errors,
        "runs": [make_run_record(times) for times in verdict.times],
    }


def make_run_record(times: TimesOfSetting) -> dict:
    """Return the entry of "runs" for one precision setting."""
    timings = times.forwards
    limiting_rate = timings.limiting_rate
    rows = _summary(timings.seconds, timings)
    milliseconds = {row["name"]: row["median_ms"] for row in rows}
    for row in rows:
        row["rate"] = timings.work / (row["median_ms"] * 1e-3) / SCALE[limiting_rate.unit]
        # If the yardstick was not timed, each row counts as its own: it has 100%.
        yardstick_milliseconds = milliseconds.get(limiting_rate.yardstick, row["median_ms"])
        row["percent_of_yardstick"] = 100 * yardstick_milliseconds / row["median_ms"]
    forward = {
        "unit": limiting_rate.unit,
        "work": timings.work,
        "work_unit": limiting_rate.work_unit,
        "moved_bytes": timings.moved_bytes,
        "yardstick": limiting_rate.yardstick,
        "floor_seconds": timings.floor,
        "roofline_seconds": None,
        "summary": rows,
        "seconds": timings.seconds,
        "wall_seconds": timings.wall_seconds,
        "notes": timings.notes,
    }
    step = make_step_record(times.steps) if times.steps else None
    return {"setting": times.setting, "time": times.speed_word, "forward": forward, "step": step}


def make_step_record(step: StepTimings) -> dict:
    """Return the "step" of a run: the times of a training step and its two halves."""
    forward, backward = step.forward, step.backward
    seconds = {"forward": forward.seconds, "backward": backward.seconds}
    seconds["step"] = {  # the sum of the two in the same round
        name: [f + b for f, b in zip(times, backward.seconds[name], strict=True)]
        for name, times in forward.seconds.items()
    }
    return {
        "summary": {half: _summary(times, forward) for half, times in seconds.items()},
        "seconds": seconds,
        "wall_seconds": {"forward": forward.wall_seconds, "backward": backward.wall_seconds},
        "kept_bytes": step.kept,
    }


def _summary(seconds_of: dict[str, list[float]], timings: Timings) -> list[dict[str, float | str]]:
    """Return a row for each timed call: its times in ms, and eager's time in relation to them.

    Args:
        seconds_of: each timed call's seconds in all rounds.
        timings: says on which device these are, and which of them are the solution, eager, and
            eager again (the control).
    """
    names = timings.names
    roles = {
        names.solution: "solution",
        names.eager: "eager",
        names.control: "control",
        COMPILED: "compiled",
    }
    eager, control = seconds_of[names.eager], seconds_of[names.control]
    rows = []
    for name, seconds in seconds_of.items():
        p10, p90 = p10_and_p90(seconds)
        eager_to_this = speed_up(eager, seconds)
        rows.append(
            {
                "name": name,
                "role": roles.get(name, "yardstick"),
                "time": compare_times(eager, control, seconds, timings.device, timings.lateness),
                "median_ms": median(seconds) * 1e3,
                "p10_ms": p10 * 1e3,
                "p90_ms": p90 * 1e3,
                "ratio": eager_to_this.ratio,
                "ratio_low": eager_to_this.low,
                "ratio_high": eager_to_this.high,
            }
        )
    return rows
