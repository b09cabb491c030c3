"""The shape of run.py's JSON files (referee/records.py), and results made up for tests."""

import json
import random
from datetime import datetime, timezone
from pathlib import Path

from problems import linear_relu_divide as linear
from problems import relu
from referee import records
from referee.names import COMPILED
from referee.times import timing
from referee.verdict import Run, Verdict

ABOUT = {"device": "a | GPU", "threads": None, "torch": "2.13", "cuda": "13.0", "python": "3.12"}
DTYPES = ("float32", "float16", "bfloat16")
PROBLEMS = {relu: relu.ReluProblem, linear: linear.LinearReluDivideProblem}
HEADLINE = [(kind, dtype) for kind in (relu, linear) for dtype in DTYPES]

# The type of the value of each key, one shape for each level of a file.
NUMBER = (int, float)
OR_NONE = type(None)
Shape = dict[str, type | tuple[type, ...]]

DOCUMENT: Shape = {
    "schema": int,
    "command": str,
    "kind": str,
    "date": str,
    "environment": dict,
    "records": list,
    "complete": bool,
}
RECORD: Shape = {
    "problem": str,
    "dtype": str,
    "shape": list,
    "verdict": str,
    "reason": str,
    "accuracy": str,
    "cases": int,
    "import_seconds": NUMBER,
    "walls": bool,
    "refused": list,
    "notes": list,
    "errors": list,
    "runs": list,
    "file": (str, OR_NONE),
}
ERRORS: Shape = {
    "name": str,
    "setting": str,
    "quantity": str,
    "solution_max": NUMBER,
    "solution_mean": NUMBER,
    "solution_relative": NUMBER,
    "reference_max": NUMBER,
    "reference_mean": NUMBER,
    "reference_relative": NUMBER,
}
RUN: Shape = {"setting": str, "time": str, "forward": dict, "step": (dict, OR_NONE)}
STEP: Shape = {
    "summary": dict,
    "seconds": dict,
    "wall_seconds": dict,
    "kept_bytes": dict,
    "notes": list,
}
FORWARD: Shape = {
    "unit": str,
    "work_unit": str,
    "yardstick": str,
    "work": int,
    "moved_bytes": int,
    "floor_seconds": NUMBER,
    "roofline_seconds": (float, OR_NONE),
    "summary": list,
    "seconds": dict,
    "wall_seconds": dict,
    "notes": list,
}
ROW: Shape = {
    "name": str,
    "role": str,
    "time": str,
    "median_ms": NUMBER,
    "p10_ms": NUMBER,
    "p90_ms": NUMBER,
    "ratio": NUMBER,
    "ratio_low": NUMBER,
    "ratio_high": NUMBER,
}
RATE: Shape = {**ROW, "rate": NUMBER, "percent_of_yardstick": NUMBER}


def check_types(values: dict, shape: Shape) -> None:
    """Assert that the keys are those of the shape, and each value is of its type."""
    assert values.keys() == shape.keys()
    for key, kind in shape.items():
        assert isinstance(values[key], kind), key


def check_shape(text: str) -> list[dict]:
    """Assert that a JSON file has the keys and types that all of them have, and is new.

    Returns:
        The file's records.
    """
    content = json.loads(text)
    check_types(content, DOCUMENT)
    assert content["schema"] == records.SCHEMA
    age = datetime.now(timezone.utc) - datetime.fromisoformat(content["date"])
    assert 0 <= age.total_seconds() < 600
    for found in content["records"]:
        check_types(found, RECORD)
        for row in found["errors"]:
            check_types(row, ERRORS)
        for timed in found["runs"]:
            check_types(timed, RUN)
            check_forward(timed["forward"])
            if timed["step"]:
                check_step(timed["step"])
    return content["records"]


def check_forward(forward: dict) -> None:
    """Assert that times, wall times and rows name the same contestants, and count equal rounds."""
    check_types(forward, FORWARD)
    for row in forward["summary"]:
        check_types(row, RATE)
    names = [row["name"] for row in forward["summary"]]
    assert list(forward["seconds"]) == list(forward["wall_seconds"]) == names
    assert len({len(seconds) for seconds in forward["seconds"].values()}) == 1


def check_step(step: dict) -> None:
    """Assert that a training step has rows and times of its two halves and of both."""
    check_types(step, STEP)
    assert [*step["summary"]] == [*step["seconds"]] == ["forward", "backward", "step"]
    for rows in step["summary"].values():
        for row in rows:
            check_types(row, ROW)


def timings(kind, ratio: float = 2.0, noise: float = 0.0) -> timing.Timings:
    """Make up the times of 20 rounds: eager takes 3 ms, and the solution 3 ms / ratio."""
    draw = random.Random(0)
    names = PROBLEMS[kind].names
    rate = PROBLEMS[kind].rate
    made = timing.Timings("cpu", names, rate, 6_000_000, floor=1e-3)
    typical = {names.solution: 3e-3 / ratio, names.eager: 3e-3, names.control: 3e-3}
    typical |= {COMPILED: 2.5e-3, rate.yardstick: 2e-3}
    for name, seconds in typical.items():
        made.set(name, [seconds * draw.uniform(1, 1 + noise) for _ in range(20)], [seconds] * 20)
    return made


def record(kind, dtype: str = "float32", ratio: float = 2.0, **about: str) -> dict:
    """Make up the record of a correct solution, or of one that `about` describes otherwise."""
    settings = ["highest", "high"] if (kind, dtype) == (linear, "float32") else [""]
    runs = [Run(setting, timings(kind, ratio)) for setting in settings]
    verdict = Verdict(Path(), count=7, import_seconds=1.5, runs=[] if about else runs, **about)
    subject = records.Subject(kind.__name__.split(".")[-1], dtype, (4, 8))
    return records.make_record(subject, verdict, None)


def document(found: list[dict], kind: str = "comparison") -> dict:
    """Make up a file's content with these records."""
    made = records.document("python run.py", kind, ABOUT)
    return {**made, "records": found, "date": "now"}
