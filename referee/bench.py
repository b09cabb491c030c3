"""Where the solutions of one problem are graded: shared memory, and eager's processes.

Eager runs in processes of its own, which are treated as a solution's are: they are stopped when
nothing is asked of them, read the same inputs in the same memory, and are timed by the same clocks.
"""

import base64
import random
from pathlib import Path

import torch

from referee import cuda_walls, processes
from referee.contestant import Contestant, EndedError, ForgedError, RaisedError, Server
from referee.problem import SEEDS, Problem
from referee.shared import Pool, Region
from referee.state import State, StateError
from referee.verdict import ERROR, FoundError, outcome

SMALL_BYTES = 1 << 28  # of inputs: a request that takes no more memory than others can spare


class Eager:
    """One of eager's processes. If it fails, the verdict is an error, and no solution is blamed."""

    def __init__(self, bench: "Bench") -> None:
        self._bench = bench
        problem = bench.problem
        self.contestant = Contestant(bench.server, bench.pool, problem.device)
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
        seed = random.randrange(SEEDS)
        module = problem.construct(seed)
        try:
            self.state.construct(problem, seed, module, problem.args)
        except (EndedError, ForgedError, RaisedError) as error:
            self._fail(error)
        except StateError as error:
            self.close()
            raise FoundError(ERROR, f"eager itself could not be timed: {error}") from None

    def ask(self, op: str, **arguments: object) -> dict:
        """Send a request; raise FoundError with the verdict "error" if eager fails."""
        try:
            return self.contestant.ask(op, **arguments)
        except (EndedError, ForgedError, RaisedError) as error:
            self._fail(error)

    def close(self) -> None:
        """End the process, and give its memory back."""
        self.contestant.close()
        self.state.close()

    def _fail(self, error: EndedError | ForgedError | RaisedError) -> None:
        self.close()  # where it fails in the constructor, the bench does not know it yet
        self._bench.close_eager()
        _, why = outcome(error, "being timed")
        raise FoundError(ERROR, f"eager itself could not be timed: {why}") from None


class Bench:
    """The shared memory and eager's processes for grading one problem.

    Args:
        problem: what is graded.
        server: forks the processes.

    Attributes:
        pool: the shared memory.
        inputs: regions with the arguments of calls, one for each call of a request.
        output_gradients: regions with the gradients of outputs, likewise.
        outputs: regions for results, where these cannot be read in place.
        eager: processes for eager and for eager again; on a GPU, whose memory they share, one.
        copies: whether results are copied within the clock, since they cannot be read in place.
        plans: how the problem is timed, by setting; see `timed_requests.plan`.
    """

    def __init__(self, problem: Problem, server: Server) -> None:
        self.problem = problem
        self.server = server
        self.pool = Pool(problem.device)
        self.inputs = [Region(self.pool)]
        self.output_gradients = [Region(self.pool)]
        self.outputs: list[Region] = []
        self.eager: list[Eager] = []
        self.yardsticks: list[str] = []
        self.notes: list[str] = []
        self.copies = False
        self.plans: dict[str, object] = {}
        self._prepared: tuple | None = None
        if server.walls and problem.device.type == "cuda":
            server.walls = not cuda_walls.why_none(server, problem.device)

    def start_eager(self) -> None:
        """Start eager's processes, unless they are there."""
        count = 2 if self.problem.device.type == "cpu" else 1
        if self.eager and any(processes.state_of(e.contestant.pid) in "XZ" for e in self.eager):
            self.close_eager()
        while len(self.eager) < count:
            self.eager.append(Eager(self))

    def prepare_yardsticks(self, yardsticks: tuple[str, ...]) -> None:
        """Have eager's first process set up the yardsticks; the inputs must be written."""
        key = self.problem.setting, yardsticks
        if self._prepared == key:
            return
        for eager in self.eager:
            eager.ask("set_precision", setting=self.problem.precision)
        more = []
        if self.problem.yardstick_file:
            text = Path(self.problem.yardstick_file).read_bytes()
            more = [str(self.problem.yardstick_file), base64.b64encode(text).decode()]
        reply = self.eager[0].ask(
            "prepare_yardsticks",
            wanted=list(yardsticks),
            inputs=[self.inputs[0].form],
            copied_bytes=max(1, self.problem.moved // 2),
            more=more,
        )
        self.yardsticks, self.notes = reply["names"], reply["notes"]
        self._prepared = key

    def forget_yardsticks(self) -> None:
        """Forget that yardsticks were set up: eager's processes are new."""
        self._prepared = None

    def forms(self, count: int) -> list[dict]:
        """Return the forms of the inputs of so many calls."""
        return [region.form for region in self.inputs[:count]]

    def room_for(self, results: list[torch.Tensor], count: int) -> list[dict] | None:
        """Return forms with room for the results of so many calls; None if they are read in place.

        Args:
            results: of one call, for their forms.
            count: of calls.
        """
        if not self.copies:
            return None
        while len(self.outputs) < count:
            self.outputs.append(Region(self.pool))
        for region in self.outputs[:count]:
            region.place(results)
            region.fill()  # nobody finds there what another contestant has left
        return [region.form for region in self.outputs[:count]]

    def release(self, process: Contestant) -> None:
        """Have a process free the results of its last request, which have been read.

        After a large request all its unused memory goes back to the GPU, for the referee to take.
        """
        if self.problem.is_large and self.inputs[0].size > SMALL_BYTES:
            self.give_back(process)
        else:
            process.ask("release")

    def give_back(self, process: Contestant) -> None:
        """Have a process free its results, and give all unused memory back to the GPU."""
        process.reader.forget()
        process.ask("release", empty_cache=True)

    def close_eager(self) -> None:
        """End eager's processes."""
        for eager in self.eager:
            eager.close()
        self.eager = []
        self._prepared = None

    def close(self) -> None:
        """End eager's processes and free the shared memory."""
        self.close_eager()
        self.pool.close()


def write_all(regions: list[Region], pool: Pool, values: list[list]) -> None:
    """Write one list of values into each region; regions are made as they are needed."""
    while len(regions) < len(values):
        regions.append(Region(pool))
    for region, some in zip(regions, values, strict=False):
        region.place(some)
        region.write(some)
