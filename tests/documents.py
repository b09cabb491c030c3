"""The shape of the files of results, and results made up for tests."""

import json
import random
from datetime import datetime, timezone

from referee import linear_relu_divide as linear
from referee import records, relu, timing
from referee.correctness import Checks
from referee.outcome import Outcome, Run

ABOUT = {"device": "a | GPU", "threads": None, "torch": "2.13", "cuda": "13.0", "python": "3.12"}
NUMBER = (int, float)


def typed(**names) -> dict:
    """The type of each key: names of keys by the name of their type."""
    kinds = {"int": int, "str": str, "list": list, "dict": dict, "number": NUMBER}
    return {name: kinds[kind] for kind, of in names.items() for name in of.split()}


DOCUMENT = typed(int="schema", str="command kind date", dict="environment", list="records")
DOCUMENT |= {"complete": bool}
RECORD = typed(str="problem dtype verdict reason accuracy", int="cases", number="import_seconds")
RECORD |= typed(list="shape refused notes errors runs") | {"file": (str, type(None))}
RUN = typed(str="setting time", dict="forward") | {"step": (dict, type(None))}
STEP = typed(dict="summary seconds wall_seconds kept_bytes", list="problems notes")
FORWARD = typed(str="unit work_unit yardstick", int="work", number="floor_seconds")
FORWARD |= typed(list="summary problems notes", dict="seconds wall_seconds")
FORWARD |= {"roofline_seconds": (float, type(None))}
ROW = typed(number="median_ms p10_ms p90_ms ratio ratio_low ratio_high", str="name role")


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
    for record in content["records"]:
        check_types(record, RECORD)
        for timed in record["runs"]:
            check_types(timed, RUN)
            forward = timed["forward"]
            check_types(forward, FORWARD)
            for row in forward["summary"]:
                check_types(row, ROW | {"rate": NUMBER, "percent_of_yardstick": NUMBER})
            names = [row["name"] for row in forward["summary"]]
            assert list(forward["seconds"]) == list(forward["wall_seconds"]) == names
            assert len({len(seconds) for seconds in forward["seconds"].values()}) == 1
            if timed["step"]:
                check_types(timed["step"], STEP)
                for rows in timed["step"]["summary"].values():
                    for row in rows:
                        check_types(row, ROW)
    return content["records"]


def timings(kind, ratio: float = 2.0, noise: float = 0.0) -> timing.Timings:
    """Times of 20 rounds: eager takes 3 ms, the solution that much less."""
    draw = random.Random(0)
    made = timing.Timings("cpu", kind.NAMES, kind.RATE, 6_000_000, floor=1e-3)
    names = kind.NAMES
    typical = {
        names.solution: 3e-3 / ratio,
        names.eager: 3e-3,
        names.again: 3e-3,
        timing.COMPILED: 2.5e-3,
        kind.RATE.yardstick: 2e-3,
    }
    made.start(typical)
    for _ in range(20):
        made.add({k: (v * draw.uniform(1, 1 + noise), v) for k, v in typical.items()})
    return made


def record(kind, dtype: str = "float32", ratio: float = 2.0) -> dict:
    """That of a right solution."""
    problem, settings = {
        relu: ("relu", [""]),
        linear: ("linear_relu_divide", ["highest", "high"] if dtype == "float32" else [""]),
    }[kind]
    facts = {"problem": problem, "shape": (4, 8), "dtype": dtype}
    runs = [Run(setting, timings(kind, ratio)) for setting in settings]
    return records.of_outcome(facts, Outcome(Checks(7), [], runs), 1.5)


def document(found: list[dict], kind: str = "comparison") -> dict:
    return records.Document("python run.py", kind, ABOUT, found, date="now").content()


HEADLINE = [(kind, d) for kind in (relu, linear) for d in ("float32", "float16", "bfloat16")]
