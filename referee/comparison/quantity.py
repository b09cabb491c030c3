"""A result or gradient of training steps, compared with the reference's over several draws.

Where a sum is near zero, rounding decides whether ReLU passes a gradient, so an honest gradient may
differ by much. There are two ways to tell this from a mistake. If the problem knows these places,
the outputs' gradients are zero there. Otherwise gradients are compared for several draws of inputs,
which have these places elsewhere, and only an element that is wrong in every draw counts.

In timed draws a gradient is also wrong if it is far off in most of them, or if most of its elements
are less accurate than rounding explains in many of them. Another draw that is right does not help.
"""

import math
from collections.abc import Callable

import torch

from referee.comparison.accuracy import GROSS, count_true, typical_error
from referee.comparison.compare import flat_reals, relative_difference
from referee.comparison.reference_tensor import (
    Comparison,
    ReferenceTensor,
    SecondLook,
    describe_wrong,
)
from referee.contestants.autograd import is_differentiable

RESULT = "result"  # the name of a result begins with it
# Rounding explains the elements that are wrong in every draw only if the number that it predicts is
# at least this share of their number; see the example of `Quantity`.
LEAST_PREDICTED_SHARE = 0.01
# In at least one draw, rounding makes at most this share of the elements wrong.
LARGEST_SHARE_BY_ROUNDING = 0.02
# In any timed draw, ReLU near zero makes at most this relative error.
LARGEST_ERROR_BY_RELU = 0.25
# In at least half of the timed draws, ReLU near zero makes at most this multiple of eager's own
# error, to which it contributes, too.
MOST_TIMES_EAGERS_ERROR = 4
# A draw's typical error is too large only if it is this multiple of what other roundings make.
MOST_TIMES_OTHER_ROUNDINGS = 2
# In at most this share of the timed draws may the typical error be too large.
LARGEST_SHARE_OF_INACCURATE_DRAWS = 0.25
# A smaller relative error may be that of a lower precision.
LEAST_ERROR_OF_A_MISTAKE = 0.02


class Quantity:
    """A result or a gradient of a training step, and how far off it was in the draws so far.

    An example: of 1,000 elements, 3 are wrong in each of two draws, and 2 of them are the same. If
    rounding had chosen them, an element would be wrong in both draws with a probability of
    0.003 * 0.003, which predicts 0.009 such elements. That is less than 1% of 2 (the share is
    LEAST_PREDICTED_SHARE): the gradient is wrong.

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
        self._is_wrong = False  # true once a single draw has shown it
        self._had_a_right_draw = False
        self._timed_draws = 0
        self._timed_draws_far_off = 0  # see `_error_of_a_mistake`
        self._inaccurate_timed_draws = 0  # see `_is_inaccurate`
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

    def compare_timed(
        self,
        got: torch.Tensor,
        eager: torch.Tensor,
        second_look: SecondLook = None,
        error_of_other_roundings: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Compare the solution's tensor of a timed step with eager's.

        Args:
            got: the solution's tensor.
            eager: eager's.
            second_look: of a result; see `ReferenceTensor`.
            error_of_other_roundings: computes the typical error of eager's tensor if it is rounded
                otherwise; for a gradient.
        """
        # Rounding does not decide whether a result is right, only whether a gradient is.
        if self.expected.is_exact or self.is_result:
            if mistake := self.expected.mistake_in_other_draw(got, eager, second_look):
                self._is_wrong = True
                self._keep_first(mistake)
            return
        wrong = self.expected.wrong_in_other_draw(got, eager)
        mistake = describe_wrong(wrong, flat_reals(got), flat_reals(eager))
        relative_error = relative_difference(got, eager) if mistake else 0.0
        if relative_error > LARGEST_ERROR_BY_RELU:
            self._is_wrong = True
            self._keep_first(mistake)
        self._timed_draws += 1
        if relative_error > self._error_of_a_mistake():
            self._timed_draws_far_off += 1
        if mistake and self._is_inaccurate(got, eager, error_of_other_roundings):
            self._inaccurate_timed_draws += 1
        self._record(wrong, relative_error, mistake or "", is_strict=False)

    def find_mistake(self) -> str | None:
        """Return in words what is wrong for certain; None if rounding may explain it."""
        if self._is_wrong or self._are_timed_draws_wrong() or self._is_wrong_in_every_draw():
            return f"{self.name}: {self._first_mistake}"
        return None

    @property
    def is_result(self) -> bool:
        """True for a result, false for a gradient."""
        return self.name.startswith(RESULT)

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

    def _is_inaccurate(
        self, got: torch.Tensor, eager: torch.Tensor, error_of_other_roundings: Callable[[], float]
    ) -> bool:
        """Return whether most elements of a gradient are further off than rounding explains.

        ReLU near zero moves few rows of a gradient, but in a deep network a little of everything.
        The reference moves as much if it rounds otherwise.
        """
        typical = typical_error(flat_reals(got), flat_reals(eager))
        if typical <= self.expected.typical_slack:
            return False
        return typical > MOST_TIMES_OTHER_ROUNDINGS * error_of_other_roundings()

    def _error_of_a_mistake(self) -> float:
        """Return the relative error that shows a mistake if most timed draws exceed it."""
        if self.expected.eager_errors.relative == 0:  # there is no float64 result, or no error
            return LARGEST_ERROR_BY_RELU
        by_eager = MOST_TIMES_EAGERS_ERROR * self.expected.eager_errors.relative
        return min(max(by_eager, LEAST_ERROR_OF_A_MISTAKE), LARGEST_ERROR_BY_RELU)

    def _keep_first(self, mistake: str) -> None:
        """Keep the words for the first mistake, which the message quotes."""
        self._first_mistake = self._first_mistake or mistake

    def _are_timed_draws_wrong(self) -> bool:
        """Return whether too many timed draws are far off, or less accurate than they may be."""
        most_inaccurate = LARGEST_SHARE_OF_INACCURATE_DRAWS * self._timed_draws
        are_many_inaccurate = self._inaccurate_timed_draws > most_inaccurate
        return are_many_inaccurate or self._timed_draws_far_off > self._timed_draws / 2

    def _is_wrong_in_every_draw(self) -> bool:
        """Return whether all draws together show a mistake that rounding does not explain."""
        if self._always_wrong is None or self._had_a_right_draw:
            return False
        if self._least_wrong_share > LARGEST_SHARE_BY_ROUNDING:
            return True
        if self._least_relative_error > GROSS:
            return True
        count_by_rounding = self._chance * len(self._always_wrong)
        return count_by_rounding < LEAST_PREDICTED_SHARE * count_true(self._always_wrong)


def quantity_names(inputs: list, parameters: list[str], output_count: int) -> list[str]:
    """Return the names of a training step's results and gradients, in the order of a reply."""
    count = sum(map(is_differentiable, inputs))
    operands = ["x"] if count == 1 else [f"input {i}" for i in range(count)]
    gradients = [f"gradient of {name}" for name in [*operands, *parameters]]
    return [*(f"{RESULT} {i}" for i in range(output_count)), *gradients]
