"""Grades tables of files, see `texts`, and checks verdicts and what lines say."""

import re
from pathlib import Path

import torch
from texts import IMPORTS, Table

from referee import records
from referee.engine import Engine, read_files, referee_at_work
from referee.grading import Options
from referee.problem import Problem
from referee.reference_file import load
from referee.shared import dtype_name
from referee.timing import Rounds


def grade(
    problem: str,
    table: Table,
    folder: Path,
    trials: int = 3,
    timeout: float = 120.0,
    device: str = "cpu",
    walls: bool = True,
) -> dict[str, dict]:
    """Grade the files of a table; check verdicts, and what the lines say.

    Args:
        problem: the text of a reference file.
        table: of files.
        folder: where the files are written.
        trials: timed rounds.
        timeout: seconds for each file.
        device: on which.
        walls: whether processes get namespaces of their own, where the system allows it.

    Returns:
        The records by name.
    """
    (folder / "reference.py").write_text(IMPORTS + problem)
    paths = []
    for name, (text, *_) in table.items():
        path = text if isinstance(text, Path) else folder / f"{name}.py"
        if path is not text:
            path.write_bytes((IMPORTS + text).encode("latin-1"))
        paths.append(path)
    made = Problem("problem", load(folder / "reference.py"), torch.device(device))
    subject = records.Subject("problem", dtype_name(made.dtype), made.shape)
    options = Options(Rounds(trials), timeout)
    found = {}
    with referee_at_work(own_builds=True) as server:
        server.walls = walls
        engine = Engine(made, server, options, lambda *_: None)
        try:
            for name, file in zip(table, read_files(paths), strict=True):
                verdict = engine.grade(file)
                found[name] = records.make_record(subject, verdict, str(file.path))
        finally:
            engine.close()
    check(table, found)
    return found


def check(table: Table, found: dict[str, dict]) -> None:
    """Check verdicts and what lines say: notes, accuracy, reason, whether a step was timed."""
    bad = {}
    for name, (_, word, words) in table.items():
        record = found[name]
        line = "; ".join([*record["notes"], record["accuracy"], record["reason"]])
        if any(timed["step"] for timed in record["runs"]):
            line += "; training step"
        if not (re.fullmatch(word, record["verdict"]) and re.search(words, line)):
            bad[name] = f"{record['verdict']}: {line}"
        assert record["verdict"] == "correct" or not record["runs"]
    assert not bad, bad
