"""Grades folders of solutions against folders of references.

    find_work    pairs solutions with references by their names, see `pairs`; reads all files
    grade        grades them, here or in a worker for each device; prints and appends verdicts

`report.folder_table` makes the table and the scores at the end.

With `--out FILE` each verdict is appended as a line of JSON when it comes, and a second run grades
only the files that have no line yet. With `--devices` each device has a worker: a process that
grades one problem after the other.
"""

import argparse
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from referee import console, records
from referee.engine import Engine, read_files, referee_at_work
from referee.grading import GradedFile, Options
from referee.messages import first_error_line
from referee.pairs import absolute, pair
from referee.problem import Problem
from referee.records import Subject
from referee.reference_file import BadReferenceError, load
from referee.report import files, folder_table, graded_files
from referee.report.folder_table import NOT_GRADED
from referee.shared import dtype_name
from referee.verdict import ERROR, Verdict

SECONDS_TO_END = 10  # that a worker has to end the processes that it has started
# A line of `--out` has at least these keys, and "problem" is the first.
RECORD_KEYS = {"problem", "file", "verdict", "reason", "runs"}
RECORD_START = b'{"problem": '


@dataclass(frozen=True)
class Task:
    """A problem and the solutions to grade on it.

    Attributes:
        name: the problem's: the path of its file in the folder of references, without ".py".
        reference: its file.
        solutions: the files, read before any of them runs.
    """

    name: str
    reference: Path
    solutions: list[GradedFile]


@dataclass(frozen=True)
class Job:
    """All the work of one run of the command.

    Attributes:
        args: the command's options.
        earlier_records: the records that an earlier run has left in `--out`.
        tasks: the problems that have solutions without a verdict.
        unpaired: solutions without a reference.
    """

    args: argparse.Namespace
    earlier_records: list[dict]
    tasks: list[Task]
    unpaired: list[Path]


def are_named(args: argparse.Namespace) -> bool:
    """Return whether the command's reference is a folder."""
    return bool(args.reference) and args.reference.is_dir()


def find_work(args: argparse.Namespace) -> Job:
    """Pair the solutions with references, read them, and leave out those that have a verdict.

    Raises:
        ValueError: `--out` names a file of something else, or a solution cannot be read.
    """
    paired, unpaired = pair(args.reference, args.solution)
    earlier_records = read_out(args.out) if args.out else []
    graded = {(record["problem"], absolute(record["file"])) for record in earlier_records}
    return Job(args, earlier_records, _make_tasks(paired, args.reference, graded), unpaired)


def _make_tasks(
    paired: dict[Path, list[Path]], references: Path, graded: set[tuple[str, str]]
) -> list[Task]:
    """Return a task for each reference that has ungraded solutions; read these files.

    Args:
        paired: the solutions of each reference.
        references: the folder.
        graded: problem and absolute path of each solution that has a verdict.

    Raises:
        ValueError: a solution cannot be read.
    """
    tasks = []
    for reference, solutions in paired.items():
        name = reference.relative_to(references).with_suffix("").as_posix()
        ungraded = [path for path in solutions if (name, absolute(path)) not in graded]
        if not ungraded:
            continue
        try:
            tasks.append(Task(name, reference, read_files(ungraded)))
        except OSError as error:
            raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
    return tasks


def grade(
    job: Job,
    devices: list[torch.device],
    options: Options,
    document: dict,
    progress: console.Progress,
) -> int:
    """Grade folders; return the exit status: 0 if every solution is correct.

    Args:
        job: the work, see `find_work`.
        devices: where solutions compute. Several devices have a worker each.
        options: how files are graded.
        document: the JSON file's content; all records are added to it.
        progress: shows what is done now.
    """
    files_left = sum(len(task.solutions) for task in job.tasks)
    file_count = len(job.earlier_records) + files_left
    document["records"] += job.earlier_records
    all_records = document["records"]  # grows with each verdict
    for path in job.unpaired:
        console.say(f"{path}: no reference has its name or number; not graded")
    if job.earlier_records:
        verdict_count = len(job.earlier_records)
        console.show(f"{verdict_count} verdicts are in {job.args.out}; {files_left} files are left")
    try:
        with closing(_grade_tasks(job.tasks, devices, options, progress)) as new_records:
            for record in new_records:
                progress.clear()
                all_records.append(record)
                if job.args.out:
                    _append(job.args.out, record)
                console.show(_line(record, len(all_records), file_count))
    finally:  # after an interrupt, too
        progress.clear()
        document["complete"] = len(all_records) == file_count
        is_written = _report(job.args, document)
    if not document["complete"]:
        console.say(f"{file_count - len(all_records)} files have no verdict")
    are_correct = all(record["verdict"] == "correct" for record in all_records)
    is_success = are_correct and document["complete"] and is_written and not job.unpaired
    return 0 if is_success else 1


def _report(args: argparse.Namespace, document: dict) -> bool:
    """Print the summary, and write the files that the options name.

    Returns:
        Whether all of them could be written.
    """
    all_records = document["records"]
    are_written = []
    if all_records:
        console.show(f"\n{folder_table.summary(all_records)}")
        if args.csv:
            are_written.append(files.try_to_write(args.csv, folder_table.as_csv(all_records)))
    if args.json:
        are_written.append(files.try_to_write(args.json, records.as_json(document)))
    return all(are_written)


def _grade_tasks(
    tasks: list[Task], devices: list[torch.device], options: Options, progress: console.Progress
) -> Iterator[dict]:
    """Grade tasks in this process, or in a worker for each device; yield each record at once."""
    if len(devices) == 1:
        for task in tasks:
            yield from _grade_task(task, devices[0], options, progress)
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not work in a forked process
    workers: dict[Connection, BaseProcess] = {}
    try:
        for device in devices:
            ours, workers_end = context.Pipe()
            process = context.Process(target=_run_worker, args=(workers_end, str(device), options))
            process.start()
            workers_end.close()
            workers[ours] = process
        queue = _balance(tasks, len(devices))
        yield from _collect(list(workers), queue, progress)
    finally:
        for connection, process in workers.items():
            connection.close()
            process.terminate()  # raises KeyboardInterrupt in the worker, see `_run_worker`
        for process in workers.values():
            process.join(timeout=SECONDS_TO_END)
            process.kill()


def _balance(tasks: list[Task], device_count: int) -> list[Task]:
    """Return the tasks, the last ones divided so that no device is idle at the end.

    Example: there are five tasks and two devices. The fifth is divided into two tasks, each with
    half of its solutions. So each device grades two and a half; each also times eager for its half.
    """
    undivided_count = len(tasks) - len(tasks) % device_count
    balanced = tasks[:undivided_count]
    for task in tasks[undivided_count:]:
        parts = [task.solutions[device::device_count] for device in range(device_count)]
        balanced += [replace(task, solutions=part) for part in parts if part]
    return balanced


def _collect(
    idle_workers: list[Connection], queue: list[Task], progress: console.Progress
) -> Iterator[dict]:
    """Send tasks to workers; yield their records as they come.

    A task whose worker ends yields no more records. It is not graded by another worker.

    Args:
        idle_workers: the connections to all workers; changed in place.
        queue: the tasks; changed in place.
        progress: shows what is graded.
    """
    task_of: dict[Connection, Task] = {}  # of each busy worker
    while task_of or (idle_workers and queue):
        while idle_workers and queue:
            connection, task = idle_workers.pop(), queue.pop(0)
            task_of[connection] = task
            with suppress(BrokenPipeError):  # the worker has ended; `recv` raises EOFError below
                connection.send(task)
        names = ", ".join(sorted(task.name for task in task_of.values()))
        progress(f"grading {names}; {len(queue)} more problems")
        for connection in wait(list(task_of)):
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):  # the worker has ended
                lost_task = task_of.pop(connection)
                console.say(f"the worker for {lost_task.name} has ended")
                continue
            if message is None:  # the worker has finished its task
                del task_of[connection]
                idle_workers.append(connection)
            else:
                yield message


def _run_worker(connection: Connection, device_name: str, options: Options) -> None:
    """Run a worker: receive tasks; send the records of each, then None.

    Ctrl-C in a terminal reaches all its processes. Workers ignore it; the command answers it, and
    sends them SIGTERM. That raises KeyboardInterrupt here, so that a worker ends the processes that
    it has started.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # EOFError and BrokenPipeError mean that the command has ended.
    with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        while True:
            task = connection.recv()
            for record in _grade_task(task, device, options, lambda *_: None):
                connection.send(record)
            connection.send(None)


def _grade_task(
    task: Task, device: torch.device, options: Options, progress: console.Progress
) -> Iterator[dict]:
    """Grade the solutions of one problem; yield a record for each."""
    progress(f"{task.name}: running the reference")
    try:
        problem = Problem(task.name, load(task.reference), device)
    except (BadReferenceError, OSError, torch.OutOfMemoryError) as error:
        reason = first_error_line(str(error))
        yield from _same_record_for_all(task, Subject(task.name, "", ()), NOT_GRADED, reason)
        return
    subject = Subject(task.name, dtype_name(problem.dtype), problem.shape)
    with referee_at_work(own_builds=True) as server:
        engine = Engine(problem, server, options, progress)
        try:
            reason = engine.why_unprepared()
            if reason:
                yield from _same_record_for_all(task, subject, ERROR, reason)
                return
            for file in task.solutions:
                yield records.make_record(subject, engine.grade(file), str(file.path))
        finally:
            engine.close()


def _same_record_for_all(task: Task, subject: Subject, word: str, reason: str) -> Iterator[dict]:
    """Yield a record with this verdict for each solution of a problem."""
    for file in task.solutions:
        yield records.make_record(subject, Verdict(file.path, word, reason), str(file.path))


def _append(path: Path, record: dict) -> None:
    """Append a record to a file as one line; return when it is on the disk."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_out(path: Path) -> list[dict]:
    """Return the records that an earlier run has appended to a file.

    If that run was killed while it wrote, the file ends with a part of a line. This function then
    cuts that part off the file.

    Raises:
        ValueError: the file holds something else; it is not changed.
    """
    if not path.exists():
        return []
    *lines, unfinished_line = path.read_bytes().split(b"\n")
    earlier_records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not record.keys() >= RECORD_KEYS:
            raise ValueError(f"{path}, line {number}, is no verdict: --out is for another file")
        earlier_records.append(record)
    if not RECORD_START.startswith(unfinished_line[: len(RECORD_START)]):
        raise ValueError(f"{path} does not end with a verdict: --out is for another file")
    if unfinished_line:
        os.truncate(path, path.stat().st_size - len(unfinished_line))
    return earlier_records


def _line(record: dict, number: int, count: int) -> str:
    """Return the line that is printed for a record, the `number`th of `count`."""
    return f"{number} of {count}: {record['problem']}: {graded_files.line(record)}"
