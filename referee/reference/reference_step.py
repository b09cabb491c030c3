"""A training step of the reference, with the error budgets of its results and gradients."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from referee.comparison.reference_tensor import ReferenceTensor
from referee.reference.file import BadReferenceError, NoRoomError
from referee.reference.float64 import (
    NO_FLOAT64,
    NO_ROOM_FOR_FLOAT64,
    inputs_in_float64,
    module_in_float64,
)
from referee.reference.operators import Operators
from referee.reference.problem import Problem, StepArguments
from referee.reference.random_values import draw_into
from referee.reference.tf32 import RoundedOperands


class Float64Step(NamedTuple):
    """Results and gradients of a training step in float64.

    Attributes:
        exact: results and gradients in float64; None if there are none.
        in_tf32: the same with operands rounded to TF32; None where TF32 is not allowed.
        obstacle: why there are none. It is None if there are some, if the problem needs none, or if
            forwards have none either, which a note says already.
    """

    exact: list | None = None
    in_tf32: list | None = None
    obstacle: str | None = None

    def exact_at(self, index: int) -> torch.Tensor | None:
        """Return one result or gradient in float64; None if there are none."""
        return None if self.exact is None else self.exact[index]

    def in_tf32_at(self, index: int) -> torch.Tensor | None:
        """Return the same with operands rounded to TF32; None where TF32 is not allowed."""
        return None if self.in_tf32 is None else self.in_tf32[index]


def draw_gradients(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return new gradients for those outputs that hold floats."""
    floats = [y for y in outputs if y.is_floating_point()]
    return [draw_into(torch.zeros(y.shape, dtype=y.dtype, device=y.device)) for y in floats]


def step_with_budgets(
    problem: Problem, step: StepArguments, float64_obstacle: str | None = None
) -> tuple[list[ReferenceTensor | None], str | None]:
    """Return the reference's results and gradients of a training step, with their error budgets.

    Args:
        problem: the reference.
        step: the step.
        float64_obstacle: why an earlier step could not be run in float64; None if it could be.

    Returns:
        Results, then gradients; None for a gradient that does not exist. The list is empty if the
        reference has no gradients to compare. The second value says why the budgets do not follow
        from a step in float64; None if they do, if they need none, or if those of forwards do not
        either.
    """
    with Operators() as observed:
        eager = step_or_none(lambda: problem.run_step(step))
    if eager is None:
        return [], float64_obstacle
    has_gradients = any(gradient is not None for gradient in eager[step.output_count :])
    are_dense = all(x is None or x.layout == torch.strided for x in eager)
    if not has_gradients or not are_dense:
        return [], float64_obstacle
    in_float64 = _step_in_float64(problem, step, float64_obstacle)
    tensors: list[ReferenceTensor | None] = []
    for index, x in enumerate(eager):
        if x is None:
            tensors.append(None)
            continue
        # An output has the budget of a forward. That of a gradient follows from the whole step.
        terms = problem.terms if index < step.output_count else observed.most_terms
        tensor = problem.reference_tensor_in_step(
            x, in_float64.exact_at(index), terms, in_float64.in_tf32_at(index)
        )
        if problem.gives_memory_back:
            tensor.forget_exact()
        tensors.append(tensor)
    return tensors, in_float64.obstacle


def _step_in_float64(problem: Problem, step: StepArguments, obstacle: str | None) -> Float64Step:
    """Run a training step in float64, where the problem needs it and it is possible."""
    # The reason `problem.float64_obstacle` is not repeated for steps: it is noted for forwards.
    if problem.float64_obstacle or obstacle or not problem.needs_float64:
        return Float64Step(obstacle=obstacle)

    def run() -> list:
        wide_step = step._replace(
            module=problem.file.call_or_refuse("float64", lambda: module_in_float64(step.module)),
            inputs=inputs_in_float64(step.inputs),
            output_gradients=[g.double() for g in step.output_gradients],
        )
        return problem.run_step(wide_step)

    try:
        exact = step_or_none(run)
        if exact is None:
            return Float64Step(obstacle=NO_FLOAT64)
        operators = problem.operators_in_tf32()
        if not operators:
            return Float64Step(exact)
        with RoundedOperands(operators):
            return Float64Step(exact, in_tf32=step_or_none(run))
    except (NoRoomError, torch.OutOfMemoryError):
        return Float64Step(obstacle=NO_ROOM_FOR_FLOAT64)


def step_or_none(run: Callable[[], list]) -> list | None:
    """Return the results of a training step of the reference; None if it has no backward.

    It has none if the reference's own code raises when autograd records it. An exception of the
    referee's code goes on: it must not pass for a missing backward.

    Raises:
        NoRoomError, torch.OutOfMemoryError: there may be a backward, but no memory for it.
    """
    try:
        return run()
    except NoRoomError:  # which is a BadReferenceError
        raise
    except BadReferenceError:
        return None
