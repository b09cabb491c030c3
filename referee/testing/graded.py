"""Grades a table of files (see `texts.py`) in this process, and checks the verdicts and lines."""

import re
from pathlib import Path

import pytest
import torch

from referee import engine, records
from referee.contestants.forms import dtype_name
from referee.grading import Options
from referee.reference.file import load
from referee.reference.problem import Problem
from referee.resources import Resources
from referee.testing.texts import IMPORTS, Table
from referee.times.round_limit import RoundLimit


def grade(
    problem_text: str,
    table: Table,
    folder: Path,
    trials: int = 3,
    timeout: float = 120.0,
    device: str = "cpu",
    walls: bool = True,
) -> dict[str, dict]:
    """Write and grade the files of a table, and `check` their records.

    Args:
        problem_text: the text of a reference file.
        table: the rows by name.
        folder: where the files are written.
        trials: how many rounds are timed.
        timeout: seconds that each file may run.
        device: where solutions compute.
        walls: whether contestants get namespaces of their own, if the system allows that.

    Returns:
        The record of each file, by name.
    """
    reference_path = folder / "reference.py"
    reference_path.write_text(IMPORTS + problem_text)
    paths = []
    for name, (text_or_path, *_) in table.items():
        if isinstance(text_or_path, Path):
            paths.append(text_or_path)
        else:
            path = folder / f"{name}.py"
            path.write_text(IMPORTS + text_or_path)
            paths.append(path)
    problem = Problem("problem", load(reference_path), torch.device(device))
    subject = records.Subject("problem", dtype_name(problem.dtype), problem.shape)
    options = Options(RoundLimit(trials), timeout)
    record_of = {}
    with engine.referee_at_work(separate_builds=True) as server:
        server.gives_walls = walls
        grader = engine.Engine(problem, server, options, lambda *_: None)
        try:
            for name, file in zip(table, engine.read_files(paths), strict=True):
                verdict = grader.grade(file)
                record_of[name] = records.make_record(subject, verdict, str(file.path))
        finally:
            grader.close()
    check(table, record_of)
    return record_of


def remember_resources(monkeypatch: pytest.MonkeyPatch) -> list[Resources]:
    """Return a list to which the resources of all engines that are made later are added."""
    all_resources = []

    def make_resources(*arguments: object) -> Resources:
        all_resources.append(Resources(*arguments))
        return all_resources[-1]

    monkeypatch.setattr(engine, "Resources", make_resources)
    return all_resources


def quick_and_slow(table: Table, *quick: str) -> list:
    """Return a table in two parts, as parameters of a test. The second one is left out by default.

    Args:
        table: the rows by name.
        quick: the names of the rows in the first part.
    """
    first = {name: table[name] for name in quick}
    second = {name: row for name, row in table.items() if name not in first}
    return [
        pytest.param(first, id=", ".join(first)),
        pytest.param(second, id="others", marks=pytest.mark.slow),
    ]


def check(table: Table, record_of: dict[str, dict]) -> None:
    """Assert that each record has the verdict and the line of its row.

    The line is the reason, if there is one. That of a correct file has the record's notes and
    accuracy, and "training step" if one was timed. A file that is not correct has no times.

    Args:
        table: the rows by name.
        record_of: the record of each file, by the same names.
    """
    failures = {}
    for name, (_, verdict_pattern, line_pattern) in table.items():
        record = record_of[name]
        verdict = record["verdict"]
        line = record["reason"] or "; ".join([*record["notes"], record["accuracy"]])
        if any(run["step"] for run in record["runs"]):
            line += "; training step"
        if not (re.fullmatch(verdict_pattern, verdict) and re.search(line_pattern, line)):
            failures[name] = f"{verdict}: {line}"
        assert verdict == "correct" or not record["runs"]
    assert not failures, failures
