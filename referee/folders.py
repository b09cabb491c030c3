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
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
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
LONGEST_END = 10  # s that a worker may take to end what it has started
# A line of `--out` has these keys at least, and begins with the first of them.
KEYS = {"problem", "file", "verdict", "reason", "runs"}
START = b'{"problem": '


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


@dataclass(frozen=True)
class Job:
    """The work of a command about folders.

    Attributes:
        args: the command's options.
        earlier: the records that an earlier run left in `--out`.
        work: problems with solutions that have no verdict yet.
        alone: solutions that go with no problem.
    """

    args: argparse.Namespace
    earlier: list[dict]
    work: list[Work]
    alone: list[Path]


def is_folder(args: argparse.Namespace) -> bool:
    """Return whether the command is about folders."""
    return bool(args.reference) and args.reference.is_dir()


def pair(references: Path, solutions: list[Path]) -> tuple[dict[Path, list[Path]], list[Path]]:
    """Return the solutions that go with each reference, and those that go with none.

    Args:
        references: a folder.
        solutions: files and folders; a file that is named twice is taken once.
    """
    problems = sorted(path for path in references.rglob("*.py") if path.is_file())
    by_name = {path.relative_to(references).as_posix(): path for path in problems}
    by_stem: dict[str, list[Path]] = {}
    by_number: dict[tuple, list[Path]] = {}  # KernelBench's level and number
    for path in problems:
        by_stem.setdefault(path.stem, []).append(path)
        if numbers := PROBLEM_NAME.search(path.resolve().as_posix()):
            by_number.setdefault(numbers.groups(), []).append(path)
    paired: dict[Path, list[Path]] = {}
    alone = []
    for base, path in _solution_files(solutions):
        problem = by_name.get(path.relative_to(base).as_posix())
        if problem is None:
            problem = _only_one(by_stem.get(path.stem, []))
        if problem is None and (numbers := SAMPLE_NAME.search(path.name)):
            problem = _only_one(by_number.get(numbers.groups(), []))
        if problem is None:
            alone.append(path)
        else:
            paired.setdefault(problem, []).append(path)
    return paired, alone


def _only_one(paths: list[Path]) -> Path | None:
    """Return the path of a list of one, else None."""
    return paths[0] if len(paths) == 1 else None


def _solution_files(solutions: list[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield each solution once, after the folder that its name is relative to."""
    seen = set()
    for path in solutions:
        base, inside = path.parent, [path]
        if path.is_dir():
            base, inside = path, sorted(file for file in path.rglob("*.py") if file.is_file())
        for file in inside:
            if _absolute(file) not in seen:
                seen.add(_absolute(file))
                yield base, file


def _absolute(path: Path | str) -> str:
    """Return the absolute path without "..", to compare files; links are not followed."""
    return os.path.abspath(path)  # noqa: PTH100, Path.absolute leaves "..", resolve follows links


def find_work(args: argparse.Namespace) -> Job:
    """Return the problems and solutions to grade; all files are read here.

    Raises:
        ValueError: `--out` names a file of something else, or a solution cannot be read.
    """
    paired, alone = pair(args.reference, args.solution)
    earlier = read_out(args.out) if args.out else []
    done = {(record["problem"], _absolute(record["file"])) for record in earlier}
    return Job(args, earlier, _work(paired, args.reference, done), alone)


def grade(
    job: Job,
    devices: list[torch.device],
    options: Options,
    document: dict,
    progress: console.Progress,
) -> int:
    """Grade folders; return the exit status.

    Args:
        job: what is to be done.
        devices: where solutions compute; each of several has a worker.
        options: the conditions.
        document: the JSON file's content, which takes in the records.
        progress: says what is being done.
    """
    found = document["records"]
    found += job.earlier
    count = sum(len(one.solutions) for one in job.work)
    whole = len(found) + count
    for path in job.alone:
        console.say(f"{path}: no reference has its name or number; not graded")
    if job.earlier:
        console.show(f"{len(found)} verdicts are in {job.args.out}; {count} files are left")
    is_written = False
    try:
        with closing(_graded(job.work, devices, options, progress)) as graded:
            for record in graded:
                progress.clear()
                found.append(record)
                if job.args.out:
                    _append(job.args.out, record)
                console.show(_line(record, len(found), whole))
    finally:
        progress.clear()
        document["complete"] = len(found) == whole
        is_written = _report(job.args, document)
    if not document["complete"]:
        console.say(f"{whole - len(found)} files have no verdict")
    are_correct = all(record["verdict"] == "correct" for record in found)
    is_fine = are_correct and document["complete"] and is_written and not job.alone
    return 0 if is_fine else 1


def _report(args: argparse.Namespace, document: dict) -> bool:
    """Print the summary, write the files that were asked for; return whether that was possible."""
    found = document["records"]
    is_written = True
    if found:
        console.show(f"\n{summary(found)}")
        if args.csv:
            is_written = files.try_to_write(args.csv, as_csv(found))
    if args.json:
        is_written = files.try_to_write(args.json, records.as_json(document)) and is_written
    return is_written


def _work(paired: dict[Path, list[Path]], references: Path, done: set[tuple]) -> list[Work]:
    """Return the problems that have solutions left, the files read."""
    work = []
    for reference, solutions in paired.items():
        name = reference.relative_to(references).with_suffix("").as_posix()
        left = [path for path in solutions if (name, _absolute(path)) not in done]
        try:
            if left:
                work.append(Work(name, reference, read_files(left)))
        except OSError as error:
            raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
    return work


def _graded(
    work: list[Work], devices: list[torch.device], options: Options, progress: console.Progress
) -> Iterator[dict]:
    """Yield records as verdicts come, from here or from a worker for each device."""
    if len(devices) == 1:
        for one in work:
            yield from grade_one(one, devices[0], options, progress)
        return
    context = multiprocessing.get_context("spawn")  # CUDA allows no fork
    workers: dict[Connection, BaseProcess] = {}
    try:
        for device in devices:
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_worker, args=(theirs, str(device), options))
            process.start()
            theirs.close()
            workers[ours] = process
        yield from _collect(list(workers), shared_out(work, len(devices)), progress)
    finally:
        for connection, process in workers.items():
            connection.close()
            process.terminate()  # a KeyboardInterrupt there: it ends what it has started
        for process in workers.values():
            process.join(timeout=LONGEST_END)
            process.kill()


def shared_out(work: list[Work], devices: int) -> list[Work]:
    """Return the work so divided that all devices have about as many problems.

    The last problems, which would leave some devices idle, are divided among all devices: of five
    problems, two devices grade two each, and half of the fifth's solutions. Each device times eager
    itself.
    """
    last = len(work) - len(work) % devices
    divided = work[:last]
    for one in work[last:]:
        parts = [one.solutions[device::devices] for device in range(devices)]
        divided += [replace(one, solutions=part) for part in parts if part]
    return divided


def _collect(
    idle: list[Connection], waiting: list[Work], progress: console.Progress
) -> Iterator[dict]:
    """Give each worker a problem when it has none; yield what they find."""
    busy: dict[Connection, Work] = {}
    while busy or (idle and waiting):
        while idle and waiting:
            connection, work = idle.pop(), waiting.pop(0)
            busy[connection] = work
            with suppress(BrokenPipeError):  # it has ended, which `recv` tells
                connection.send(work)
        names = ", ".join(sorted(work.name for work in busy.values()))
        progress(f"grading {names}; {len(waiting)} more problems")
        for connection in wait(list(busy)):
            try:
                record = connection.recv()
            except (EOFError, ConnectionResetError):  # the worker has ended
                lost = busy.pop(connection)
                console.say(f"the worker for {lost.name} has ended")
                continue
            if record is None:
                del busy[connection]
                idle.append(connection)
            else:
                yield record


def _run_worker(connection: Connection, device: str, options: Options) -> None:
    """Run a worker: receive problems, send their records, and None after each problem.

    Ctrl-C reaches all processes of a terminal. The command alone answers it: it terminates its
    workers, which then end what they have started.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    there = torch.device(device)
    if there.type == "cuda":
        torch.cuda.set_device(there)
    with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):  # the command has ended
        while True:
            work = connection.recv()
            for record in grade_one(work, there, options, lambda *_: None):
                connection.send(record)
            connection.send(None)


def grade_one(
    work: Work, device: torch.device, options: Options, progress: console.Progress
) -> Iterator[dict]:
    """Yield the records of the solutions of one problem, one for each."""
    progress(f"{work.name}: running the reference")
    try:
        problem = Problem(work.name, load(work.reference), device)
    except (BadReferenceError, OSError, torch.OutOfMemoryError) as bad:
        reason = first_error_line(str(bad))
        yield from _same_for_all(work, Subject(work.name, "", ()), NOT_GRADED, reason)
        return
    subject = Subject(work.name, dtype_name(problem.dtype), problem.shape)
    with referee_at_work(own_builds=True) as server:
        engine = Engine(problem, server, options, progress)
        try:
            reason = _why_not_prepared(engine)
            if reason:
                yield from _same_for_all(work, subject, ERROR, reason)
                return
            for file in work.solutions:
                yield records.record(subject, engine.grade(file), str(file.path))
        finally:
            engine.close()


def _why_not_prepared(engine: Engine) -> str:
    """Time eager alone; return why that is not possible, or ""."""
    try:
        engine.prepare()
    except (FoundError, BadReferenceError, torch.OutOfMemoryError) as failed:
        return first_error_line(str(failed.args[-1]))
    return ""


def _same_for_all(work: Work, subject: Subject, word: str, reason: str) -> Iterator[dict]:
    """Yield a record with the same verdict for each solution of a problem."""
    for file in work.solutions:
        yield records.record(subject, Verdict(file.path, word, reason), str(file.path))


def _append(path: Path, record: dict) -> None:
    """Append a record as one line, on disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_out(path: Path) -> list[dict]:
    """Return the records of an earlier run; a last line that it could not finish is cut off.

    Raises:
        ValueError: the file holds something else; it is left as it is.
    """
    if not path.exists():
        return []
    *lines, unfinished = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not record.keys() >= KEYS:
            raise ValueError(f"{path}, line {number}, is no verdict: --out is for another file")
        found.append(record)
    if not START.startswith(unfinished[: len(START)]):
        raise ValueError(f"{path} does not end with a verdict: --out is for another file")
    if unfinished:
        os.truncate(path, path.stat().st_size - len(unfinished))
    return found


def _line(record: dict, number: int, count: int) -> str:
    return f"{number} of {count}: {record['problem']}: {tables.line(record)}"


COLUMNS = ("problem", "file", "verdict", "ms", "speedup", "low", "high", "time", "of_light")
COLUMNS += ("step_speedup", "reason")
LEGEND = (
    f"speedup: torch's time in parts of the file's; {tables.LEGEND}; of_light: of the speed of "
)
LEGEND += "light, which is that of a copy of what the call writes at least"


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
    share = _share_of_light(run)
    if share:
        cells["of_light"] = f"{100 * share:.1f}%"
    if run["step"]:
        cells["step_speedup"] = (
            f"{by_role(run['step']['summary']['step'], 'solution')['ratio']:.3f}"
        )
    return cells


def _share_of_light(run: dict) -> float:
    """Return the least seconds of the work, divided by the solution's; 0 if they are not known."""
    ours = by_role(run["forward"]["summary"], "solution")
    return (run["forward"]["floor_seconds"] or 0.0) / (ours["median_ms"] * 1e-3)


def as_csv(found: list[dict]) -> str:
    """Return the table as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS)
    writer.writeheader()
    writer.writerows(rows(found))
    return out.getvalue()


def summary(found: list[dict]) -> str:
    """Return the table and the scores: fast_p, and the share of the speed of light."""
    graded = [record for record in found if record["verdict"] != NOT_GRADED]
    names = ["file", "problem", "verdict", "ms", "speedup", "time", "of_light", "step_speedup"]
    table = [names] + [[str(row[name]) for name in names] for row in rows(found)]
    lines = [tables.table(table), LEGEND]
    if any(row["time"] == "too noisy" for row in rows(found)):
        lines.append(tables.NOISY)
    if graded:
        lines.append(tables.scores(graded))
    shares = [_share_of_light(run) for record in found for run in record["runs"][:1]]
    known = [share for share in shares if share]
    if known:
        mean = 100 * geometric_mean(known)
        lines.append(f"share of the speed of light, geometric mean of {len(known)}: {mean:.1f}%")
    left = len(found) - len(graded)
    if left:
        lines.append(f"{left} files not graded, for their references cannot be")
    return "\n".join(lines)
