"""Grades tasks of folders: here, or in a worker for each device.

A worker is a process that grades one solution after the other.
"""

import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from referee import console, records
from referee.contestants.forms import dtype_name
from referee.contestants.server import Server
from referee.engine import Engine, referee_at_work
from referee.grading import GradedFile, Options
from referee.message_lines import first_error_line
from referee.program import fork_server
from referee.program.file_queue import FileQueue, Task
from referee.records import Subject
from referee.reference.file import BadReferenceError, load
from referee.reference.problem import Problem
from referee.report.folder_table import NOT_GRADED
from referee.verdict import Verdict
from referee.verdict_words import ERROR

SECONDS_TO_END = 10  # a worker gets so much time to end the processes that it has started


def grade_tasks(
    tasks: list[Task], devices: list[torch.device], options: Options, progress: console.Progress
) -> Iterator[dict]:
    """Grade tasks in this process, or in a worker for each device; yield each record at once."""
    if len(devices) == 1:
        with referee_at_work(separate_builds=True) as server:
            for task in tasks:
                with closing(_OpenProblem(task, server, devices[0], options, progress)) as problem:
                    for file in task.solutions:
                        yield problem.grade(file)
        return
    workers: dict[Connection, BaseProcess] = {}
    try:
        for device in devices:
            connection, process = _start_worker(device, options)
            workers[connection] = process
        yield from _collect(list(workers), FileQueue(tasks), progress)
    except BaseException:  # Ctrl-C, or the caller takes no more records
        for process in workers.values():
            process.terminate()  # raises KeyboardInterrupt in the worker, see `_run_worker`
        raise
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
    for connection in workers:
        connection.close()  # an idle worker then ends itself
    for process in workers.values():
        process.join(timeout=SECONDS_TO_END)
        process.kill()


def _collect(
    workers: list[Connection], queue: FileQueue, progress: console.Progress
) -> Iterator[dict]:
    """Send tasks to workers, each with one solution; yield their records as they come.

    A solution whose worker ends has no record. It is not graded by another worker. If all workers
    end, the solutions that nobody has taken have none, either.

    Args:
        workers: the connections to all workers.
        queue: the solutions.
        progress: shows what is graded.
    """
    task_of: dict[Connection, Task] = {}  # of each busy worker

    def send_next(connection: Connection, latest_problem: str) -> None:
        task = queue.take(latest_problem)
        if task is not None:
            task_of[connection] = task
            with suppress(BrokenPipeError):  # the worker has ended; `recv` raises EOFError below
                connection.send(task)

    for connection in workers:
        send_next(connection, "")
    while task_of:
        names = ", ".join(sorted({task.name for task in task_of.values()}))
        progress(f"grading {names}; {len(queue)} more files")
        for connection in wait(list(task_of)):
            task = task_of.pop(connection)
            try:
                record = connection.recv()
            except (EOFError, ConnectionResetError):  # the worker has ended
                console.say(f"the worker for {task.name} has ended")
                continue
            send_next(connection, task.name)
            yield record


def _run_worker(connection: Connection, device_name: str, options: Options) -> None:
    """Run a worker: receive tasks, each with one solution, and send their records.

    Ctrl-C in a terminal reaches all its processes. Workers ignore it; the command answers it, and
    sends them SIGTERM. That raises KeyboardInterrupt here, so that a worker ends the processes that
    it has started.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # All but KeyboardInterrupt mean that the command has closed the connection, or has ended.
    with (
        suppress(KeyboardInterrupt, EOFError, BrokenPipeError, ConnectionResetError),
        referee_at_work(separate_builds=True) as server,
    ):
        task = connection.recv()
        while True:
            with closing(_OpenProblem(task, server, device, options, _no_progress)) as problem:
                while task.name == problem.name:
                    [file] = task.solutions
                    connection.send(problem.grade(file))
                    task = connection.recv()


def _no_progress(*_args: object, **_options: object) -> None:
    """Show no progress: the command shows that of all workers."""


class _OpenProblem:
    """A problem whose solutions are graded one after the other.

    Args:
        task: the problem; `grade` gets the solutions.
        server: forks contestants.
        device: where solutions compute.
        options: how files are graded.
        progress: shows what is done now.

    Attributes:
        name: the problem's name.
    """

    def __init__(
        self,
        task: Task,
        server: Server,
        device: torch.device,
        options: Options,
        progress: console.Progress,
    ) -> None:
        self.name = task.name
        self._task = task
        self._server = server
        self._device = device
        self._options = options
        self._progress = progress
        self._subject: Subject | None = None  # None until the first solution is graded
        self._engine: Engine | None = None
        # If the problem cannot be graded: the verdict of all solutions, and the reason.
        self._word = ""
        self._reason = ""

    def grade(self, file: GradedFile) -> dict:
        """Return the record of a solution; the first call also times eager."""
        if self._subject is None:
            self._prepare()
        if self._word:
            verdict = Verdict(file.path, self._word, self._reason)
        else:
            verdict = self._engine.grade(file)
        return records.make_record(self._subject, verdict, str(file.path))

    def close(self) -> None:
        """End the processes of the problem."""
        if self._engine is not None:
            self._engine.close()

    def _prepare(self) -> None:
        """Load the reference and time eager."""
        task = self._task
        self._progress(f"{task.name}: running the reference")
        try:
            problem = Problem(task.name, load(task.reference, task.text), self._device)
        except (BadReferenceError, torch.OutOfMemoryError) as error:
            self._subject = Subject(task.name, "", ())
            self._word, self._reason = NOT_GRADED, first_error_line(str(error))
            return
        self._subject = Subject(task.name, dtype_name(problem.dtype), problem.shape)
        self._engine = Engine(problem, self._server, self._options, self._progress)
        reason = self._engine.try_to_prepare()
        if reason:
            self._word, self._reason = ERROR, reason
