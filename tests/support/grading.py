"""Tables of files that run.py grades: by name the text, the verdict, and what the line says."""

import json
import os
import sys
from pathlib import Path

import pytest

import model
import run

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "referee" / "tests"))
from graded import check
from texts import IMPORTS, Table, module

ONLY = pytest.mark.skipif(
    os.environ.get("KERNELS_GRADING") != "1", reason="takes minutes: KERNELS_GRADING=1 runs it"
)


def linear(forward: str, init: str = "self.linear = nn.Linear(i, o)\nself.divisor = d") -> str:
    """A module that stands in for the linear problem's."""
    return module(forward, init, ", i, o, d")


PLAIN = module("return torch.relu(x)")
PLAIN_LINEAR = linear("return torch.relu(self.linear(x)) / self.divisor")


def grade(
    problem: str, table: Table, folder: Path, *options: str, device: str = "cpu"
) -> dict[str, dict]:
    """Grade the files of a table; check verdicts and what the lines say.

    A line holds notes, accuracy and reason, and "training step" where one was timed.

    Args:
        problem: one of this project's, or the text of a reference file.
        table: by name, the text or path of a file, its verdict, and a pattern of its line.
        folder: where the files are written.
        *options: more options of `run.py`.
        device: where the files are graded.

    Returns:
        The records by name.
    """
    path = folder / "verdicts.json"
    what = [problem, "--rows", "3"]
    files = []
    if problem not in model.PROBLEMS:
        what = ["--reference", str(folder / "reference.py")]
        (folder / "reference.py").write_text(IMPORTS + problem)
    for name, (text, *_) in table.items():
        files.append(text if isinstance(text, Path) else folder / f"{name}.py")
        if text is not files[-1]:
            files[-1].write_bytes((IMPORTS + text).encode("latin-1"))
    options = ["--trials", "3", "--device", device, *options, "--json", str(path)]
    status = run.main([*what, *options, "--solution", *map(str, files)])
    records = dict(zip(table, json.loads(path.read_text())["records"], strict=True))
    check(table, records)
    assert status == any(record["verdict"] != "correct" for record in records.values())
    return records
