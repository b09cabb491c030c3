"""The shape of the files of results, and results made up for tests."""

import json
import random
from datetime import datetime, timezone
from pathlib import Path

from problems import linear_relu_divide as linear
from problems import relu
from referee import records, timing
from referee.names import COMPILED
from referee.verdict import Run, Verdict

ABOUT = {"device": "a | GPU", "threads": None, "torch": "2.13", "cuda": "13.0", "python": "3.12"}
DTYPES = ("float32", "float16", "bfloat16")
PROBLEMS = {relu: relu.ReluProblem, linear: linear.LinearReluDivideProblem}
HEADLINE = [(kind, dtype) for kind in (relu, linear) for dtype in DTYPES]
NUMBER, NONE = (int, float), type(None)


def typed(**names: str) -> dict:
    """The type of each key: names of keys by the name of their type."""
    kinds = {"int": int, "str": str, "list": list, "dict": dict, "number": NUMBER, "bool": bool}
    return {name: kinds[kind] for kind, of in names.items() for name in of.split()}


DOCUMENT = typed(int="schema", str="command kind date", dict="environment", list="records")
DOCUMENT |= typed(bool="complete")
RECORD = typed(str="problem dtype verdict reason accuracy", int="cases", number="import_seconds")
RECORD |= typed(list="shape refused notes errors runs") | {"file": (str, NONE)}
ERRORS = {f"{who}_{what}": NUMBER for who in ("solution", "reference") for what in ("max", "mean")}
ERRORS |= typed(str="name", number="solution_relative reference_relative")
RUN = typed(str="setting time", dict="forward") | {"step": (dict, NONE)}
STEP = typed(dict="summary seconds wall_seconds kept_bytes", list="notes")
FORWARD = typed(str="unit work_unit yardstick", int="work moved_bytes", number="floor_seconds")
FORWARD |= typed(list="summary notes", dict="seconds wall_seconds")
FORWARD |= {"roofline_seconds": (float, NONE)}
ROW = typed(number="median_ms p10_ms p90_ms ratio ratio_low ratio_high", str="name role said")
RATE = ROW | typed(number="rate percent_of_yardstick")


def check_types(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for key, kind in wanted.items():
        assert isinstance(got[key], kind), key


def check_shape(text: str) -> list[dict]:
    """The one shape of every JSON file; its records."""
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
            forward, step = timed["forward"], timed["step"]
            check_types(forward, FORWARD)
            for row in forward["summary"]:
                check_types(row, RATE)
            names = [row["name"] for row in forward["summary"]]
            assert list(forward["seconds"]) == list(forward["wall_seconds"]) == names
            assert len({len(seconds) for seconds in forward["seconds"].values()}) == 1
            if step:
                check_types(step, STEP)
                assert [*step["summary"]] == [*step["seconds"]] == ["forward", "backward", "step"]
                for row in (row for rows in step["summary"].values() for row in rows):
                    check_types(row, ROW)
    return content["records"]


def timings(kind, ratio: float = 2.0, noise: float = 0.0) -> timing.Timings:
    """Times of 20 rounds: eager takes 3 ms, the solution that much less."""
    draw, names, rate = random.Random(0), PROBLEMS[kind].names, PROBLEMS[kind].rate
    made = timing.Timings("cpu", names, rate, 6_000_000, floor=1e-3)
    typical = {names.solution: 3e-3 / ratio, names.eager: 3e-3, names.again: 3e-3}
    typical |= {COMPILED: 2.5e-3, rate.yardstick: 2e-3}
    made.start(typical)
    for _ in range(20):
        made.add({k: (v * draw.uniform(1, 1 + noise), v) for k, v in typical.items()})
    return made


def record(kind, dtype: str = "float32", ratio: float = 2.0, **about: str) -> dict:
    """That of a right solution, unless it is said what else it is."""
    settings = ["highest", "high"] if (kind, dtype) == (linear, "float32") else [""]
    runs = [Run(setting, timings(kind, ratio)) for setting in settings]
    verdict = Verdict(Path(), count=7, import_seconds=1.5, runs=[] if about else runs, **about)
    subject = records.Subject(kind.__name__.split(".")[-1], dtype, (4, 8))
    return records.record(subject, verdict, None)


def document(found: list[dict], kind: str = "comparison") -> dict:
    made = records.document("python run.py", kind, ABOUT)
    return {**made, "records": found, "date": "now"}
