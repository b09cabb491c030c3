"""Lets `run.py` grade a table of files (see `referee/testing/texts.py`), and checks the verdicts.

`grade` of `referee/testing/graded.py` does the same for reference files, without `run.py`.
"""

import json
import os
from pathlib import Path

import pytest

import model
import run
from referee.testing.graded import check
from referee.testing.texts import IMPORTS, Table

# Marks tests that take minutes. They run only if the environment has KERNELS_GRADING=1.
ONLY_ON_REQUEST = pytest.mark.skipif(
    os.environ.get("KERNELS_GRADING") != "1", reason="takes minutes: KERNELS_GRADING=1 runs it"
)


def grade_with_run_py(
    problem: str, table: Table, folder: Path, *options: str, device: str = "cpu"
) -> dict[str, dict]:
    """Grade the files of a table with `run.py`, and check the verdicts and the lines.

    Args:
        problem: the name of a problem of this project, or the text of a reference file.
        table: a row for each file, by the file's name.
        folder: where the files are written.
        *options: more options of `run.py`.
        device: where the files are graded.

    Returns:
        The record of each file, by its name in the table.
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
            # Each character becomes one byte, so that a table can have files that are not UTF-8.
            file.write_bytes((IMPORTS + text_or_path).encode("latin-1"))
        files.append(str(file))
    verdicts = folder / "verdicts.json"
    options = ["--trials", "3", "--device", device, *options, "--json", str(verdicts)]
    status = run.main([*against, *options, "--solution", *files])
    records = dict(zip(table, json.loads(verdicts.read_text())["records"], strict=True))
    check(table, records)
    all_correct = all(record["verdict"] == "correct" for record in records.values())
    assert status == (0 if all_correct else 1)
    return records
