"""How far off a result is: the errors of its elements, and its accuracy class."""

import math
import secrets
from dataclasses import dataclass

import torch

from referee.comparison.compare import INTEGERS, blocks

# The largest relative error (the Frobenius norm of the errors over that of the results) of each
# accuracy class. A deep network in float32 reaches 1e-5. A single product is off by 3e-4 in TF32
# and by 2.3e-3 in bfloat16.
CLASSES = {"float32-grade": 1e-4, "TF32-grade": 1.2e-3, "bf16-grade": 1e-2}
WORST = "worse than bf16"
# No precision explains an error of an element that is larger than this part of the largest result.
GROSS = 2.0**-6
# Errors are sparse if their root mean square is more than this multiple of their mean. For the
# roundings of a sum, the root mean square is about 1.2 times the mean. If a result consists of R
# parts of the same size, and k of them are equally wrong and the others right, it is sqrt(R / k)
# times the mean. So errors are sparse if they are in less than a fifth of the parts.
SPARSE = 2.2
# The typical error of a result is exceeded in a tenth of its elements.
TYPICAL_QUANTILE = 0.9
MAX_SAMPLED = 1 << 18  # at most so many elements make the typical error


@dataclass(frozen=True)
class ErrorSizes:
    """How large the errors of a result and its expected values are, over all elements.

    Attributes:
        largest: the largest error.
        mean: the mean error.
        relative: the Frobenius norm of the errors over that of the expected values.
        largest_magnitude: the largest magnitude.
        mean_magnitude: the mean magnitude.
        root_mean_square: the root mean square of the expected values.
    """

    largest: float = 0.0
    mean: float = 0.0
    relative: float = 0.0
    largest_magnitude: float = 0.0
    mean_magnitude: float = 0.0
    root_mean_square: float = 0.0

    @property
    def are_sparse(self) -> bool:
        """True if few elements make up most of the errors, as where rounding flips a sign."""
        root_mean_square_error = self.relative * self.root_mean_square
        return root_mean_square_error > SPARSE * self.mean

    @property
    def is_gross(self) -> bool:
        """True if the errors are those of another result, not those of a lower precision."""
        has_gross_element = self.largest > GROSS * self.largest_magnitude
        return has_gross_element or accuracy_class(self.relative) == WORST


class ErrorSums:
    """Sums and maxima over the elements so far, which are added block by block."""

    def __init__(self) -> None:
        self._largest_error = 0.0
        self._largest_magnitude = 0.0
        self._sum_of_errors = 0.0
        self._sum_of_magnitudes = 0.0
        self._squared_errors = 0.0
        self._squared_magnitudes = 0.0

    def add(self, error: torch.Tensor, expected: torch.Tensor) -> None:
        """Add the errors and the expected values of a block; the errors are overwritten."""
        magnitude = expected.abs().nan_to_num_(0, 0, 0)
        self._largest_error = max(self._largest_error, error.max().item())
        self._largest_magnitude = max(self._largest_magnitude, magnitude.max().item())
        self._sum_of_errors += error.sum().item()
        self._sum_of_magnitudes += magnitude.sum().item()
        self._squared_errors += error.square_().sum().item()
        self._squared_magnitudes += magnitude.square_().sum().item()

    def over(self, count: int) -> ErrorSizes:
        """Return the errors of a result that has `count` elements."""
        if self._squared_magnitudes:
            relative = math.sqrt(self._squared_errors / self._squared_magnitudes)
        elif self._squared_errors:
            relative = math.inf
        else:
            relative = 0.0
        count = max(count, 1)
        return ErrorSizes(
            largest=self._largest_error,
            mean=self._sum_of_errors / count,
            relative=relative,
            largest_magnitude=self._largest_magnitude,
            mean_magnitude=self._sum_of_magnitudes / count,
            root_mean_square=math.sqrt(self._squared_magnitudes / count),
        )


def element_errors(got: torch.Tensor, eager: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the error of each element, in float64.

    The error is |got - expected|. Where that is not finite, it is 0 if `got` has eager's value, and
    infinity otherwise. For integers and booleans it is 1 where `got` and `eager` differ.
    """
    if not got.is_floating_point():
        signed = INTEGERS[got.element_size()]
        return (got.view(signed) != eager.view(signed)).double()
    error = (got.double() - expected).abs_()
    if error.sum().isfinite():
        return error
    has_eagers_value = (got == eager) | (got.isnan() & eager.isnan())
    is_right = has_eagers_value & ~error.isfinite()
    return error.nan_to_num_(math.inf, math.inf).masked_fill_(is_right, 0)


def accuracy_class(relative_error: float) -> str:
    """Return the accuracy class of a relative error."""
    for name, largest in CLASSES.items():
        if relative_error <= largest:
            return name
    return WORST


def typical_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far off most elements of a flat result are, relative to their typical size.

    Both are the 90th percentile over those sampled elements whose expected value is not zero. So
    the error does not depend on a few elements that are far off.
    """
    step = max(1, math.ceil(len(expected) / MAX_SAMPLED))
    sampled = slice(secrets.randbelow(step), None, step)
    expected = expected[sampled].double()
    is_compared = expected.isfinite() & (expected != 0)
    size = expected[is_compared].abs()
    if len(size) == 0:
        return 0.0
    error = (got[sampled].double()[is_compared] - expected[is_compared]).abs_()
    error.nan_to_num_(math.inf)
    rank = math.ceil(TYPICAL_QUANTILE * len(size))
    return error.kthvalue(rank).values.item() / size.kthvalue(rank).values.item()


def mean_and_root_mean_square(x: torch.Tensor) -> tuple[float, float]:
    """Return the mean magnitude and the root mean square of a flat tensor.

    Elements that are not finite count as zeros.
    """
    magnitudes = squares = 0.0
    for block in blocks(len(x)):
        magnitude = x[block].double().nan_to_num(0, 0, 0).abs_()
        magnitudes += magnitude.sum().item()
        squares += magnitude.square_().sum().item()
    count = max(len(x), 1)
    return magnitudes / count, math.sqrt(squares / count)


def count_true(mask: torch.Tensor) -> int:
    """Return how many elements of a flat mask are true.

    The elements are counted in blocks: on a GPU the sum of a mask needs eight times its memory.
    """
    return sum(int(mask[block].sum()) for block in blocks(len(mask)))
