"""Results and gradients of training steps, beside the reference's.

Where a sum is near zero, rounding decides whether ReLU passes a gradient: there an honest gradient
may differ by much. Other inputs have these places elsewhere. So there are two ways to tell rounding
from a mistake. Either the problem knows the places, and the outputs' gradients are zero there, or
gradients are compared for several draws of inputs, and an element must be wrong in all of them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from referee import cases
from referee.accuracy import GROSS, count_true
from referee.compare import relative_difference
from referee.float64 import NO_FLOAT64, NO_ROOM_FOR_FLOAT64, inputs_in_float64, module_in_float64
from referee.gradients_of import is_differentiable
from referee.operators import RoundedOperands
from referee.problem import Problem
from referee.reference_tensor import Comparison, ReferenceTensor

# Rounding is not the cause of errors that it makes with a smaller probability.
LEAST_CHANCE = 0.01
# Rounding is not the cause if a larger share of elements is wrong in every draw.
LARGEST_SHARE_BY_ROUNDING = 0.02
# ReLU near zero does not explain a gradient whose relative error is larger.
LARGEST_ERROR_BY_RELU = 0.25
# What torch raises where a module has no backward.
NO_BACKWARD = RuntimeError, ValueError, TypeError, NotImplementedError


class Quantity:
    """A result or a gradient of a training step, and how far off it was in the draws so far.

    An example: of 1,000 elements 3 are wrong in each of two draws, and 2 of them are the same. If
    rounding had chosen them, an element would be wrong in both draws with a probability of
    0.003 * 0.003, and 0.009 such elements would be expected. There are 2, more than 100 times
    (1 / LEAST_CHANCE) as many: the gradient is wrong.

    Args:
        name: the quantity in messages: "result 0", "gradient of x".

    Attributes:
        expected: the reference's in this draw, with its budget; None where the reference has none.
        comparison: the comparison of the last draw; None before the first.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.expected: ReferenceTensor | None = None
        self.comparison: Comparison | None = None
        self._first_mistake = ""
        self._is_wrong = False  # as a single draw has shown
        self._had_a_right_draw = False
        self._least_relative_error = math.inf  # of a draw
        self._least_wrong_share = math.inf  # of the elements of a draw
        self._always_wrong: torch.Tensor | None = None  # mask of elements wrong in every draw
        # The probability that rounding alone makes an element wrong in every draw.
        self._chance = 1.0

    def compare(self, got: torch.Tensor, is_strict: bool) -> None:
        """Compare the solution's tensor of one untimed draw.

        Args:
            got: the tensor.
            is_strict: whether a single wrong element is a mistake, in any draw.
        """
        comparison = self.expected.compare(got.reshape(-1))
        self.comparison = comparison
        relative_error = comparison.errors.relative
        self._record(comparison.wrong, relative_error, comparison.mistake or "", is_strict)
        self.expected.forget()

    def compare_timed(self, got: torch.Tensor, eager: torch.Tensor) -> None:
        """Compare the solution's tensor of a timed step with eager's."""
        mistake = self.expected.mistake_in_other_draw(got, eager)
        if self.expected.is_exact:
            if mistake:
                self._is_wrong = True
                self._keep_first(mistake)
            return
        relative_error = relative_difference(got, eager) if mistake else 0.0
        if relative_error > LARGEST_ERROR_BY_RELU:
            self._is_wrong = True
            self._keep_first(mistake)
        wrong = self.expected.wrong_in_other_draw(got, eager)
        self._record(wrong, relative_error, mistake or "", is_strict=False)

    def mistake(self) -> str | None:
        """Return in words what is wrong for certain; None if rounding may explain it."""
        if self._is_wrong or self._is_wrong_in_every_draw():
            return f"{self.name}: {self._first_mistake}"
        return None

    @property
    def is_wrong_at_once(self) -> bool:
        """True once a single draw has shown that the quantity is wrong."""
        return self._is_wrong

    def without_draws(self) -> "Quantity":
        """Return a quantity with the same name and budget, for which no draw was compared."""
        made = Quantity(self.name)
        made.expected = self.expected
        return made

    def _record(
        self, wrong: torch.Tensor, relative_error: float, mistake: str, is_strict: bool
    ) -> None:
        """Record the comparison of one draw.

        Args:
            wrong: a mask of the elements that are off by too much.
            relative_error: the relative error of the whole tensor.
            mistake: what is wrong, in words.
            is_strict: whether a single wrong element is a mistake.
        """
        wrong_count = count_true(wrong)
        if wrong_count:
            self._keep_first(mistake)
        if self.expected.is_exact or is_strict:
            self._is_wrong = self._is_wrong or wrong_count > 0
            return
        if wrong_count == 0:
            self._had_a_right_draw = True
            return
        share = wrong_count / len(wrong)
        self._least_relative_error = min(self._least_relative_error, relative_error)
        self._least_wrong_share = min(self._least_wrong_share, share)
        self._chance *= share
        self._always_wrong = wrong if self._always_wrong is None else self._always_wrong & wrong

    def _keep_first(self, mistake: str) -> None:
        """Keep the words for the first mistake, which the message quotes."""
        self._first_mistake = self._first_mistake or mistake

    def _is_wrong_in_every_draw(self) -> bool:
        """Return whether all draws together show a mistake that rounding does not explain."""
        if self._always_wrong is None or self._had_a_right_draw:
            return False
        if self._least_wrong_share > LARGEST_SHARE_BY_ROUNDING:
            return True
        if self._least_relative_error > GROSS:
            return True
        count_by_rounding = self._chance * len(self._always_wrong)
        return count_by_rounding < LEAST_CHANCE * count_true(self._always_wrong)


class StepArguments(NamedTuple):
    """The arguments of a training step of the reference; see `Problem.run_step`.

    Attributes:
        module: the reference's module.
        inputs: the arguments of the forward.
        output_gradients: the gradients of those outputs that hold floats.
        parameters: the names of the parameters that have gradients.
    """

    module: torch.nn.Module
    inputs: list
    output_gradients: list[torch.Tensor]
    parameters: list[str]

    @property
    def gradient_count(self) -> int:
        """The number of gradients of inputs and parameters."""
        return sum(map(is_differentiable, self.inputs)) + len(self.parameters)


class ReferenceStep(NamedTuple):
    """What the reference gives for a training step.

    Attributes:
        tensors: results, then gradients, each with its error budget; None for a gradient that does
            not exist.
        why_no_float64: why there is no step in float64 to set the budgets; "" if there is one, or
            none is needed.
    """

    tensors: list[ReferenceTensor | None]
    why_no_float64: str


class Float64Step(NamedTuple):
    """Results and gradients of a training step in float64.

    Attributes:
        exact: results and gradients in float64; None if there are none.
        in_tf32: the same with operands rounded to TF32; None where TF32 is not allowed.
        why_none: why there are none although some are needed, or "".
    """

    exact: list | None
    in_tf32: list | None
    why_none: str


def draw_gradients(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return new gradients for those outputs that hold floats."""
    floats = [y for y in outputs if y.is_floating_point()]
    return [cases.refill(torch.zeros(y.shape, dtype=y.dtype, device=y.device)) for y in floats]


def quantity_names(inputs: list, parameters: list[str], output_count: int) -> list[str]:
    """Return the names of a training step's results and gradients, in the order of a reply."""
    count = sum(map(is_differentiable, inputs))
    operands = ["x"] if count == 1 else [f"input {i}" for i in range(count)]
    gradients = [f"gradient of {name}" for name in [*operands, *parameters]]
    return [*(f"result {i}" for i in range(output_count)), *gradients]


def reference_step(problem: Problem, step: StepArguments) -> ReferenceStep | None:
    """Return the reference's results of a training step; None if it has no gradients to compare."""
    gradient_count = step.gradient_count
    eager = step_or_none(lambda: problem.run_step(*step))
    if not gradient_count or eager is None or all(x is None for x in eager[-gradient_count:]):
        return None
    if any(x is not None and x.layout != torch.strided for x in eager):
        return None
    in_float64 = _step_in_float64(problem, step)
    exact = in_float64.exact or [None] * len(eager)
    in_tf32 = in_float64.in_tf32 or [None] * len(eager)
    # A gradient of a parameter sums over as many terms as an output has elements, at most.
    terms = max(y.numel() for y in eager[:-gradient_count])
    tensors: list[ReferenceTensor | None] = []
    for x, exact_x, tf32_x in zip(eager, exact, in_tf32, strict=True):
        if x is None:
            tensors.append(None)
            continue
        if tf32_x is None:
            tensor = problem.budget(x, exact_x, terms)
        else:
            tensor = ReferenceTensor(x, exact_x, terms, allowed=tf32_x)
        if problem.is_large:
            tensor.forget_exact()
        tensors.append(tensor)
    return ReferenceStep(tensors, in_float64.why_none)


def _step_in_float64(problem: Problem, step: StepArguments) -> Float64Step:
    """Run a training step in float64, where the problem needs it and it is possible."""
    if problem.why_no_float64 or problem.why_no_float64_in_steps or not problem.needs_float64:
        return Float64Step(None, None, problem.why_no_float64_in_steps)

    def run() -> list:
        wide_module = module_in_float64(step.module)
        wide_gradients = [g.double() for g in step.output_gradients]
        wide_inputs = inputs_in_float64(step.inputs)
        return problem.run_step(wide_module, wide_inputs, wide_gradients, step.parameters)

    try:
        exact = step_or_none(run)
        if exact is None:
            return Float64Step(None, None, NO_FLOAT64)
        operators = problem.operators_in_tf32()
        if not operators:
            return Float64Step(exact, None, "")
        with RoundedOperands(operators):
            return Float64Step(exact, step_or_none(run), "")
    except torch.OutOfMemoryError:
        return Float64Step(None, None, NO_ROOM_FOR_FLOAT64)


def step_or_none(run: Callable[[], list]) -> list | None:
    """Return the results of a training step of the reference; None if it has no backward.

    Raises:
        torch.OutOfMemoryError: there may be a backward, but there is no memory for it.
    """
    try:
        return run()
    except torch.OutOfMemoryError:  # which is a RuntimeError
        raise
    except NO_BACKWARD:
        return None
