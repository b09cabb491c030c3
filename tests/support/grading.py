"""Tables of files that run.py grades: by name the text, the verdict, and what the line says."""

import json
import os
from pathlib import Path

import pytest

import model
import run
from referee.tests.graded import check
from referee.tests.texts import IMPORTS, Table, module

ONLY = pytest.mark.skipif(
    os.environ.get("KERNELS_GRADING") != "1", reason="takes minutes: KERNELS_GRADING=1 runs it"
)


def linear(forward: str, init: str = "self.linear = nn.Linear(i, o)\nself.divisor = d") -> str:
    """Return the text of a module with the constructor of the linear problem's reference."""
    return module(forward, init, ", i, o, d")


PLAIN = module("return torch.relu(x)")
PLAIN_LINEAR = linear("return torch.relu(self.linear(x)) / self.divisor")


def grade(
    problem: str, table: Table, folder: Path, *options: str, device: str = "cpu"
) -> dict[str, dict]:
    """Grade the files of a table with `run.py`; check the verdicts and the lines.

    A line has the notes, the accuracy and the reason of a record, and "training step" if one was
    timed.

    Args:
        problem: the name of a problem of this project, or the text of a reference file.
        table: for each file its text or path, the expected verdict, and a pattern of its line.
        folder: where the files are written.
        *options: more options of `run.py`.
        device: where the files are graded.

    Returns:
        The record of each file.
    """
    if problem in model.PROBLEMS:
        against = [problem, "--rows", "3"]
    else:
        reference = folder / "reference.py"
        reference.write_text(IMPORTS + problem)
        against = ["--reference", str(reference)]
    files = []
    for name, (text_or_path, *_) in table.items():
        if isinstance(text_or_path, Path):
            file = text_or_path
        else:
            file = folder / f"{name}.py"
            file.write_bytes((IMPORTS + text_or_path).encode("latin-1"))
        files.append(str(file))
    verdicts = folder / "verdicts.json"
    options = ["--trials", "3", "--device", device, *options, "--json", str(verdicts)]
    status = run.main([*against, *options, "--solution", *files])
    records = dict(zip(table, json.loads(verdicts.read_text())["records"], strict=True))
    check(table, records)
    assert status == any(record["verdict"] != "correct" for record in records.values())
    return records
