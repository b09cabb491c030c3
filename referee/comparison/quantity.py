"""A result or gradient, compared with the reference's over several training steps.

A result is wrong as soon as one step is beyond the error budget, unless a second look excuses it.

A gradient needs several steps. Where a sum is near zero, rounding decides whether ReLU passes a
gradient, so an honest one may differ by much. The next step has other inputs, and other sums near
zero. So `gradient_rules` decide.
"""

import math
from collections.abc import Callable
from enum import Enum

import torch

from referee.comparison.accuracy import typical_error
from referee.comparison.compare import blocks, flat_reals, relative_difference
from referee.comparison.gradient_rules import (
    MAX_TIMES_OTHER_ROUNDINGS,
    Step,
    Steps,
    far_off_in_most_steps,
    far_off_in_one_step,
    far_off_limit,
    inaccurate_in_many_steps,
    wrong_in_every_step,
)
from referee.comparison.mistakes import describe_mean_error
from referee.comparison.reference_tensor import Comparison, ReferenceTensor
from referee.comparison.result_spec import ResultSpec
from referee.comparison.second_look import RoundedOtherwise
from referee.contestants.autograd import is_differentiable


class Kind(Enum):
    """The kinds of quantities."""

    RESULT = "result"
    INPUT_GRADIENT = "gradient of an input"
    PARAMETER_GRADIENT = "gradient of a parameter"


class Quantity:
    """A result or a gradient of a training step, and how far off it was in the steps so far.

    For a result, a mistake in a single step decides. For a gradient, rules decide, most of them
    over several steps. But any mistake of a gradient decides if the gradient must equal eager's
    (`ResultSpec.must_equal_eager`), or if the step is masked (`judge_untimed`).

    Args:
        name: the quantity in messages: "result 0", "gradient of x".
        kind: a result, or the gradient of an input or of a parameter.

    Attributes:
        spec: the reference's demands; None before the first step, and where the reference
            has no such gradient.
        comparison: the comparison of the last untimed step; None before the first.
        is_wrong_in_one_step: whether a single step has shown that the quantity is wrong.
    """

    def __init__(self, name: str, kind: Kind) -> None:
        self.name = name
        self.kind = kind
        self.spec: ResultSpec | None = None
        self.comparison: Comparison | None = None
        self._reference_tensor: ReferenceTensor | None = None  # of an untimed step
        self.is_wrong_in_one_step = False
        self._first_mistake = ""
        # The steps that the rules for gradients judge; a result has none.
        self._untimed = Steps()
        self._timed = Steps()

    @property
    def is_result(self) -> bool:
        """True for a result, False for a gradient."""
        return self.kind is Kind.RESULT

    @property
    def is_reference_finite(self) -> bool:
        """True if the reference's tensor of the step that has begun is finite, or it has none."""
        return self._reference_tensor is None or bool(self._reference_tensor.eager.isfinite().all())

    def without_steps(self) -> "Quantity":
        """Return a quantity with the same name, kind and spec, for which no step was compared."""
        made = Quantity(self.name, self.kind)
        made.spec = self.spec
        return made

    def begin_step(self, reference_tensor: ReferenceTensor | None) -> None:
        """Take the reference's tensor of an untimed step, None where it has none."""
        self._reference_tensor = reference_tensor
        self.spec = reference_tensor.spec if reference_tensor else None

    def judge_untimed(
        self,
        got: torch.Tensor,
        rounded_otherwise: RoundedOtherwise | None = None,
        *,
        are_masked: bool = False,
    ) -> None:
        """Judge the solution's result or gradient of the untimed step that has begun.

        Args:
            got: the result or gradient.
            rounded_otherwise: yields the reference's results with other roundings, which may excuse
                a result; None if nothing excuses it. It is not used for a gradient.
            are_masked: whether the outputs' gradients are zero wherever a sum is near zero: the
                problem knows these places. Any mistake of a gradient then decides, because rounding
                does not explain it.
        """
        if self.is_result:
            self._decide(self._compare(got, rounded_otherwise).mistake)
        elif are_masked or self.spec.must_equal_eager:
            self._decide(self._find_mistake_of_gradient(self._compare(got)))
        else:
            self._judge_untimed_by_rules(self._compare(got))

    def judge_timed(
        self,
        got: torch.Tensor,
        eager: torch.Tensor,
        rounded_otherwise: RoundedOtherwise | None = None,
        error_of_other_roundings: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Judge the solution's result or gradient of a timed step, beside eager's.

        Args:
            got: the solution's result or gradient.
            eager: eager's.
            rounded_otherwise: as for `judge_untimed`.
            error_of_other_roundings: computes the typical error of eager's gradient if it is
                rounded otherwise. It is not used for a result.
        """
        if self.is_result:
            self._decide(self.spec.find_mistake(got, eager, rounded_otherwise))
        elif self.spec.must_equal_eager:
            self._decide(self.spec.find_mistake(got, eager))
        else:
            self._judge_timed_by_rules(got, eager, error_of_other_roundings)

    def find_mistake(self) -> str | None:
        """Return in words what is wrong for certain; None if rounding may explain it."""
        is_wrong = (
            self.is_wrong_in_one_step
            or wrong_in_every_step(self._untimed)
            or wrong_in_every_step(self._timed)
            or far_off_in_most_steps(self._timed)
            or inaccurate_in_many_steps(self._timed)
        )
        return f"{self.name}: {self._first_mistake}" if is_wrong else None

    def _judge_untimed_by_rules(self, comparison: Comparison) -> None:
        """Add an untimed step to those that the rules for gradients judge."""
        mistake = self._find_mistake_of_gradient(comparison)
        if mistake is None:
            self._untimed.add_right()
            return
        self._keep_first(mistake)
        # Untimed steps are few, so the rules about most and many steps are for timed ones.
        self._untimed.add_wrong(Step(comparison.errors.relative), comparison.wrong)
        self.is_wrong_in_one_step |= far_off_in_one_step(self._untimed)

    def _judge_timed_by_rules(
        self,
        got: torch.Tensor,
        eager: torch.Tensor,
        error_of_other_roundings: Callable[[], float],
    ) -> None:
        """Add a timed step to those that the rules for gradients judge.

        The arguments are those of `judge_timed`.
        """
        difference = self.spec.compare_with_eager(got, eager)
        if difference.mistake is None:
            self._timed.add_right()
            return
        self._keep_first(difference.mistake)
        got, eager = flat_reals(got), flat_reals(eager)
        relative_error, error = _relative_error(got, eager), typical_error(got, eager)
        # The usual case is an error within the limit, and no other roundings are computed.
        is_inaccurate = (
            error > self.spec.budget.typical_limit
            and error > MAX_TIMES_OTHER_ROUNDINGS * error_of_other_roundings()
        )
        is_far_off = relative_error > far_off_limit(self.spec)
        step = Step(relative_error, is_far_off=is_far_off, is_inaccurate=is_inaccurate)
        self._timed.add_wrong(step, difference.wrong)
        self.is_wrong_in_one_step |= far_off_in_one_step(self._timed)

    def _compare(
        self, got: torch.Tensor, rounded_otherwise: RoundedOtherwise | None = None
    ) -> Comparison:
        """Compare a tensor with the reference's of the step that has begun; free the latter."""
        self.comparison = self._reference_tensor.compare(got, rounded_otherwise)
        self._reference_tensor = None
        return self.comparison

    def _find_mistake_of_gradient(self, comparison: Comparison) -> str | None:
        """Return in words what is wrong with a gradient in an untimed step; None if nothing is.

        The limit of the mean error is the one for other draws: it is larger where a problem says
        how far off each element may be, and so allows for ReLU near zero.
        """
        if comparison.wrong.any():
            return comparison.mistake
        mean_limit = self.spec.budget_elsewhere().mean_limit
        if comparison.errors.mean > mean_limit:
            return describe_mean_error(comparison.errors.mean, mean_limit)
        return None

    def _decide(self, mistake: str | None) -> None:
        """Take in a step in which a mistake decides; `mistake` is None if there is none."""
        if mistake:
            self.is_wrong_in_one_step = True
            self._keep_first(mistake)

    def _keep_first(self, mistake: str | None) -> None:
        """Keep the words for the first mistake, which the message quotes."""
        if mistake and not self._first_mistake:
            self._first_mistake = mistake


def _relative_error(got: torch.Tensor, eager: torch.Tensor) -> float:
    """Return the relative error of a flat gradient in a timed step.

    It is infinite if an element of `got` is not finite where eager's is: `relative_difference`
    takes such an element for 0.
    """
    for block in blocks(len(got)):
        must_be_finite = eager[block].isfinite()
        if bool((must_be_finite & ~got[block].isfinite()).any()):
            return math.inf
    return relative_difference(got, eager)


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
