"""A result or gradient, compared with the reference's over several training steps.

Where a sum is near zero, rounding decides whether ReLU passes a gradient, so an honest gradient may
differ by much. There are two ways to tell this from a mistake. If the problem knows these places,
the outputs' gradients are zero there. Otherwise gradients are compared in several steps, whose
inputs have these places elsewhere. "Gradients of timed steps" in INTERNALS.md explains the rules by
which a gradient is then wrong:

    far off in one step         its relative error is large
    far off in most steps       its relative error is larger than ReLU near zero makes it
    wrong in every step         rounding does not explain the elements that are wrong in all steps
    inaccurate in many steps    its typical error is larger than rounding makes it

Untimed steps have only the third rule.
"""

import math
from collections.abc import Callable
from enum import Enum

import torch

from referee.comparison.accuracy import GROSS, count_true, typical_error
from referee.comparison.compare import flat_reals, relative_difference
from referee.comparison.mistakes import describe_wrong
from referee.comparison.reference_tensor import Comparison, ReferenceTensor
from referee.comparison.second_look import SecondLook
from referee.contestants.autograd import is_differentiable

# Far off in one step: ReLU near zero makes at most this relative error.
LARGEST_RELATIVE_ERROR = 0.25
# Far off in most steps: in at least half of the steps, ReLU near zero makes a relative error of at
# most MOST_TIMES_EAGERS_ERROR times eager's own, to which ReLU near zero contributes, too. An error
# up to LEAST_FAR_OFF never counts as far off: it may be that of a lower precision.
MOST_TIMES_EAGERS_ERROR = 4
LEAST_FAR_OFF = 0.02
# Wrong in every step: rounding explains these elements only if the number that it predicts is at
# least LEAST_PREDICTED_SHARE of their number; `_WrongInEveryStep` has an example. Rounding never
# explains a gradient of which more than LARGEST_SHARE_BY_ROUNDING is wrong in each of the steps, or
# whose relative error is larger than GROSS in each of them.
LEAST_PREDICTED_SHARE = 0.01
LARGEST_SHARE_BY_ROUNDING = 0.02
# Inaccurate in many steps: a step's typical error is too large if it is more than
# MOST_TIMES_OTHER_ROUNDINGS times what other roundings make. The share of such steps may be at most
# LARGEST_INACCURATE_SHARE.
MOST_TIMES_OTHER_ROUNDINGS = 2
LARGEST_INACCURATE_SHARE = 0.25


class Kind(Enum):
    """The kinds of quantities."""

    RESULT = "result"
    INPUT_GRADIENT = "gradient of an input"
    PARAMETER_GRADIENT = "gradient of a parameter"


class _WrongInEveryStep:
    """The rule "wrong in every step", whose question is: can rounding have chosen the elements?

    An example: of 1,000 elements, 3 are wrong in each of two steps, and 2 of them are the same. If
    rounding had chosen them, an element would be wrong in both steps with a probability of
    0.003 * 0.003, which predicts 0.009 such elements. That is less than 1% of 2 (the share is
    LEAST_PREDICTED_SHARE): the gradient is wrong.
    """

    def __init__(self) -> None:
        self._had_a_right_step = False
        # The least of the steps so far: of the relative error, and of the share of wrong elements.
        self._least_relative_error = math.inf
        self._least_wrong_share = math.inf
        # A flat mask of the elements that are wrong in every step; None before a step is wrong.
        self._always_wrong: torch.Tensor | None = None
        # The probability that rounding alone makes an element wrong in every step.
        self._chance = 1.0

    def add(self, wrong: torch.Tensor, relative_error: float) -> None:
        """Add a step.

        Args:
            wrong: a flat mask of the elements that are off by too much.
            relative_error: the relative error of the whole tensor.
        """
        wrong_count = count_true(wrong)
        if wrong_count == 0:
            self._had_a_right_step = True
            return
        share = wrong_count / len(wrong)
        self._least_relative_error = min(self._least_relative_error, relative_error)
        self._least_wrong_share = min(self._least_wrong_share, share)
        self._chance *= share
        if self._always_wrong is None:
            self._always_wrong = wrong
        else:
            self._always_wrong = self._always_wrong & wrong

    def is_mistake(self) -> bool:
        """Return whether all steps together show a mistake that rounding does not explain."""
        if self._always_wrong is None or self._had_a_right_step:
            return False
        are_too_many = self._least_wrong_share > LARGEST_SHARE_BY_ROUNDING
        are_too_far_off = self._least_relative_error > GROSS
        if are_too_many or are_too_far_off:
            return True
        predicted_count = self._chance * len(self._always_wrong)
        return predicted_count < LEAST_PREDICTED_SHARE * count_true(self._always_wrong)


class Quantity:
    """A result or a gradient of a training step, and how far off it was in the steps so far.

    Args:
        name: the quantity in messages: "result 0", "gradient of x".
        kind: of the quantity.

    Attributes:
        expected: the reference's in this step, with its budget; None where the reference has none.
        comparison: the comparison of the last step; None before the first.
        is_wrong_in_one_step: true once a single step has shown that the quantity is wrong.
    """

    def __init__(self, name: str, kind: Kind) -> None:
        self.name = name
        self.kind = kind
        self.expected: ReferenceTensor | None = None
        self.comparison: Comparison | None = None
        self.is_wrong_in_one_step = False
        self._first_mistake = ""
        self._timed_steps = 0
        self._timed_steps_far_off = 0
        self._inaccurate_timed_steps = 0
        self._wrong_in_every_step = _WrongInEveryStep()

    def compare(self, got: torch.Tensor, is_strict: bool) -> None:
        """Compare the solution's tensor of one untimed step.

        Args:
            got: the tensor.
            is_strict: whether a single wrong element is a mistake, in any step.
        """
        comparison = self.expected.compare(got.reshape(-1))
        self.comparison = comparison
        any_is_wrong = bool(comparison.wrong.any())
        if any_is_wrong and comparison.mistake:
            self._keep_first(comparison.mistake)
        one_step_decides = is_strict or self.expected.must_equal_eager
        if not one_step_decides:
            self._wrong_in_every_step.add(comparison.wrong, comparison.errors.relative)
        elif any_is_wrong:
            self.is_wrong_in_one_step = True
        self.expected.forget()

    def compare_timed(
        self,
        got: torch.Tensor,
        eager: torch.Tensor,
        second_look: SecondLook | None = None,
        error_of_other_roundings: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Compare the solution's tensor of a timed step with eager's.

        Args:
            got: the solution's tensor.
            eager: eager's.
            second_look: for a result, yields the reference's results, rounded otherwise.
            error_of_other_roundings: computes the typical error of eager's tensor if it is rounded
                otherwise; for a gradient.
        """
        one_step_decides = self.expected.must_equal_eager or self.kind is Kind.RESULT
        if one_step_decides:
            self._compare_alone(got, eager, second_look)
        else:
            self._compare_gradient(got, eager, error_of_other_roundings)

    def _compare_alone(
        self, got: torch.Tensor, eager: torch.Tensor, second_look: SecondLook | None
    ) -> None:
        """Compare a tensor of which one timed step decides whether it is wrong.

        The arguments are those of `compare_timed`.
        """
        mistake = self.expected.other_draws.find_mistake(got, eager, second_look)
        if mistake:
            self.is_wrong_in_one_step = True
            self._keep_first(mistake)

    def _compare_gradient(
        self,
        got: torch.Tensor,
        eager: torch.Tensor,
        error_of_other_roundings: Callable[[], float],
    ) -> None:
        """Compare a gradient of a timed step; the rules of several steps decide about it.

        The arguments are those of `compare_timed`.
        """
        self._timed_steps += 1
        wrong = self.expected.other_draws.find_wrong(got, eager)
        mistake = describe_wrong(wrong, got, eager)
        relative_error = 0.0
        if mistake:
            self._keep_first(mistake)
            relative_error = relative_difference(got, eager)
            if relative_error > LARGEST_RELATIVE_ERROR:
                self.is_wrong_in_one_step = True
            if relative_error > self._least_far_off():
                self._timed_steps_far_off += 1
            if self._is_inaccurate(got, eager, error_of_other_roundings):
                self._inaccurate_timed_steps += 1
        self._wrong_in_every_step.add(wrong, relative_error)

    def find_mistake(self) -> str | None:
        """Return in words what is wrong for certain; None if rounding may explain it."""
        is_wrong = (
            self.is_wrong_in_one_step
            or self._is_far_off_in_most_steps()
            or self._wrong_in_every_step.is_mistake()
            or self._is_inaccurate_in_many_steps()
        )
        return f"{self.name}: {self._first_mistake}" if is_wrong else None

    def without_steps(self) -> "Quantity":
        """Return a quantity with the same name and budget, for which no step was compared."""
        made = Quantity(self.name, self.kind)
        made.expected = self.expected
        return made

    def _is_inaccurate(
        self, got: torch.Tensor, eager: torch.Tensor, error_of_other_roundings: Callable[[], float]
    ) -> bool:
        """Return whether most elements of a gradient are further off than rounding explains.

        ReLU near zero moves few rows of a gradient, but in a deep network a little of everything.
        The reference moves as much if it rounds otherwise.
        """
        typical = typical_error(flat_reals(got), flat_reals(eager))
        if typical <= self.expected.typical_slack:
            return False  # the usual case, in which no other roundings are computed
        return typical > MOST_TIMES_OTHER_ROUNDINGS * error_of_other_roundings()

    def _least_far_off(self) -> float:
        """Return the relative error beyond which a gradient counts as far off in a step."""
        if self.expected.eager_errors.relative == 0:  # there is no float64 result, or no error
            return LARGEST_RELATIVE_ERROR
        by_eager = MOST_TIMES_EAGERS_ERROR * self.expected.eager_errors.relative
        return min(max(by_eager, LEAST_FAR_OFF), LARGEST_RELATIVE_ERROR)

    def _keep_first(self, mistake: str) -> None:
        """Keep the words for the first mistake, which the message quotes."""
        if not self._first_mistake:
            self._first_mistake = mistake

    def _is_far_off_in_most_steps(self) -> bool:
        """Return whether the relative error was too large in more than half of the timed steps."""
        return self._timed_steps_far_off > self._timed_steps / 2

    def _is_inaccurate_in_many_steps(self) -> bool:
        """Return whether the typical error was too large in more timed steps than it may be."""
        return self._inaccurate_timed_steps > LARGEST_INACCURATE_SHARE * self._timed_steps


def make_quantities(inputs: list, parameters: list[str], output_count: int) -> list[Quantity]:
    """Return a training step's results and gradients, in the order of a reply.

    Inputs are numbered as in the call, also those that have no gradient. An input that is the only
    one with a gradient is x in messages.
    """
    results = [Quantity(f"result {i}", Kind.RESULT) for i in range(output_count)]
    indices = [i for i, x in enumerate(inputs) if is_differentiable(x)]
    names = ["x"] if len(indices) == 1 else [f"input {i}" for i in indices]
    of_inputs = [Quantity(f"gradient of {name}", Kind.INPUT_GRADIENT) for name in names]
    of_parameters = [
        Quantity(f"gradient of {name}", Kind.PARAMETER_GRADIENT) for name in parameters
    ]
    return results + of_inputs + of_parameters
