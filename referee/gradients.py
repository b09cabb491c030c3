"""The backward of a solution: gradients beside the reference's.

Where a sum is near zero, rounding decides whether ReLU passes a gradient: an honest gradient may
differ there by much. These places are different for other inputs. So either gradients are compared
for several draws of inputs, or the problem knows the places, and the outputs' gradients are zero
there.
"""

import math

import torch

from referee import cases
from referee.budget import GROSS, Found, Output, RoundedOperands, count_true
from referee.gradients_of import is_differentiable
from referee.problem import (
    NO_FLOAT64,
    NO_ROOM_FOR_FLOAT64,
    Problem,
    derive_or_none,
    difference,
    in_float64,
    widened,
)

CHANCE = 0.01  # if rounding explains the errors with less probability, it is not the cause
STRAYS = 0.02  # if a larger share of elements is wrong in every draw, rounding is not the cause
STALE = 0.25  # ReLU near zero does not explain a gradient with a larger relative error


class Quantity:
    """A result or a gradient of a training step, and how far off it was in the draws so far.

    An example: of 1,000 elements 3 are wrong in each of two draws, and 2 of them are the same. If
    rounding had chosen them, an element would be wrong in both draws with a probability of
    0.003 * 0.003, and 0.009 such elements would be expected. There are 2, more than 100 times
    (1 / CHANCE) as many: the gradient is wrong.

    Args:
        what: the name for messages.

    Attributes:
        expected: the reference's in this draw, with its budget; None where the reference has none.
        found: the comparison of the last draw.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.expected: Output | None = None
        self.found: Found | None = None
        self._first_problem = ""
        self._is_wrong = False  # shown by a single draw
        self._had_a_right_draw = False
        self._least_relative = math.inf  # the smallest relative error of a draw
        self._least_share = math.inf  # the smallest share of wrong elements in a draw
        self._wrong: torch.Tensor | None = None  # a mask: wrong in every draw so far
        self._chance = 1.0  # probability that an element is wrong in every draw by rounding alone

    def compare(self, got: torch.Tensor, is_strict: bool) -> None:
        """Compare the solution's tensor of one draw; nothing may be wrong if `is_strict`."""
        found = self.found = self.expected.compare([(0, got.reshape(-1))])
        self._record(found.beyond, found.relative, found.problem or "", is_strict)
        self.expected.forget()

    def compare_timed(self, got: torch.Tensor, eager: torch.Tensor) -> None:
        """Compare the tensor of a timed step with eager's."""
        problem = self.expected.compare_some(got.reshape(-1), eager.reshape(-1))
        if self.expected.is_exact:
            if problem:
                self._is_wrong = True
                self._note(problem)
            return
        relative = difference(got, eager) if problem else 0.0
        if relative > STALE:
            self._is_wrong = True
            self._note(problem)
        beyond = self.expected.beyond(got, eager)
        self._record(beyond, relative, problem or "", is_strict=False)

    def mistake(self) -> str | None:
        """Return in words what is wrong, for certain; None if rounding may explain it."""
        if self._is_wrong or self._is_wrong_in_every_draw():
            return f"{self.what}: {self._first_problem}"
        return None

    @property
    def is_wrong_at_once(self) -> bool:
        """True once one draw alone has shown that it is wrong."""
        return self._is_wrong

    def again(self) -> "Quantity":
        """Return a quantity with the same budget that has seen no draw."""
        made = Quantity(self.what)
        made.expected = self.expected
        return made

    def _record(self, beyond: torch.Tensor, relative: float, problem: str, is_strict: bool) -> None:
        """Record one draw's comparison.

        Args:
            beyond: a mask of the elements that are off by too much.
            relative: the error of the whole.
            problem: what is wrong, in words.
            is_strict: nothing may be wrong.
        """
        count = count_true(beyond)
        if count:
            self._note(problem)
        if self.expected.is_exact or is_strict:
            self._is_wrong = self._is_wrong or count > 0
            return
        if count == 0:
            self._had_a_right_draw = True
            return
        share = count / len(beyond)
        self._least_relative = min(self._least_relative, relative)
        self._least_share = min(self._least_share, share)
        self._chance *= share
        self._wrong = beyond if self._wrong is None else self._wrong & beyond

    def _note(self, problem: str) -> None:
        """Keep the first problem for the message."""
        self._first_problem = self._first_problem or problem

    def _is_wrong_in_every_draw(self) -> bool:
        """Return whether the draws together show what rounding does not explain."""
        if self._wrong is None or self._had_a_right_draw:
            return False
        if self._least_share > STRAYS or self._least_relative > GROSS:
            return True
        expected = self._chance * len(self._wrong)
        return expected < CHANCE * count_true(self._wrong)


def draw_gradients(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return new gradients, one for each output that holds floats, recorded or not."""
    floats = [y for y in outputs if y.is_floating_point()]
    return [cases.refill(torch.zeros(y.shape, dtype=y.dtype, device=y.device)) for y in floats]


def names_of(inputs: list, parameters: list[str], results: int) -> list[str]:
    """Return the names of the quantities of a training step, in order."""
    count = sum(map(is_differentiable, inputs))
    operands = ["x"] if count == 1 else [f"input {i}" for i in range(count)]
    gradients = [f"gradient of {name}" for name in [*operands, *parameters]]
    return [*(f"result {i}" for i in range(results)), *gradients]


def reference_gradients(
    problem: Problem,
    module: torch.nn.Module,
    inputs: list,
    output_gradients: list,
    parameters: list[str],
) -> list[Output | None] | None:
    """Return the error budgets of a step's outputs and gradients; None where there is none.

    Args:
        problem: the problem.
        module: the reference.
        inputs: of the forward.
        output_gradients: the gradients of the outputs.
        parameters: names of those that have gradients.
    """
    gradients = sum(map(is_differentiable, inputs)) + len(parameters)
    eager = derive_or_none(lambda: problem.derive(module, inputs, output_gradients, parameters))
    if not gradients or eager is None or all(x is None for x in eager[-gradients:]):
        return None
    if any(x is not None and x.layout != torch.strided for x in eager):
        return None
    exact, allowed = _exact_gradients(problem, module, inputs, output_gradients, parameters)
    exact = exact or [None] * len(eager)
    allowed = allowed or [None] * len(eager)
    terms = max(y.numel() for y in eager[:-gradients])
    found: list[Output | None] = []
    for x, y, z in zip(eager, exact, allowed, strict=True):
        made = None
        if x is not None:
            made = problem.budget(x, y, terms) if z is None else Output(x, y, terms, allowed=z)
            if problem.is_large:
                made.forget_exact()
        found.append(made)
    return found


def _exact_gradients(
    problem: Problem,
    module: torch.nn.Module,
    inputs: list,
    output_gradients: list,
    parameters: list[str],
) -> tuple[list | None, list | None]:
    """Return outputs and gradients in float64, and what TF32 makes of them where it is allowed.

    None stands for those that cannot be had, or are not needed.
    """
    if problem.note or problem.step_note or not problem.needs_float64:
        return None, None

    def derive() -> list:
        doubled = [g.double() for g in output_gradients]
        return problem.derive(in_float64(module), widened(inputs), doubled, parameters)

    try:
        exact = derive_or_none(derive)
        words = problem.tf32_operators()
        if exact is None:
            problem.step_note = NO_FLOAT64
        if exact is None or not words:
            return exact, None
        with RoundedOperands(words):
            return exact, derive_or_none(derive)
    except torch.OutOfMemoryError:
        problem.step_note = NO_ROOM_FOR_FLOAT64
        return None, None
