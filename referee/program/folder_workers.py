"""Grades tasks of folders: here, or in a worker for each device.

A worker is a process that grades one problem after the other.
"""

import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from referee import console, records
from referee.contestants.forms import dtype_name
from referee.contestants.server import Server
from referee.engine import Engine, referee_at_work
from referee.grading import GradedFile, Options
from referee.message_lines import first_error_line
from referee.program import fork_server
from referee.records import Subject
from referee.reference.file import BadReferenceError, load
from referee.reference.problem import Problem
from referee.report.folder_table import NOT_GRADED
from referee.verdict import Verdict
from referee.verdict_words import ERROR

SECONDS_TO_END = 10  # that a worker has to end the processes that it has started


@dataclass(frozen=True)
class Task:
    """A problem and the solutions to grade on it.

    Attributes:
        name: the problem's: the path of its file in the folder of references, without ".py".
        reference: its file.
        text: the content of that file.
        solutions: the files. They and `text` are read before any solution runs.
    """

    name: str
    reference: Path
    text: bytes
    solutions: list[GradedFile]


def grade_tasks(
    tasks: list[Task], devices: list[torch.device], options: Options, progress: console.Progress
) -> Iterator[dict]:
    """Grade tasks in this process, or in a worker for each device; yield each record at once."""
    if len(devices) == 1:
        with referee_at_work(separate_builds=True) as server:
            for task in tasks:
                yield from _grade_task(task, server, devices[0], options, progress)
        return
    workers: dict[Connection, BaseProcess] = {}
    try:
        for device in devices:
            connection, process = _start_worker(device, options)
            workers[connection] = process
        queue = _balance(tasks, len(devices))
        yield from _collect(list(workers), queue, progress)
    finally:
        _end_workers(workers)


def _start_worker(device: torch.device, options: Options) -> tuple[Connection, BaseProcess]:
    """Start a worker for a device; return the connection to it, and its process."""
    connection, workers_end = fork_server.context.Pipe()
    process = fork_server.context.Process(
        target=_run_worker, args=(workers_end, str(device), options)
    )
    process.start()
    workers_end.close()
    return connection, process


def _end_workers(workers: dict[Connection, BaseProcess]) -> None:
    """End all workers, after they have had some time to end the processes that they started."""
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
    with (
        suppress(KeyboardInterrupt, EOFError, BrokenPipeError),
        referee_at_work(separate_builds=True) as server,
    ):
        while True:
            task = connection.recv()
            for record in _grade_task(task, server, device, options, lambda *_: None):
                connection.send(record)
            connection.send(None)


def _grade_task(
    task: Task,
    server: Server,
    device: torch.device,
    options: Options,
    progress: console.Progress,
) -> Iterator[dict]:
    """Grade the solutions of one problem; yield a record for each."""
    progress(f"{task.name}: running the reference")
    try:
        problem = Problem(task.name, load(task.reference, task.text), device)
    except (BadReferenceError, torch.OutOfMemoryError) as error:
        reason = first_error_line(str(error))
        yield from _same_record_for_all(task, Subject(task.name, "", ()), NOT_GRADED, reason)
        return
    subject = Subject(task.name, dtype_name(problem.dtype), problem.shape)
    engine = Engine(problem, server, options, progress)
    try:
        reason = engine.try_to_prepare()
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
