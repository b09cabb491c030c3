"""Folders of references and solutions: paired by name, graded by workers, summed up.

A solution goes with the reference of its own name, or of KernelBench's: the solution
`level_1_problem_19_sample_0_kernel.py` goes with `level1/19_ReLU.py`. With `--out FILE` a line of
JSON is appended as each verdict comes, and a second run goes on where the first has ended. With
`--devices` each device has a worker, a process of its own that takes one problem after the other.
"""

import argparse
import csv
import io
import json
import multiprocessing
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import geometric_mean

import torch

from referee import console, records
from referee.engine import Engine, read_files, referee_at_work
from referee.grading import GradedFile, Options
from referee.problem import Problem
from referee.records import Subject
from referee.reference_file import BadReferenceError, first_error_line, load
from referee.report import by_role, files, tables
from referee.shared import dtype_name
from referee.verdict import ERROR, FoundError, Verdict

# KernelBench's names: of a problem's file, and of a sample for it.
PROBLEM_NAME = re.compile(r"level_?(\d+)/(\d+)_[^/]*\.py$")
SAMPLE_NAME = re.compile(r"level_?(\d+)_problem_(\d+)_")
NOT_GRADED = "not graded"


@dataclass(frozen=True)
class Work:
    """A problem, and the solutions that go with it.

    Attributes:
        name: of the problem: its path within the folder of references.
        reference: its file.
        solutions: the files, read before any of them runs.
    """

    name: str
    reference: Path
    solutions: list[GradedFile]


def is_folder(args: argparse.Namespace) -> bool:
    """Return whether the command is about folders."""
    return bool(args.reference) and args.reference.is_dir()


def pair(references: Path, solutions: list[Path]) -> tuple[dict[Path, list[Path]], list[Path]]:
    """Return the solutions that go with each reference, and those that go with none.

    Args:
        references: a folder.
        solutions: files and folders.
    """
    problems = sorted(references.rglob("*.py"))
    by_name = {path.relative_to(references).as_posix(): path for path in problems}
    by_stem: dict[str, list[Path]] = {}
    by_number = {}
    for path in problems:
        by_stem.setdefault(path.stem, []).append(path)
        if found := PROBLEM_NAME.search(path.resolve().as_posix()):
            by_number[found.groups()] = path
    paired: dict[Path, list[Path]] = {}
    alone = []
    for base, path in _solution_files(solutions):
        problem = by_name.get(path.relative_to(base).as_posix())
        if problem is None and len(by_stem.get(path.stem, [])) == 1:
            problem = by_stem[path.stem][0]
        if problem is None and (found := SAMPLE_NAME.search(path.name)):
            problem = by_number.get(found.groups())
        if problem is None:
            alone.append(path)
        else:
            paired.setdefault(problem, []).append(path)
    return paired, alone


def _solution_files(solutions: list[Path]) -> Iterator[tuple[Path, Path]]:
    """Return each solution with the folder that its name is relative to."""
    for path in solutions:
        if path.is_dir():
            for file in sorted(path.rglob("*.py")):
                yield path, file
        else:
            yield path.parent, path


def grade(
    args: argparse.Namespace,
    device: torch.device,
    why: str,
    options: Options,
    progress: console.Progress,
) -> int:
    """Grade folders; return the exit status.

    Args:
        args: the command's options.
        device: where solutions compute, unless `--devices` names several.
        why: that is no GPU, for the first line.
        options: the conditions.
        progress: says what is being done.
    """
    paired, alone = pair(args.reference, args.solution)
    for path in alone:
        console.say(f"{path}: no reference has its name or number; not graded")
    found = _read_out(args.out) if args.out else []
    done = {record["file"] for record in found}
    work = _work(paired, args.reference, done)
    about = records.environment(device)
    console.show(tables.headline(about, device, why))
    count = sum(len(w.solutions) for w in work)
    if done:
        console.show(f"{len(done)} verdicts are in {args.out}; {count} files are left")
    devices = args.devices or [str(device)]
    try:
        for record in _graded(work, devices, options, progress):
            progress.clear()
            found.append(record)
            if args.out:
                _append(args.out, record)
            console.show(_line(record))
    finally:
        progress.clear()
        if found:
            console.show(f"\n{summary(found)}")
            if args.csv:
                files.write(args.csv, as_csv(found))
            if args.json:
                document = records.document(" ".join(map(str, args.solution)), "grading", about)
                document["records"] = found
                files.write(args.json, json.dumps(document, indent=1) + "\n")
    return 0 if all(record["verdict"] == "correct" for record in found) and not alone else 1


def _work(paired: dict[Path, list[Path]], references: Path, done: set[str]) -> list[Work]:
    """Return the problems that have solutions left, the files read."""
    found = []
    for reference, solutions in paired.items():
        left = [path for path in solutions if str(path) not in done]
        if left:
            name = reference.relative_to(references).with_suffix("").as_posix()
            found.append(Work(name, reference, read_files(left)))
    return found


def _graded(
    work: list[Work], devices: list[str], options: Options, progress: console.Progress
) -> Iterator[dict]:
    """Yield records as verdicts come, from here or from a worker for each device."""
    if len(devices) == 1:
        device = _device(devices[0])
        for one in work:
            yield from grade_one(one, device, options, progress)
        return
    context = multiprocessing.get_context("spawn")  # CUDA allows no fork
    waiting = list(work)
    workers: dict[Connection, multiprocessing.Process] = {}
    for device in devices:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work_off, args=(theirs, device, options))
        process.start()
        theirs.close()
        workers[ours] = process
    try:
        yield from _collect(workers, waiting)
    finally:
        for connection, process in workers.items():
            connection.close()
            process.join(timeout=5)
            process.kill()


def _device(name: str) -> torch.device:
    """Return a device with the index that its tensors have."""
    device = torch.device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    return torch.device(device.type, device.index or 0)


def _collect(workers: dict, waiting: list[Work]) -> Iterator[dict]:
    """Give each worker a problem when it has none; yield what they find."""
    busy = {}
    idle = list(workers)
    while waiting or busy:
        while idle and waiting:
            connection = idle.pop()
            busy[connection] = waiting.pop(0)
            connection.send(busy[connection])
        for connection in wait(list(busy)):
            try:
                record = connection.recv()
            except EOFError:  # the worker has ended
                lost = busy.pop(connection)
                console.say(f"the worker for {lost.name} has ended; its files are not graded")
                continue
            if record is None:
                del busy[connection]
                idle.append(connection)
            else:
                yield record
        if not busy and not idle:
            return


def _work_off(connection: Connection, device: str, options: Options) -> None:
    """Do what a worker's process does: take problems, send records, None after each problem."""
    there = _device(device)
    if there.type == "cuda":
        torch.cuda.set_device(there)
    while True:
        try:
            work = connection.recv()
        except EOFError:
            return
        for record in grade_one(work, there, options, lambda *_: None):
            connection.send(record)
        connection.send(None)


def grade_one(
    work: Work, device: torch.device, options: Options, progress: console.Progress
) -> Iterator[dict]:
    """Yield the records of the solutions of one problem."""
    subject = Subject(work.name, "", ())
    progress(f"{work.name}: running the reference")
    try:
        problem = Problem(work.name, load(work.reference), device)
    except (BadReferenceError, torch.OutOfMemoryError) as bad:
        reason = first_error_line(str(bad))
        for file in work.solutions:
            yield records.record(subject, Verdict(file.path, NOT_GRADED, reason), str(file.path))
        return
    subject = Subject(work.name, dtype_name(problem.dtype), problem.shape)
    with referee_at_work(own_builds=True) as server:
        engine = Engine(problem, server, options, progress)
        try:
            engine.prepare()
            for file in work.solutions:
                yield records.record(subject, engine.grade(file), str(file.path))
        except (FoundError, BadReferenceError, torch.OutOfMemoryError) as failed:
            for file in work.solutions:
                verdict = Verdict(file.path, ERROR, str(failed.args[-1]))
                yield records.record(subject, verdict, str(file.path))
        finally:
            engine.close()


def _append(path: Path, record: dict) -> None:
    """Append a record as one line, on disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _read_out(path: Path) -> list[dict]:
    """Return the records of an earlier run; a line that it could not finish is cut off."""
    if not path.exists():
        return []
    found, good = [], 0
    data = path.read_bytes()
    for line in data.splitlines(keepends=True):
        try:
            found.append(json.loads(line))
        except ValueError:
            break
        if not line.endswith(b"\n"):
            found.pop()
            break
        good += len(line)
    if good < len(data):
        os.truncate(path, good)
    return found


def _line(record: dict) -> str:
    return f"{record['problem']}: {tables.line(record)}"


COLUMNS = ("problem", "file", "verdict", "ms", "speedup", "low", "high", "time", "of_light")
COLUMNS += ("step_speedup", "reason")


def rows(found: list[dict]) -> list[dict]:
    """Return one row a file, sorted by problem, with the keys COLUMNS."""
    made = []
    for record in sorted(found, key=lambda record: (record["problem"], str(record["file"]))):
        row = dict.fromkeys(COLUMNS, "")
        row |= {key: record[key] for key in ("problem", "file", "verdict", "reason")}
        if record["runs"]:
            row |= _times(record["runs"][0])
        made.append(row)
    return made


def _times(run: dict) -> dict:
    """Return the cells of a row that come from its times."""
    ours = by_role(run["forward"]["summary"], "solution")
    cells = {
        "ms": f"{ours['median_ms']:.4g}",
        "speedup": f"{ours['ratio']:.3f}",
        "low": f"{ours['ratio_low']:.3f}",
        "high": f"{ours['ratio_high']:.3f}",
        "time": run["time"],
    }
    floor = run["forward"]["floor_seconds"]
    if floor:
        cells["of_light"] = f"{100 * floor / (ours['median_ms'] * 1e-3):.1f}%"
    if run["step"]:
        cells["step_speedup"] = (
            f"{by_role(run['step']['summary']['step'], 'solution')['ratio']:.3f}"
        )
    return cells


def as_csv(found: list[dict]) -> str:
    """Return the table as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS)
    writer.writeheader()
    writer.writerows(rows(found))
    return out.getvalue()


def summary(found: list[dict]) -> str:
    """Return the table, and the summary that the field reads."""
    graded = [record for record in found if record["verdict"] != NOT_GRADED]
    names = ["file", "problem", "verdict", "ms", "speedup", "time", "of_light", "step_speedup"]
    table = [names] + [[str(row[name]) for name in names] for row in rows(found)]
    lines = [tables.table(table)]
    if graded:
        lines.append(tables.scores(graded))
    light = [float(row["of_light"][:-1]) for row in rows(found) if row["of_light"]]
    if light:
        mean = geometric_mean(light)
        lines.append(f"share of the speed of light, geometric mean of {len(light)}: {mean:.1f}%")
    left = len(found) - len(graded)
    if left:
        lines.append(f"{left} files not graded, for their references cannot be")
    return "\n".join(lines)
