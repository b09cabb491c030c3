"""Eager's processes, which all solutions of one problem use.

They are treated like a solution's: they run only while they answer a request, read the same inputs
in the same memory, and are timed by the same clocks.
"""

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from referee.contestants import processes
from referee.contestants.contestant import Contestant
from referee.contestants.errors import EndedError, ForgedError, RaisedError
from referee.contestants.pool import Pool
from referee.contestants.role import Role
from referee.contestants.server import Server
from referee.contestants.state import State, StateError
from referee.reference.problem import Problem
from referee.reference.random_values import new_seed
from referee.request_memory import RequestMemory
from referee.verdict import NotCorrectError, outcome
from referee.verdict_words import ERROR


class EagerOutOfMemoryError(NotCorrectError):
    """Eager has no memory on a GPU."""


class EagerProcess(Contestant):
    """One of eager's processes. If it fails, the verdict is an error, and no solution is blamed.

    Args:
        server: forks the process.
        pool: the shared memory of its first problem.
        device: where the process computes.

    Attributes:
        state: its parameters and buffers, from `begin_problem` on.
    """

    def __init__(self, server: Server, pool: Pool, device: torch.device) -> None:
        self.state: State | None = None
        self._close_all: Callable[[], None] = self.close
        super().__init__(server, pool, device, Role.EAGER)

    def begin_problem(self, problem: Problem, pool: Pool, close_all: Callable[[], None]) -> None:
        """Import a problem's file; earlier problems must have been forgotten.

        Args:
            problem: the problem.
            pool: the problem's shared memory.
            close_all: ends all of the problem's processes; is called if this one fails.

        Raises:
            NotCorrectError: eager fails.
        """
        self.state = State(self, pool)
        self._close_all = close_all
        file = problem.file
        self.ask(
            "import_file",
            text=base64.b64encode(file.text).decode(),
            path=str(file.path.resolve()),
            class_names=[file.model.__name__],
            folders=file.folders,
        )
        self.ask("set_precision", setting=problem.precision)

    def construct(self, problem: Problem, seed: int, module: nn.Module) -> None:
        """Have the process construct its module and move the parameters into shared memory.

        Args:
            problem: the problem.
            seed: the seed of the constructor.
            module: the referee's own module, which was constructed under this seed.

        Raises:
            NotCorrectError: eager fails.
        """
        try:
            self.state.construct(problem.file.dtype, seed, module, problem.arguments)
        except StateError as error:
            self._close_all()
            raise NotCorrectError(ERROR, f"eager itself could not be timed: {error}") from None

    def forget_problem(self) -> bool:
        """Have the process forget its module, so that another problem can begin.

        Returns:
            Whether it has. If not, the process is closed.
        """
        self.reader.forget()
        try:
            self.ask("reset")
        except NotCorrectError:
            return False
        self.state.close()
        self._close_all = self.close  # the old one refers to the problem, and so holds its memory
        return True

    def ask(
        self, method: str, read_early: Callable[[dict], object] | None = None, **arguments: object
    ) -> dict:
        """Send a request, see `Contestant.ask`.

        Raises:
            NotCorrectError: eager fails. All of its processes are then closed.
        """
        with self._blame_eager():
            return super().ask(method, read_early, **arguments)

    def begin(self, method: str) -> None:
        """Begin a request, see `Contestant.begin`; raise NotCorrectError as `ask` does."""
        with self._blame_eager():
            super().begin(method)

    def close(self) -> None:
        """End the process and give its shared memory back."""
        super().close()
        if self.state:
            self.state.close()

    @contextmanager
    def _blame_eager(self) -> Iterator[None]:
        """If the request in this block fails, close all processes and raise the verdict."""
        try:
            yield
        except (EndedError, ForgedError, RaisedError) as error:
            self.close()  # if `begin_problem` fails, `_close_all` does not know this one yet
            self._close_all()
            raise _verdict_on(error) from None


def _verdict_on(error: EndedError | ForgedError | RaisedError) -> NotCorrectError:
    """Return the verdict if eager fails with an error."""
    _, why = outcome(error, "being timed")
    reason = f"eager itself could not be timed: {why}"
    if isinstance(error, RaisedError) and error.is_lack_of_memory:
        return EagerOutOfMemoryError(ERROR, reason)
    return NotCorrectError(ERROR, reason)


class KeptEagerProcess:
    """Keeps eager's process on a GPU between two problems of a run, which share the device.

    The first program of torch.compile takes seconds in a process, for it imports the compiler;
    later ones take a fraction of a second. On a CPU no process is kept, because it maps the memory
    of one problem.
    """

    def __init__(self) -> None:
        self._process: EagerProcess | None = None

    def keep(self, process: EagerProcess) -> None:
        """Keep a process and have it forget its module; close the process if that fails."""
        if process.forget_problem():
            self._process = process

    def take(self) -> EagerProcess | None:
        """Return the process if there is one that still runs; the caller closes it."""
        process = self._process
        self._process = None
        if process is not None and processes.has_ended(process.pid):
            process.close()
            return None
        return process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
        self._process = None


class EagerProcesses:
    """Eager's processes for one problem, and the yardsticks that are timed in the first of them.

    Eager takes two turns in a round. On a CPU each turn has a process of its own; on a GPU both
    share one, and so its memory.

    Args:
        problem: the problem.
        server: forks the processes.
        memory: the shared memory.
        kept_process: may hold the process of an earlier problem; None if none is ever kept.

    Attributes:
        members: the processes; empty before `start`.
        yardsticks: the names of the calls that `prepare_yardsticks` has set up.
        notes: which yardsticks could not be set up, and why.
    """

    def __init__(
        self,
        problem: Problem,
        server: Server,
        memory: RequestMemory,
        kept_process: KeptEagerProcess | None,
    ) -> None:
        self.members: list[EagerProcess] = []
        self.yardsticks: list[str] = []
        self.notes: list[str] = []
        self._problem = problem
        self._server = server
        self._memory = memory
        self._kept_process = kept_process
        self._prepared: tuple | None = None  # the setting and yardsticks that are set up

    def start(self) -> None:
        """Start the processes, unless they run already.

        Raises:
            NotCorrectError: eager fails.
        """
        if any(processes.has_ended(process.pid) for process in self.members):
            self.close()
        count = 2 if self._problem.device.type == "cpu" else 1
        if len(self.members) == count:
            return
        seed = new_seed()
        module = self._problem.construct(seed)
        pool = self._memory.pool
        while len(self.members) < count:
            process = self._kept_or_new_process()
            process.begin_problem(self._problem, pool, self.close)
            self.members.append(process)
            process.construct(self._problem, seed, module)

    def take(self) -> list[EagerProcess]:
        """Return the processes, which the caller closes; `start` then starts new ones."""
        taken = self.members
        self.members = []
        self._prepared = None
        return taken

    def keep(self) -> None:
        """Keep the process for the next problem instead of ending it, on a GPU."""
        if self._kept_process is None or self._problem.device.type != "cuda":
            return
        for process in self.take():
            self._kept_process.keep(process)

    def close(self) -> None:
        """End the processes."""
        for process in self.take():
            process.close()

    def set_precision(self) -> None:
        """Give all processes the problem's precision setting."""
        self._prepared = None
        for process in self.members:
            process.ask("set_precision", setting=self._problem.precision)

    def warm_compiler(self) -> None:
        """Have the first process import torch.compile's compiler, while this process goes on.

        The next request waits until it has.
        """
        if self.members:
            self.members[0].begin("warm_compiler")

    def prepare_yardsticks(self, yardsticks: tuple[str, ...]) -> None:
        """Have the first process set up these yardsticks, unless it has done so before.

        All processes also get the precision setting. The inputs must be written before: some
        yardsticks are compiled for them.
        """
        needed = self._problem.setting, yardsticks
        if self._prepared == needed:
            return
        self.set_precision()
        yardstick_file = []
        if self._problem.yardstick_file:
            text = Path(self._problem.yardstick_file).read_bytes()
            yardstick_file = [str(self._problem.yardstick_file), base64.b64encode(text).decode()]
        reply = self.members[0].ask(
            "prepare_yardsticks",
            names=list(yardsticks),
            inputs=self._memory.input_locations(1),  # of one call
            copied_bytes=max(1, self._problem.moved_bytes // 2),  # each is read and written
            yardstick_file=yardstick_file,
        )
        self.yardsticks, self.notes = reply["names"], reply["notes"]
        self._prepared = needed

    def keep_yardsticks(self, yardsticks: tuple[str, ...]) -> None:
        """Have the first process free all yardsticks but these, or make these if none are set up.

        Args:
            yardsticks: some of those that `prepare_yardsticks` was called with.
        """
        if self._prepared is None:  # the process is new, or the setting was given to it again
            self.prepare_yardsticks(yardsticks)
            return
        setting, _ = self._prepared
        self.yardsticks = [name for name in self.yardsticks if name in yardsticks]
        self.members[0].ask("keep_yardsticks", names=self.yardsticks)
        self._prepared = setting, yardsticks

    def _kept_or_new_process(self) -> EagerProcess:
        """Return the process that an earlier problem has kept, or else a new one."""
        if self._kept_process is not None:
            kept = self._kept_process.take()
            if kept is not None:
                return kept
        return EagerProcess(self._server, self._memory.pool, self._problem.device)
