"""One file under grading: everything that the checks share.

The checks are functions in the files of `referee/checks`. They take a `Grading` and raise
`NotCorrectError` as soon as something is wrong. `CHECKS_ONCE` and `CHECKS_PER_SETTING` in
`referee/checks/__init__` list them in their order.
"""

import base64
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

import torch
from torch import nn

from referee.bench import Bench, write_all
from referee.comparison.accuracy import typical_error
from referee.comparison.compare import flat_reals
from referee.comparison.quantity import Quantity
from referee.comparison.reference_tensor import ReferenceTensor
from referee.comparison.second_look import SecondLook
from referee.contestants.contestant import Contestant
from referee.contestants.reading import can_read
from referee.contestants.shared import without_repeats
from referee.contestants.state import State, StateError
from referee.reference.file import BadReferenceError
from referee.reference.other_roundings import OtherRoundings
from referee.reference.random_values import changing_names, new_seed, vary
from referee.reference.training_step import StepArguments, step_or_none
from referee.times.timing import Rounds
from referee.verdict import NotCorrectError, Run, Verdict
from referee.words import WRONG

# Bytes of parameters. The module with the parameters of the call before is kept only if it has no
# more: it helps to recognize a solution that answers with old parameters, and decides nothing.
LARGEST_PREVIOUS_MODULE = 1 << 30
OTHER_ROUNDINGS = 16  # results of the reference in a second look
OTHER_ROUNDINGS_OF_STEPS = 8
TIMEOUT = 300  # default of `Options.timeout`


@dataclass(frozen=True)
class GradedFile:
    """A solution's file, which was read before the first solution started.

    Attributes:
        path: the file.
        text: its content.
    """

    path: Path
    text: bytes


@dataclass(frozen=True)
class Options:
    """How files are graded.

    Attributes:
        rounds: how many rounds are timed.
        timeout: the seconds that a solution's process may run, for one file.
        is_sweep: whether only the checks of a sweep are made.
        compiled: whether torch.compile's program is timed beside eager.
        is_quick: whether yardsticks that take long to prepare are left out.
        largest_gradients: bytes. If a problem's parameters take more, gradients are compared for
            its small inputs only, and no training step is timed.
    """

    rounds: Rounds
    timeout: float
    is_sweep: bool = False
    compiled: bool = False
    is_quick: bool = False
    largest_gradients: float = math.inf


class Grading:
    """A file under grading.

    Some attributes only help to describe a wrong result, which may be the right result of another
    call: `previous_...` belong to the call directly before, `earlier_...` to several calls before.
    Other attributes are set by one check for those after it; their descriptions name the check. The
    arguments, and the bench's problem, are attributes, too.

    Args:
        bench: the shared memory and eager's processes for the problem.
        file: the solution's file.
        options: how it is graded.
        verdict: takes in what the checks find.
        progress: is called with what is done now and how far it is.

    Attributes:
        device: the device on which solutions compute.
        solution: the process that runs the file.
        state: the solution's parameters and buffers.
        module: the reference's module; it has the same parameters as all contestants.
        is_timed_module: whether the modules have the problem's own arguments, not a small case's.
        inputs: the arguments of the latest call.
        previous_module: the reference's module with the parameters of the call before; None if no
            such module is kept.
        previous_inputs: the arguments of the call before; empty if they are not kept.
        earlier_results: small results of the reference for some earlier inputs, on the CPU.
        reference_tensors: for each result, the reference's in the latest comparison of
            `check_values`. Their values are freed. Their error budgets hold for timed calls.
        result_templates: tensors with the shapes and dtypes of one call's results. If results are
            copied within the clock, room is made for such tensors.
        quantities: results and gradients of a training step, with their error budgets. Set by
            `check_gradients`; empty if the file is forward only or gradients were not compared.
        has_differed: whether the solution differed from the reference for some unusual inputs. Set
            by `check_case`.
        relies_on_inputs: whether the solution may rely on what `get_inputs` draws: it has differed
            for other inputs or could not be tried with them. Set by `check_other_inputs`.
        is_forward_only: whether the solution lacks gradients of the problem's own small inputs. Set
            by `check_own_gradients`.
        run: the times under the current setting; None before `time_forwards` takes them.
    """

    def __init__(
        self,
        bench: Bench,
        file: GradedFile,
        options: Options,
        verdict: Verdict,
        progress: Callable[..., None],
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
        # On a CPU this is known now; on a GPU the first results tell.
        bench.are_results_copied = False
        if self.device.type == "cpu":
            bench.are_results_copied = not can_read(self.solution.pid, self.solution.span[0])
        self.state = State(self.solution, bench.pool)
        self.module: nn.Module | None = None
        self.is_timed_module = False
        self.inputs: list = []
        self.previous_module: nn.Module | None = None
        self.previous_inputs: list = []
        self.earlier_results: list[torch.Tensor] = []
        self.reference_tensors: list[ReferenceTensor] = []
        self.result_templates: list[torch.Tensor] = []
        self.quantities: list[Quantity] = []
        self.has_differed = False
        self.relies_on_inputs = False
        self.is_forward_only = False
        self.run: Run | None = None
        # The names of the parameters and buffers that get new values.
        self._changing_names: list[str] = []
        # Their first values. New ones are made from these, so that their size does not drift.
        self._first_values: dict[str, torch.Tensor] = {}

    def close(self) -> None:
        """End the solution's process and give back the memory that the grading has used."""
        self.solution.close()
        self.state.close()
        self.forget_round()

    def set_precision(self, setting: str) -> None:
        """Set the precision of float32 products, in this process and in the solution's."""
        self.problem.setting = setting
        torch.set_float32_matmul_precision(self.problem.precision)
        self.solution.ask("set_precision", setting=self.problem.precision)

    def import_file(self) -> float:
        """Have the solution's process import its file; return the seconds that it took."""
        self.progress("importing")
        reference = self.problem.file
        reply = self.solution.ask(
            "import_file",
            text=base64.b64encode(self.file.text).decode(),
            path=str(self.file.path.resolve()),
            names=list(reference.solutions),
            folders=[str(reference.path.resolve().parent), *reference.folders],
        )
        seconds = reply["seconds"]  # the solution may have changed them
        is_number = isinstance(seconds, float) and math.isfinite(seconds)
        return seconds if is_number else 0.0

    def construct(self, args: list | None = None, compare: bool = False) -> None:
        """Construct both modules under one seed and give the solution the reference's parameters.

        Args:
            args: the constructors' arguments; None for the problem's own.
            compare: whether both constructors must have drawn the same values.
        """
        self.is_timed_module = args is None
        if args is None:
            args = self.problem.args
        seed = new_seed()
        self.previous_module = None
        self.module = self.problem.construct(seed, args)
        try:
            self.state.construct(self.problem.file.dtype, seed, self.module, args, compare)
        except StateError as error:
            raise NotCorrectError(WRONG, str(error)) from None
        self._changing_names = changing_names(self.module)
        self._keep_first_values()

    def set_state(self, values: list[torch.Tensor]) -> None:
        """Give the reference these parameters and buffers.

        `write_state` gives them to the solution.

        Args:
            values: the new values, in the order of the module's `state_dict()`.
        """
        self._keep_previous_module()
        for x, value in zip(self.module.state_dict().values(), values, strict=True):
            x.copy_(value)
        self._keep_first_values()

    def redraw_state(self) -> None:
        """Give the reference new parameters and buffers.

        `write_state` gives them to the solution.
        """
        if not self._changing_names:
            return
        self._keep_previous_module()
        state = self.module.state_dict()
        for name in self._changing_names:
            without_repeats(state[name]).copy_(vary(self._first_values[name], new_seed()))

    def write_state(self) -> None:
        """Write the reference's parameters and buffers where the solution reads them."""
        self.state.write(list(self.module.state_dict().values()))

    def write_inputs(self, calls: list[list]) -> None:
        """Write the arguments of the next request's calls, a list for each call."""
        write_all(self.bench.inputs, self.bench.pool, calls)

    def draw_inputs(self) -> list:
        """Return new inputs; before large ones are drawn, the present ones are freed."""
        if self.problem.gives_memory_back:
            self.forget_round()
        return self.problem.draw()

    def forget_round(self) -> None:
        """Free what the referee keeps of a round so that the next round has the memory."""
        self.result_templates = []
        self.inputs = []
        self.previous_inputs = []
        for region in (*self.bench.inputs, *self.bench.output_gradients):
            region.forget()

    def are_inputs_intact(self, count: int) -> bool:
        """Return whether the inputs of the first `count` calls still are what was written."""
        return all(region.is_unchanged() for region in self.bench.inputs[:count])

    def are_output_gradients_intact(self, count: int) -> bool:
        """Return whether the outputs' gradients of `count` calls still are what was written."""
        return all(region.is_unchanged() for region in self.bench.output_gradients[:count])

    def are_eager_parameters_intact(self) -> bool:
        """Return whether eager's parameters still are what was written."""
        buffers = self._buffer_names()
        return not any(eager.state.changed_parameters(buffers) for eager in self.bench.eager)

    def changed_parameters(self) -> list[str]:
        """Return the parameters that the solution changed, by the reference's names."""
        return self.state.changed_parameters(self._buffer_names())

    def parameter_names(self) -> list[str]:
        """Return the reference's names of the parameters that have gradients."""
        ids_of_parameters = {id(p) for p in self.module.parameters() if p.is_floating_point()}
        state = self.module.state_dict(keep_vars=True)  # the Parameter objects, not their data
        return [name for name in self._changing_names if id(state[name]) in ids_of_parameters]

    def expected_results(self, inputs: list) -> list[ReferenceTensor]:
        """Return the reference's results for inputs, with their error budgets."""
        with restored_buffers(self.module):
            return self.problem.expected(self.module, inputs)

    def run_reference(self, inputs: list) -> list[torch.Tensor]:
        """Return the reference's results for inputs, without error budgets."""
        with restored_buffers(self.module):
            return self.problem.run(self.module, inputs)

    def second_look(self, inputs: list, result_index: int) -> SecondLook | None:
        """Return a function that computes one of the reference's results with other roundings.

        It yields several results; fewer or none if memory is short. There is no second look, but
        None, if the problem covers all values: its own limits then say what is right.

        Args:
            inputs: the arguments of the forward.
            result_index: which of its results is computed.
        """
        if self.problem.file.covers_all_values:
            return None
        return partial(self._results_with_other_roundings, inputs, result_index)

    def _results_with_other_roundings(
        self, inputs: list, result_index: int
    ) -> Iterator[torch.Tensor]:
        """Yield one result of the reference with other roundings, several times."""
        with suppress(BadReferenceError, torch.OutOfMemoryError):
            for _ in range(OTHER_ROUNDINGS):
                with restored_buffers(self.module), OtherRoundings(self.problem):
                    results = self.problem.run(self.module, inputs)
                yield results[result_index]

    def errors_of_other_roundings(self, step: StepArguments, eager: list) -> list[float]:
        """Return the typical errors of a training step's results with other roundings.

        Args:
            step: the step's arguments.
            eager: eager's results and gradients.

        Returns:
            The largest of several typical errors, for each result and gradient; infinity if the
            steps cannot be run, for example for lack of memory.
        """
        largest = [0.0] * len(eager)
        unknown = [math.inf] * len(eager)
        try:
            for _ in range(OTHER_ROUNDINGS_OF_STEPS):
                with restored_buffers(self.module), OtherRoundings(self.problem):
                    others = step_or_none(lambda: self.problem.run_step(*step))
                if others is None:
                    return unknown
                for i, error in _typical_errors(others, eager):
                    largest[i] = max(largest[i], error)
        except (BadReferenceError, torch.OutOfMemoryError):
            return unknown
        return largest

    def _buffer_names(self) -> set[str]:
        """Return all names of buffers; those of a module that is used twice have two names each."""
        return {name for name, _ in self.module.named_buffers(remove_duplicate=False)}

    def _keep_previous_module(self) -> None:
        """Keep a copy of the reference's module before its parameters change."""
        is_small = self.problem.parameter_bytes <= LARGEST_PREVIOUS_MODULE
        if is_small and self._changing_names:
            self.previous_module = self.problem.copy(self.module)

    def _keep_first_values(self) -> None:
        """Keep the values from which new parameters and buffers are made."""
        state = self.module.state_dict()
        self._first_values = {
            name: without_repeats(state[name]).clone() for name in self._changing_names
        }


def _typical_errors(others: list, eager: list) -> Iterator[tuple[int, float]]:
    """Yield the index and the typical error of each result that can be compared with eager's."""
    for i, (other, x) in enumerate(zip(others, eager, strict=False)):
        are_both_there = other is not None and x is not None
        if are_both_there and other.shape == x.shape:
            yield i, typical_error(flat_reals(other), flat_reals(x))


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers when the block ends; a forward in training mode changes them."""
    buffers = [without_repeats(x) for x in module.buffers()]
    values = [x.clone() for x in buffers]
    try:
        yield
    finally:
        for x, value in zip(buffers, values, strict=True):
            x.copy_(value)
