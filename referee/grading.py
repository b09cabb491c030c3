"""One file under grading: everything that the steps share, and the order of the steps.

The steps are functions, one a file in `referee/steps`, which take a `Grading` and raise
`FoundError` as soon as something is not right. `STEPS_ONCE` and `STEPS_PER_SETTING` in
`referee/steps/__init__` say what is checked, in which order.
"""

import base64
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import nn

from referee.bench import Bench, write_all
from referee.contestant import Contestant
from referee.gradients import Quantity
from referee.problem import SEEDS, changing_state, redrawn
from referee.reading import can_read
from referee.shared import without_repeats
from referee.state import State, StateError
from referee.timing import Rounds
from referee.verdict import WRONG, FoundError, Run, Verdict

# Bytes of parameters up to which the ones before are kept, to tell who answers with them.
LARGEST_STALE = 1 << 30


@dataclass(frozen=True)
class GradedFile:
    """A file, read once, before the first solution starts."""

    path: Path
    text: bytes


@dataclass(frozen=True)
class Options:
    """How files are graded.

    Attributes:
        rounds: how many are timed.
        timeout: seconds for a file.
        only_times: the steps are those of a sweep.
        compiled: torch.compile's program is timed beside eager, too.
        is_quick: few rounds are timed, for a newcomer's first run.
        largest_gradients: bytes of parameters, beyond which gradients are compared at small sizes
            alone, and no training step is timed.
    """

    rounds: Rounds
    timeout: float
    only_times: bool = False
    compiled: bool = False
    is_quick: bool = False
    largest_gradients: float = math.inf


class Grading:
    """A file under grading.

    Args:
        bench: the problem's.
        file: the solution.
        options: the conditions.
        verdict: what is found goes there.
        progress: is called with what is being done, and how far.

    Attributes:
        solution: the file's process.
        module: the reference, with the parameters that all contestants have now.
        state: the solution's parameters.
        stale: an earlier reference with other parameters, or None.
        inputs: the arguments of the last call.
        before: those of the call before it.
        expected_calls: the reference's results of the last timed request, a list for each call.
        results: the first of these lists.
        earlier: small results of the reference for earlier inputs, to tell who replays them.
        relative: the largest relative error of a result at the timed size.
        is_equal: all results at the timed size have eager's bits.
        budgets: what a timed call's results may be; from the last whole comparison.
        quantities: results and gradients of a training step; empty where it is forward only.
        relies_on_inputs: the solution may differ from the reference for inputs that `get_inputs`
            does not draw.
        is_forward_only: the solution has no gradients, or not all.
        is_whole: the modules have the problem's own arguments, not those of a small case.
        run: the times under the setting at hand, None before they are taken.
    """

    def __init__(
        self,
        bench: Bench,
        file: GradedFile,
        options: Options,
        verdict: Verdict,
        progress: Callable[[str, str], None],
    ) -> None:
        self.bench = bench
        self.problem = bench.problem
        self.file = file
        self.options = options
        self.verdict = verdict
        self.progress = progress
        self.device = bench.problem.device
        deadline = monotonic() + options.timeout
        self.solution = Contestant(bench.server, bench.pool, self.device, deadline)
        verdict.walls = self.solution.has_walls
        # On a GPU the first results tell whether they can be read.
        on_cpu = self.device.type == "cpu"
        bench.copies = on_cpu and not can_read(self.solution.pid, self.solution.span[0])
        self.state = State(self.solution, bench.pool)
        self.module: nn.Module | None = None
        self.stale: nn.Module | None = None
        self.inputs: list = []
        self.before: list = []
        self.expected_calls: list[list[torch.Tensor]] = []
        self.results: list[torch.Tensor] = []
        self.earlier: list[torch.Tensor] = []
        self.relative = 0.0
        self.is_equal = True
        self.budgets: list = []
        self.quantities: list[Quantity] = []
        self.relies_on_inputs = False
        self.is_forward_only = False
        self.is_whole = False
        self.run: Run | None = None
        self._base: dict[str, torch.Tensor] = {}
        self._changing: list[str] = []

    def close(self) -> None:
        """End the file's process, and give back the memory that the grading has used."""
        self.solution.close()
        self.state.close()
        self.forget_round()

    def set_precision(self, setting: str) -> None:
        """Set the precision of float32 products, here and in the solution's process."""
        self.problem.setting = setting
        torch.set_float32_matmul_precision(self.problem.precision)
        self.solution.ask("set_precision", setting=self.problem.precision)

    def import_file(self) -> float:
        """Have the file imported; return the seconds that it took."""
        self.progress("importing", "")
        reference = self.problem.file
        reply = self.solution.ask(
            "import_file",
            text=base64.b64encode(self.file.text).decode(),
            path=str(self.file.path.resolve()),
            names=list(reference.solutions),
            folders=[str(reference.path.resolve().parent), *reference.folders],
        )
        seconds = reply["seconds"]
        return seconds if isinstance(seconds, float) and math.isfinite(seconds) else 0.0

    def construct(self, args: list | None = None, compare: bool = False) -> None:
        """Construct both modules under one seed; the solution's gets the reference's parameters.

        Args:
            args: of the constructors; None for the problem's own.
            compare: the values that the constructors drew must be the same.
        """
        self.is_whole = args is None
        args = self.problem.args if args is None else args
        seed = random.randrange(SEEDS)
        self.stale = None
        self.module = self.problem.construct(seed, args)
        try:
            self.state.construct(self.problem, seed, self.module, args, compare)
        except StateError as error:
            raise FoundError(WRONG, str(error)) from None
        there = self.module.state_dict()
        self._changing = changing_state(self.module)
        self._base = {name: without_repeats(there[name]).clone() for name in self._changing}

    def set_state(self, values: list[torch.Tensor]) -> None:
        """Give both modules these parameters and buffers."""
        self._keep_stale()
        there = self.module.state_dict()
        for x, value in zip(there.values(), values, strict=True):
            x.copy_(value)
        self._base = {name: without_repeats(there[name]).clone() for name in self._changing}

    def new_state(self) -> None:
        """Draw other parameters and buffers; they are written before the next call."""
        if not self._changing:
            return
        self._keep_stale()
        there = self.module.state_dict()
        for name in self._changing:
            without_repeats(there[name]).copy_(redrawn(self._base[name]))

    def write_state(self) -> None:
        """Write the reference's parameters and buffers where the solution reads them."""
        self.state.write(list(self.module.state_dict().values()))

    def write_inputs(self, calls: list[list]) -> None:
        """Write the arguments of calls, one list for each call of the next request."""
        write_all(self.bench.inputs, self.bench.pool, calls)

    def draw(self) -> list:
        """Draw new inputs; before large ones, free those that are there."""
        if self.problem.is_large:
            self.forget_round()
        return self.problem.draw()

    def forget_round(self) -> None:
        """Free what the referee keeps of a round, so that the next one has the memory."""
        self.expected_calls, self.results, self.inputs, self.before = [], [], [], []
        for region in (*self.bench.inputs, *self.bench.output_gradients):
            region.forget()

    def are_inputs_intact(self, count: int) -> bool:
        """Return whether the inputs of so many calls still are what was written."""
        return all(region.is_unchanged() for region in self.bench.inputs[:count])

    def are_output_gradients_intact(self, count: int) -> bool:
        """Return whether the gradients of so many calls' outputs still are what was written."""
        return all(region.is_unchanged() for region in self.bench.output_gradients[:count])

    def is_eager_touched(self) -> bool:
        """Return whether eager's parameters are not what was written."""
        buffers = self._buffers()
        return any(eager.state.changed(buffers) for eager in self.bench.eager)

    def changed_parameters(self) -> list[str]:
        """Return the parameters that the solution changed, by the reference's names."""
        return self.state.changed(self._buffers())

    def _buffers(self) -> set[str]:
        """Return all names of buffers; a buffer of a module that is used twice has two names."""
        return {name for name, _ in self.module.named_buffers(remove_duplicate=False)}

    def parameters(self) -> list[str]:
        """Return the reference's names of the parameters that have gradients."""
        own = {id(p) for p in self.module.parameters() if p.is_floating_point()}
        there = self.module.state_dict(keep_vars=True)
        return [name for name in self._changing if id(there[name]) in own]

    def expected(self, inputs: list) -> list:
        """Return the error budgets of the reference's results for inputs."""
        with restored_buffers(self.module):
            return self.problem.expected(self.module, inputs)

    def run_reference(self, inputs: list) -> list[torch.Tensor]:
        """Return the reference's results for inputs."""
        with restored_buffers(self.module):
            return self.problem.run(self.module, inputs)

    def _keep_stale(self) -> None:
        if self.problem.parameter_bytes <= LARGEST_STALE and self._changing:
            self.stale = self.problem.copy(self.module)


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers afterwards: a forward in training mode changes them."""
    distinct = [without_repeats(x) for x in module.buffers()]
    kept = [(x, x.clone()) for x in distinct]
    try:
        yield
    finally:
        for x, value in kept:
            x.copy_(value)
