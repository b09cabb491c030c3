"""Results as run.py writes them, made up for tests of tables, pictures and pages."""

import random
from pathlib import Path

from problems import linear_relu_divide as linear
from problems import relu
from referee import records
from referee.call_names import COMPILED
from referee.times.timings import TimesOfSetting, Timings
from referee.verdict import Verdict

ABOUT = {"device": "a | GPU", "threads": None, "torch": "2.13", "cuda": "13.0", "python": "3.12"}
DTYPES = ("float32", "float16", "bfloat16")
# By the module that defines the problem.
PROBLEMS = {relu: relu.ReluProblem, linear: linear.LinearReluDivideProblem}
HEADLINE = [(module, dtype) for module in (relu, linear) for dtype in DTYPES]


def timings(module, ratio: float = 2.0, noise: float = 0.0) -> Timings:
    """Make up the times of 20 rounds: eager takes 3 ms, and the solution 3 ms / ratio."""
    draw = random.Random(0)
    names = PROBLEMS[module].names
    rate = PROBLEMS[module].limiting_rate
    made = Timings("cpu", names, rate, 6_000_000, floor=1e-3)
    typical = {names.solution: 3e-3 / ratio, names.eager: 3e-3, names.control: 3e-3}
    typical |= {COMPILED: 2.5e-3, rate.yardstick: 2e-3}
    for name, seconds in typical.items():
        made.set(name, [seconds * draw.uniform(1, 1 + noise) for _ in range(20)], [seconds] * 20)
    return made


def record(module, dtype: str = "float32", ratio: float = 2.0, **about: str) -> dict:
    """Make up the record of a solution that is correct and timed.

    `about` has fields of a `Verdict` that is not correct; the record then has no times.
    """
    settings = ["highest", "high"] if (module, dtype) == (linear, "float32") else [""]
    times = [TimesOfSetting(setting, timings(module, ratio)) for setting in settings]
    verdict = Verdict(
        Path(), case_count=7, import_seconds=1.5, times=[] if about else times, **about
    )
    subject = records.Subject(module.__name__.split(".")[-1], dtype, (4, 8))
    return records.make_record(subject, verdict, None)


def document(found: list[dict], kind: str = "comparison") -> dict:
    """Make up a file's content with these records."""
    made = records.document("python run.py", kind, ABOUT)
    return {**made, "records": found, "date": "now"}
