"""A result or gradient, compared with the reference's over several training steps.

Where a sum is near zero, rounding decides whether ReLU passes a gradient, so an honest gradient may
differ by much. Several steps then decide, for each has other inputs, and other sums near zero:

    quantity                          untimed steps           timed steps
    result                            one wrong element, unless a second look excuses it
    gradient                          "wrong in every step",  the four rules of `gradient_rules`
                                      "far off in one step"
    either, if only eager's values    one wrong element       one wrong element
    are right, as for integers
    either, in a strict step          one wrong element       (none is timed)

A step is strict if its problem knows the places near zero; the outputs' gradients are zero there.
"""

from collections.abc import Callable
from enum import Enum

import torch

from referee.comparison.accuracy import typical_error
from referee.comparison.compare import flat_reals, relative_difference
from referee.comparison.gradient_rules import (
    FarOffInMostSteps,
    FarOffInOneStep,
    GradientOfStep,
    InaccurateInManySteps,
    Rule,
    WrongInEveryStep,
)
from referee.comparison.mistakes import describe_wrong
from referee.comparison.reference_tensor import Comparison, ReferenceTensor
from referee.comparison.requirements import Requirements
from referee.comparison.second_look import RoundedOtherwise
from referee.contestants.autograd import is_differentiable


class Kind(Enum):
    """The kinds of quantities."""

    RESULT = "result"
    INPUT_GRADIENT = "gradient of an input"
    PARAMETER_GRADIENT = "gradient of a parameter"


class Quantity:
    """A result or a gradient of a training step, and how far off it was in the steps so far.

    Args:
        name: the quantity in messages: "result 0", "gradient of x".
        kind: a result, or the gradient of an input or of a parameter.

    Attributes:
        requirements: the reference's demands; None before the first step, and where the reference
            has no such gradient.
        comparison: the comparison of the last step; None before the first.
    """

    def __init__(self, name: str, kind: Kind) -> None:
        self.name = name
        self.kind = kind
        self.requirements: Requirements | None = None
        self.comparison: Comparison | None = None
        self._reference_tensor: ReferenceTensor | None = None  # of an untimed step
        self._first_mistake = ""
        self._has_wrong_element = False  # in a step in which a single one decides
        self._far_off_in_one_step = FarOffInOneStep()
        self._wrong_in_every_step = WrongInEveryStep()
        self._rules: list[Rule] = [
            self._far_off_in_one_step,
            FarOffInMostSteps(),
            self._wrong_in_every_step,
            InaccurateInManySteps(),
        ]

    @property
    def is_wrong_in_one_step(self) -> bool:
        """True if a single step has shown that the quantity is wrong."""
        return self._has_wrong_element or self._far_off_in_one_step.is_mistake()

    @property
    def _does_one_element_decide(self) -> bool:
        """True if a single wrong element, in any step, is a mistake."""
        return self.requirements.must_equal_eager or self.kind is Kind.RESULT

    def begin_step(self, reference_tensor: ReferenceTensor | None) -> None:
        """Take the reference's tensor of an untimed step, None where it has none."""
        self._reference_tensor = reference_tensor
        self.requirements = reference_tensor.requirements if reference_tensor else None

    def compare(
        self,
        got: torch.Tensor,
        is_strict: bool,
        rounded_otherwise: RoundedOtherwise | None = None,
    ) -> None:
        """Compare the solution's tensor of the step that has begun; free the reference's tensor.

        Args:
            got: the tensor.
            is_strict: whether a single wrong element is a mistake, in any step.
            rounded_otherwise: for a result, yields the reference's results with other roundings.
        """
        comparison = self._reference_tensor.compare(got, rounded_otherwise)
        self.comparison = comparison
        one_step_decides = is_strict or self._does_one_element_decide
        has_wrong_elements = bool(comparison.wrong.any())
        if not one_step_decides:
            relative_error = comparison.errors.relative if has_wrong_elements else 0.0
            step = GradientOfStep(self.requirements, comparison.wrong, relative_error)
            self._wrong_in_every_step.add(step)
            self._far_off_in_one_step.add(step)
        # A mistake without wrong elements is the mean error. It does not count here, because
        # rounding near ReLU's zero can make it.
        if comparison.mistake and has_wrong_elements:
            self._keep_first(comparison.mistake)
            if one_step_decides:
                self._has_wrong_element = True
        self._reference_tensor = None

    def compare_timed(
        self,
        got: torch.Tensor,
        eager: torch.Tensor,
        rounded_otherwise: RoundedOtherwise | None = None,
        error_of_other_roundings: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Compare the solution's tensor of a timed step with eager's.

        Args:
            got: the solution's tensor.
            eager: eager's.
            rounded_otherwise: for a result, yields the reference's results with other roundings.
            error_of_other_roundings: computes the typical error of eager's tensor if it is rounded
                otherwise; for a gradient.
        """
        if not self._does_one_element_decide:
            self._compare_gradient(got, eager, error_of_other_roundings)
            return
        mistake = self.requirements.other_draws.find_mistake(got, eager, rounded_otherwise)
        if mistake:
            self._has_wrong_element = True
            self._keep_first(mistake)

    def find_mistake(self) -> str | None:
        """Return in words what is wrong for certain; None if rounding may explain it."""
        is_wrong = self._has_wrong_element or any(rule.is_mistake() for rule in self._rules)
        return f"{self.name}: {self._first_mistake}" if is_wrong else None

    def without_steps(self) -> "Quantity":
        """Return a quantity with the same name and requirements, for which no step was compared."""
        made = Quantity(self.name, self.kind)
        made.requirements = self.requirements
        return made

    def _compare_gradient(
        self,
        got: torch.Tensor,
        eager: torch.Tensor,
        error_of_other_roundings: Callable[[], float],
    ) -> None:
        """Compare a gradient of a timed step by the four rules.

        The arguments are those of `compare_timed`.
        """
        wrong = self.requirements.other_draws.find_wrong(got, eager)
        mistake = describe_wrong(wrong, got, eager)
        if mistake is None:
            step = GradientOfStep(self.requirements, wrong)
        else:
            self._keep_first(mistake)
            step = GradientOfStep(
                self.requirements,
                wrong,
                relative_difference(got, eager),
                typical_error(flat_reals(got), flat_reals(eager)),
                error_of_other_roundings,
            )
        for rule in self._rules:
            rule.add(step)

    def _keep_first(self, mistake: str) -> None:
        """Keep the words for the first mistake, which the message quotes."""
        if not self._first_mistake:
            self._first_mistake = mistake


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
