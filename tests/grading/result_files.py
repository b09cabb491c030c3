"""The shape of the JSON files that run.py writes (referee/records.py), and a check of it."""

import json
from datetime import datetime, timezone

from referee import records

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
    "walls": (bool, OR_NONE),
    "details": str,
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
    """Assert that a JSON file has the shapes above, and is at most ten minutes old.

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
