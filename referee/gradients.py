"""The backward of a solution: gradients beside the reference's.

Where a sum is near zero, rounding decides whether ReLU passes a gradient: an honest result may
differ there by much. Those places are others for other inputs, so that several sets are drawn; or
the problem knows them, and the outputs' gradients are zero there.
"""

import math

import torch

from referee import cases
from referee.budget import GROSS, Found, Output, RoundedOperands, count_true
from referee.gradients_of import is_differentiable
from referee.problem import (
    Problem,
    attempt_derive,
    difference,
    in_float64,
    where_there_is_room,
    widened,
)

CHANCE = 0.01  # at most, that so many elements are wrong in all draws, and it is no fault
STRAYS = 0.02  # of elements, that may be wrong in every draw
STALE = 0.25  # relative error of one gradient that ReLU's side does not explain


class Quantity:
    """A result or a gradient of a training step, and how far off it was in the draws so far.

    Args:
        what: it is, in words.

    Attributes:
        want: what it may be in this draw; None where the reference has no such gradient.
        found: in the last draw.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.want: Output | None = None
        self.found: Found | None = None
        self._first = ""
        self._is_wrong = False
        # Over all draws: the least relative error, the least share of elements that are wrong,
        # which are wrong in every draw, and the probability that so many are by chance.
        self._relative = self._share = math.inf
        self._wrong: torch.Tensor | None = None
        self._chance = 1.0
        self._had_a_right_draw = False

    def compare(self, got: torch.Tensor, is_strict: bool) -> None:
        """Take in what the solution gives for a draw; nothing may be wrong if `is_strict`."""
        found = self.found = self.want.compare([(0, got.reshape(-1))])
        self._take_in(found.beyond, found.relative, found.problem or "", is_strict)
        self.want.forget()

    def compare_timed(self, got: torch.Tensor, eager: torch.Tensor) -> None:
        """Take in what a timed step gives, beside eager's."""
        problem = self.want.compare_some(got.reshape(-1), eager.reshape(-1))
        if self.want.is_exact:
            self._is_wrong |= problem is not None
            self._first = self._first or problem or ""
            return
        relative = difference(got, eager) if problem else 0.0
        if relative > STALE:
            self._is_wrong, self._first = True, self._first or problem
        beyond = self.want.beyond(got, eager)
        self._take_in(beyond, relative, problem or "", is_strict=False)

    def problem(self) -> str | None:
        """Return what is wrong however the inputs are drawn, in words."""
        is_wrong = self._is_wrong
        if self._wrong is not None and not self._had_a_right_draw:
            is_placed = self._chance * len(self._wrong) < CHANCE * count_true(self._wrong)
            is_wrong |= is_placed or self._share > STRAYS or self._relative > GROSS
        return f"{self.what}: {self._first}" if is_wrong else None

    @property
    def is_wrong_at_once(self) -> bool:
        """Whether one draw alone has shown that it is wrong."""
        return self._is_wrong

    def again(self) -> "Quantity":
        """Return one with the same budget that has seen no draw."""
        made = Quantity(self.what)
        made.want = self.want
        return made

    def _take_in(
        self, beyond: torch.Tensor, relative: float, problem: str, is_strict: bool
    ) -> None:
        if not self._first and beyond.any():
            self._first = problem
        if self.want.is_exact or is_strict:
            self._is_wrong |= bool(beyond.any())
            return
        count = count_true(beyond)
        if not count:
            self._had_a_right_draw = True
            return
        share = count / len(beyond)
        self._relative, self._share = min(self._relative, relative), min(self._share, share)
        self._chance *= share
        self._wrong = beyond if self._wrong is None else self._wrong & beyond


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
    problem: Problem, module: torch.nn.Module, inputs: list, given: list, parameters: list[str]
) -> list[Output | None] | None:
    """Return what outputs and gradients of a step may be; None where the reference has none.

    Args:
        problem: the problem.
        module: the reference.
        inputs: of the forward.
        given: the gradients of the outputs.
        parameters: names of those that have gradients.
    """
    gradients = sum(map(is_differentiable, inputs)) + len(parameters)
    eager = attempt_derive(lambda: problem.derive(module, inputs, given, parameters))
    if not gradients or eager is None or all(x is None for x in eager[-gradients:]):
        return None
    if any(x is not None and x.layout != torch.strided for x in eager):
        return None
    exact = allowed = [None] * len(eager)
    if problem.needs_float64 and not problem.note:

        def derive_on(device: torch.device) -> list:
            doubled = [g.to(device).double() for g in given]
            wide = widened(inputs, device)
            return problem.derive(in_float64(module, device), wide, doubled, parameters)

        def derive_exactly() -> list:
            return where_there_is_room(derive_on, problem.device)

        exact = attempt_derive(derive_exactly)
        if exact is None:
            return None
        if words := problem.tf32_operators():
            with RoundedOperands(words):
                allowed = attempt_derive(derive_exactly) or allowed
    terms = max(y.numel() for y in eager[:-gradients])
    found: list[Output | None] = []
    for x, y, z in zip(eager, exact, allowed, strict=True):
        made = None
        if x is not None:
            made = problem.budget(x, y, terms) if z is None else Output(x, y, terms, allowed=z)
        found.append(made)
    return found
