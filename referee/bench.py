"""The shared memory and eager's processes, which all solutions of one problem use.

Eager's processes are treated like a solution's: they run only while they answer a request, read the
same inputs in the same memory, and are timed by the same clocks.
"""

import base64
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from referee.contestants import cuda_walls, processes
from referee.contestants.contestant import Contestant
from referee.contestants.errors import EndedError, ForgedError, RaisedError
from referee.contestants.pool import Pool
from referee.contestants.region import Region
from referee.contestants.server import Server
from referee.contestants.state import State, StateError
from referee.reference.problem import Problem
from referee.reference.random_values import new_seed
from referee.verdict import NotCorrectError, outcome
from referee.words import ERROR

# After a request with at most so many bytes of inputs, a process keeps its unused memory even if
# the problem is large: the other processes have enough without it.
SMALL_REQUEST = 1 << 28


class Reserve:
    """Keeps eager's process on a GPU between two problems.

    The first program of torch.compile takes seconds in a process, for it imports the compiler;
    later ones take a fraction of a second. On a CPU no process is kept, because it maps the memory
    of one problem.
    """

    def __init__(self) -> None:
        self._contestant: Contestant | None = None

    def keep(self, contestant: Contestant) -> None:
        """Keep a process and have it forget its module; close the process if that fails."""
        contestant.reader.forget()
        try:
            contestant.ask("reset")
        except (EndedError, ForgedError, RaisedError):
            contestant.close()
            return
        self._contestant = contestant

    def take(self) -> Contestant | None:
        """Return the process if there is one that still runs; the caller closes it."""
        contestant = self._contestant
        self._contestant = None
        if contestant is not None and processes.has_ended(contestant.pid):
            contestant.close()
            return None
        return contestant

    def close(self) -> None:
        """End the process."""
        if self._contestant is not None:
            self._contestant.close()
        self._contestant = None


class Eager:
    """One of eager's processes. If it fails, the verdict is an error, and no solution is blamed.

    Args:
        bench: the bench to which the process belongs.

    Attributes:
        contestant: the process.
        state: its parameters and buffers.
    """

    def __init__(self, bench: "Bench") -> None:
        self._bench = bench
        problem = bench.problem
        self.contestant = bench.process_for_eager()
        self.state = State(self.contestant, bench.pool)
        file = problem.file
        self.ask(
            "import_file",
            text=base64.b64encode(file.text).decode(),
            path=str(file.path.resolve()),
            names=[file.model.__name__],
            folders=file.folders,
        )
        self.ask("set_precision", setting=problem.precision)
        seed = new_seed()
        module = problem.construct(seed)
        try:
            self.state.construct(problem.file.dtype, seed, module, problem.args)
        except (EndedError, ForgedError, RaisedError) as error:
            self._fail(error)
        except StateError as error:
            self.close()
            raise NotCorrectError(ERROR, f"eager itself could not be timed: {error}") from None

    def ask(self, op: str, **arguments: object) -> dict:
        """Send a request; raise NotCorrectError with the verdict "error" if eager fails."""
        try:
            return self.contestant.ask(op, **arguments)
        except (EndedError, ForgedError, RaisedError) as error:
            self._fail(error)

    def close(self) -> None:
        """End the process and give its shared memory back."""
        self.contestant.close()
        self.state.close()

    def _fail(self, error: EndedError | ForgedError | RaisedError) -> NoReturn:
        """End all of eager's processes and raise the verdict."""
        self.close()  # if it fails in the constructor, the bench does not know it yet
        self._bench.close_eager()
        _, why = outcome(error, "being timed")
        raise NotCorrectError(ERROR, f"eager itself could not be timed: {why}") from None


class Plan(NamedTuple):
    """How a problem is timed.

    Attributes:
        calls: the number of calls of one request.
        seconds_alone: eager's seconds of a call, for some requests before any solution had started.
    """

    calls: int
    seconds_alone: list[float]


class Bench:
    """The shared memory and eager's processes for grading one problem.

    The problem and the server are attributes, too.

    Args:
        problem: the problem that is graded.
        server: the process from which all others are forked.
        reserve: gives eager's process from one problem to the next; None if none is kept.

    Attributes:
        pool: the shared memory.
        inputs: regions with the arguments of calls, one for each call of a request.
        output_gradients: regions with the gradients of outputs, likewise.
        outputs: regions to which results are copied, where they cannot be read in place.
        eager: eager's processes. Eager takes two turns in a round. On a CPU each turn has a process
            of its own; on a GPU both share one, and so its memory.
        yardsticks: the names of the calls that eager's first process has set up.
        notes: which yardsticks could not be set up, and why.
        are_results_copied: whether processes copy results within the clock, because the referee
            cannot read them in place.
        plans: how the problem is timed, by setting; `timed_requests.plan` makes them.
    """

    def __init__(self, problem: Problem, server: Server, reserve: Reserve | None = None) -> None:
        self.problem = problem
        self.server = server
        self.pool = Pool(problem.device)
        self.inputs = [Region(self.pool)]
        self.output_gradients = [Region(self.pool)]
        self.outputs: list[Region] = []
        self.eager: list[Eager] = []
        self.yardsticks: list[str] = []
        self.notes: list[str] = []
        self.are_results_copied = False
        self.plans: dict[str, Plan] = {}
        self._reserve = reserve
        self._prepared: tuple | None = None  # the setting and yardsticks that are set up
        # A GPU's contestants have no walls where CUDA IPC does not work through them.
        if server.walls and problem.device.type == "cuda":
            server.walls = not cuda_walls.why_none(server, problem.device)

    def start_eager(self) -> None:
        """Start eager's processes, unless they run already."""
        if any(processes.has_ended(eager.contestant.pid) for eager in self.eager):
            self.close_eager()
        count = 2 if self.problem.device.type == "cpu" else 1
        while len(self.eager) < count:
            self.eager.append(Eager(self))

    def process_for_eager(self) -> Contestant:
        """Return a process from the reserve or else a new one."""
        if self._reserve is not None:
            kept = self._reserve.take()
            if kept is not None:
                return kept
        return Contestant(self.server, self.pool, self.problem.device)

    def keep_eager(self) -> None:
        """Give eager's process to the reserve instead of ending it, on a GPU."""
        if self._reserve is None or self.problem.device.type != "cuda":
            return
        for eager in self.take_eager():
            self._reserve.keep(eager.contestant)
            eager.state.close()

    def prepare_yardsticks(self, yardsticks: tuple[str, ...]) -> None:
        """Have eager's first process set up these yardsticks, unless it has done so before.

        All of eager's processes also get the precision setting. The inputs must be written before:
        some yardsticks are compiled for them.
        """
        needed = self.problem.setting, yardsticks
        if self._prepared == needed:
            return
        for eager in self.eager:
            eager.ask("set_precision", setting=self.problem.precision)
        own_file = []
        if self.problem.yardstick_file:
            text = Path(self.problem.yardstick_file).read_bytes()
            own_file = [str(self.problem.yardstick_file), base64.b64encode(text).decode()]
        reply = self.eager[0].ask(
            "prepare_yardsticks",
            names=list(yardsticks),
            inputs=[self.inputs[0].location],
            copied_bytes=max(1, self.problem.moved // 2),
            own_file=own_file,
        )
        self.yardsticks, self.notes = reply["names"], reply["notes"]
        self._prepared = needed

    def take_eager(self) -> list[Eager]:
        """Return eager's processes, which the caller closes; `start_eager` then starts new ones."""
        taken = self.eager
        self.eager = []
        self._prepared = None
        return taken

    def locations(self, count: int) -> list[dict]:
        """Return the locations of the inputs of a request's first `count` calls."""
        return [region.location for region in self.inputs[:count]]

    def room_for(self, templates: list[torch.Tensor], count: int) -> list[dict] | None:
        """Make room for copies of a request's results; return where they go.

        Args:
            templates: tensors with the shapes and dtypes of one call's results.
            count: the number of calls.

        Returns:
            A location for each call; None if results are read in place.
        """
        if not self.are_results_copied:
            return None
        while len(self.outputs) < count:
            self.outputs.append(Region(self.pool))
        for region in self.outputs[:count]:
            region.make_room(templates)
            region.fill_with_nan()  # so that no contestant finds another's results there
        return [region.location for region in self.outputs[:count]]

    def free_results(self, process: Contestant) -> None:
        """Have a process free the results of its last request, which have been read.

        If the request was large, the process also gives its unused memory back to the GPU.
        """
        if self.problem.gives_memory_back and self.inputs[0].size > SMALL_REQUEST:
            self.free_all_unused(process)
        else:
            process.ask("release")

    def free_all_unused(self, process: Contestant) -> None:
        """Have a process free its results and give all its unused memory back to the GPU."""
        process.reader.forget()
        process.ask("release", empty_cache=True)

    def close_eager(self) -> None:
        """End eager's processes."""
        for eager in self.take_eager():
            eager.close()

    def close(self) -> None:
        """End eager's processes and free the shared memory."""
        self.close_eager()
        self.pool.close()


def write_all(regions: list[Region], pool: Pool, values: list[list]) -> None:
    """Write a list of values into each region.

    Args:
        regions: the regions, to which new ones are added if there are more lists.
        pool: the memory of new regions.
        values: a list for each region.
    """
    while len(regions) < len(values):
        regions.append(Region(pool))
    for region, region_values in zip(regions, values, strict=False):
        region.make_room(region_values)
        region.write(region_values)
