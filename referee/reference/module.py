"""The reference's module, whose parameters and buffers change while a file is graded."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import nn

from referee.comparison.accuracy import typical_error
from referee.comparison.compare import flat_reals
from referee.comparison.reference_tensor import ReferenceTensor
from referee.comparison.second_look import RoundedOtherwise
from referee.contestants.forms import without_repeats
from referee.reference.file import BadReferenceError
from referee.reference.other_roundings import OtherRoundings
from referee.reference.problem import Problem, StepArguments
from referee.reference.random_values import changing_names, new_seed, vary_into
from referee.reference.reference_step import step_or_none, step_with_budgets

# Bytes of parameters. The module with the parameters of the call before is kept only if it has no
# more: it helps to recognize a solution that answers with old parameters, and decides nothing.
MAX_PREVIOUS_MODULE_BYTES = 1 << 30
OTHER_ROUNDINGS = 16  # results of the reference in a second look
OTHER_ROUNDINGS_OF_STEPS = 8


class ReferenceModule:
    """The reference's module in the referee's process, which no solution is given.

    A module in training mode changes its buffers in a forward. Each method that runs the module
    restores them.

    Args:
        problem: the reference on its device.

    Attributes:
        module: the module; `construct` makes it.
        previous: the module with the parameters before the latest change; None if it is not kept.
        has_timed_arguments: whether the module was constructed with the problem's own arguments,
            not with those of a small case.
        float64_obstacle_in_steps: like `Problem.float64_obstacle`, of training steps; the first
            `step_with_budgets` finds it. A lack of memory for the steps of one file is none for
            the next, which has a `ReferenceModule` of its own.
    """

    def __init__(self, problem: Problem) -> None:
        self.module: nn.Module | None = None
        self.previous: nn.Module | None = None
        self.has_timed_arguments = False
        self.float64_obstacle_in_steps: str | None = None
        self._problem = problem
        # The names of the parameters and buffers that get new values.
        self._changing_names: list[str] = []
        # Their first values. New ones are made from these, so that their size does not drift.
        self._first_values: dict[str, torch.Tensor] = {}

    def construct(self, seed: int, arguments: list | None) -> None:
        """Construct the module; its parameters are drawn under the seed.

        Args:
            seed: the seed of torch's generator.
            arguments: the constructor's arguments; None for the problem's own.
        """
        self.has_timed_arguments = arguments is None
        self.previous = None
        self.module = self._problem.construct(seed, arguments)
        self._changing_names = changing_names(self.module)
        self._keep_first_values()

    def set_values(self, values: list[torch.Tensor]) -> None:
        """Set all parameters and buffers.

        Args:
            values: the new values, in the order of the module's `state_dict()`.
        """
        self._keep_previous()
        for x, value in zip(self.values(), values, strict=True):
            x.copy_(value)
        self._keep_first_values()

    def redraw_values(self) -> None:
        """Give the parameters and buffers that hold floats new random values."""
        if not self._changing_names:
            return
        self._keep_previous()
        state = self.module.state_dict()
        for name in self._changing_names:
            vary_into(without_repeats(state[name]), self._first_values[name], new_seed())

    def values(self) -> list[torch.Tensor]:
        """Return all parameters and buffers, in the order of the module's `state_dict()`."""
        return list(self.module.state_dict().values())

    def parameter_names(self) -> list[str]:
        """Return the names of the parameters that have gradients."""
        ids_of_parameters = {id(p) for p in self.module.parameters() if p.is_floating_point()}
        state = self.module.state_dict(keep_vars=True)  # the Parameter objects, not their data
        return [name for name in self._changing_names if id(state[name]) in ids_of_parameters]

    def buffer_names(self) -> set[str]:
        """Return all names of buffers; those of a module that is used twice have two names each."""
        return {name for name, _ in self.module.named_buffers(remove_duplicate=False)}

    def eager_results(self, inputs: list) -> list[torch.Tensor]:
        """Return eager's results of a forward, without error budgets."""
        with _restored_buffers(self.module):
            return self._problem.run(self.module, inputs)

    def reference_tensors(self, inputs: list) -> list[ReferenceTensor]:
        """Return eager's results of a forward, with their error budgets."""
        with _restored_buffers(self.module):
            return self._problem.reference_tensors(self.module, inputs)

    def buffers_after(self, inputs: list) -> dict[str, ReferenceTensor]:
        """Return the buffers that a forward changes, as it leaves them, with their error budgets.

        They are by name. The forward may as well be that of a training step.
        """
        names = self._problem.changed_buffers
        module = _BuffersAfterForward(self.module, names)
        return dict(zip(names, self._problem.reference_tensors(module, inputs), strict=True))

    def eager_results_of_step(self, step: StepArguments) -> list[torch.Tensor | None]:
        """Return eager's results and gradients of a training step, without error budgets."""
        with _restored_buffers(self.module):
            return self._problem.run_step(step)

    def step_with_budgets(self, step: StepArguments) -> list[ReferenceTensor | None]:
        """Return eager's results and gradients of a training step, with their error budgets.

        The list is empty if the reference has no gradients to compare.
        """
        with _restored_buffers(self.module):
            tensors, self.float64_obstacle_in_steps = step_with_budgets(
                self._problem, step, self.float64_obstacle_in_steps
            )
        return tensors

    def rounded_otherwise(self, inputs: list, result_index: int) -> RoundedOtherwise | None:
        """Return a function that computes one of a forward's results with other roundings.

        It yields several results; fewer or none if memory is short. A problem with cases of its own
        has no second look, so the function is None.

        Args:
            inputs: the arguments of the forward.
            result_index: which of its results is computed.
        """
        if self._problem.file.has_own_cases:
            return None
        return partial(self._results_with_other_roundings, inputs, result_index)

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
                with _restored_buffers(self.module), OtherRoundings(self._problem):
                    other_results = step_or_none(lambda: self._problem.run_step(step))
                if other_results is None:
                    return unknown
                for i, error in _typical_errors(other_results, eager):
                    largest[i] = max(largest[i], error)
        except (BadReferenceError, torch.OutOfMemoryError):
            return unknown
        return largest

    def _results_with_other_roundings(
        self, inputs: list, result_index: int
    ) -> Iterator[torch.Tensor]:
        """Yield one result of a forward with other roundings, several times."""
        with suppress(BadReferenceError, torch.OutOfMemoryError):
            for _ in range(OTHER_ROUNDINGS):
                with _restored_buffers(self.module), OtherRoundings(self._problem):
                    results = self._problem.run(self.module, inputs)
                yield results[result_index]

    def _keep_previous(self) -> None:
        """Keep a copy of the module before its parameters change."""
        is_small = self._problem.parameter_bytes <= MAX_PREVIOUS_MODULE_BYTES
        if not is_small or not self._changing_names:
            return
        if self.previous is None:
            self.previous = self._problem.file.copy(self.module)
            return
        # To copy the values alone takes a quarter of the time: the copy's memory is not new.
        for old, value in zip(self.previous.state_dict().values(), self.values(), strict=True):
            without_repeats(old).copy_(without_repeats(value))

    def _keep_first_values(self) -> None:
        """Keep the values from which new parameters and buffers are made."""
        state = self.module.state_dict()
        self._first_values = {
            name: without_repeats(state[name]).clone() for name in self._changing_names
        }


@contextmanager
def _restored_buffers(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers when the block ends, also those that a forward has replaced."""
    before = [
        (owner, name, x, without_repeats(x).clone())
        for owner in module.modules()
        for name, x in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for owner, name, x, value in before:
            without_repeats(x).copy_(value)
            setattr(owner, name, x)


class _BuffersAfterForward(nn.Module):
    """A module whose results are buffers of another one after a forward of that one.

    Args:
        module: the other module; each forward restores its buffers.
        names: the names of the buffers.
    """

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        super().__init__()
        self._module = module
        self._names = names

    def forward(self, *inputs: object) -> list[torch.Tensor]:
        """Run the other module; return copies of its buffers."""
        with _restored_buffers(self._module):
            self._module(*inputs)
            state = self._module.state_dict()
            return [state[name].clone() for name in self._names]


def _typical_errors(other_results: list, eager: list) -> Iterator[tuple[int, float]]:
    """Yield the index and the typical error of each result that can be compared with eager's."""
    for i, (other, x) in enumerate(zip(other_results, eager, strict=False)):
        are_both_there = other is not None and x is not None
        if are_both_there and other.shape == x.shape:
            yield i, typical_error(flat_reals(other), flat_reals(x))
