"""Named operands of a float32 product: the referee's, and others that are aimed at these kernels.

The others are hard for one step of the kernels: the sample of a weight row that decides its scale,
the split into hi and lo, or the sums between two promotions (docs/SPLIT.md has these steps). Or
they are at the ends of float32's range.
"""

from functools import partial

import torch
from torch import Tensor

from problems import operands
from problems.operands import (
    SPECIAL_COLUMN,
    Draw,
    IndependentOperands,
    MatrixFunction,
    Operands,
    OperandsCase,
    mask_in_each_row,
    normal_with_column,
    repeat_factors,
    small_integers,
)

# The factors by which the sampled columns of a row are multiplied.
LARGE_FACTORS = [10.0, 1e2, 1e3, 1e4, 1e6, 1e20]
SMALL_FACTORS = [0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-20]


def student(d: Draw, *shape: int) -> Tensor:
    """Draw from Student's t with 2 degrees of freedom, which has heavy tails."""
    return d.normal(*shape) / d.normal(2, *shape).square().mean(0).sqrt()


def flush_tiny(rows: Tensor) -> Tensor:
    """Return rows in which elements below 2^-24 of their row's largest are zeros."""
    return rows * (rows.abs() >= rows.abs().amax(1, keepdim=True) * 2.0**-24)


def sampled_spans(k: int) -> list[Tensor]:
    """Return the columns of the eight spans of a weight row that decide the row's scale on sm90.

    A span has 16 columns. It begins at a multiple of four, and only whole fours are sampled: for
    K = 21, the last two spans are the columns 12 to 19 and 16 to 19. This is the rule of
    `first_k_of_lane` in kernels/linear/sm90/sample_weight.cuh.
    """
    begins = [span * k // 8 // 4 * 4 for span in range(8)]
    end = k // 4 * 4
    return [torch.arange(begin, min(begin + 16, end)) for begin in begins]


def sampled_columns(k: int) -> Tensor:
    """Return the columns of all sampled spans, each once."""
    return torch.cat(sampled_spans(k)).unique()


def scaled_sampled_columns(draw: Draw, rows: int, k: int, *, factors: list[float]) -> Tensor:
    """Draw normal values, and multiply the sampled columns of each row by one of the factors.

    The rows take the factors in turn.
    """
    values = draw.normal(rows, k)
    scales = draw.ones(rows, k)
    scales[:, sampled_columns(k)] = repeat_factors(draw, factors, rows)[:, None]
    return values * scales


def tiny_matrix_with_zero_samples(draw: Draw, rows: int, k: int) -> Tensor:
    """Draw normal values, multiply them by 1e-6, and put zeros into the sampled columns."""
    return scaled_sampled_columns(draw, rows, k, factors=[0.0]) * 1e-6


def integers_with_larger_samples(draw: Draw, rows: int, k: int) -> Tensor:
    """Draw small integers, and add 2^-11 to the sampled columns."""
    values = small_integers(draw, rows, k)
    added = draw.zeros(k)
    added[sampled_columns(k)] = 2.0**-11
    return values + added


def scaled_one_hot(draw: Draw, rows: int, k: int) -> Tensor:
    """Draw one normal value for each row, at a random place among zeros."""
    mask = mask_in_each_row(draw, rows, k, 1)
    return mask * draw.normal(rows, 1)


def graded_without_tiny(draw: Draw, rows: int, k: int) -> Tensor:
    """Draw normal values in columns scaled by 2^-10 to 2^10; tiny elements become zeros."""
    return flush_tiny(draw.normal(rows, k) * draw.grades(10, k, shuffled=True))


def one_hot_in_one_column(draw: Draw, rows: int, k: int) -> Tensor:
    """Return ones in one column, and zeros elsewhere."""
    values = draw.zeros(rows, k)
    values[:, SPECIAL_COLUMN] = 1
    return values


def tiny_column(draw: Draw, rows: int, k: int) -> Tensor:
    """Draw normal values, of which one column is multiplied by 1e-10."""
    values = draw.normal(rows, k)
    scales = draw.ones(k)
    scales[SPECIAL_COLUMN] = 1e-10
    return values * scales


def column_of_large_powers(draw: Draw, rows: int, k: int) -> Tensor:
    """Draw normal values, but for one column: a power of two from 2^10 to 2^24 in each row."""
    values = draw.normal(rows, k)
    values[:, SPECIAL_COLUMN] = draw.powers(10, 24, rows)
    return values


def scaled_normal(draw: Draw, rows: int, k: int, *, scale: float) -> Tensor:
    """Draw normal values, and multiply them by the scale."""
    return draw.normal(rows, k) * scale


def scaled_uniform(
    draw: Draw, rows: int, k: int, *, scale: float = 1.0, offset: float = 0.0
) -> Tensor:
    """Draw values from 0 to 1, add the offset, and multiply the sum by the scale."""
    return (draw.uniform(rows, k) + offset) * scale


def rows_near_overflow(draw: Draw, rows: int, k: int) -> Tensor:
    """Draw values from 0.5 to 1.5, and multiply every second row by 2^40 or -2^40."""
    values = draw.uniform(rows, k) + 0.5
    return values * repeat_factors(draw, [-(2.0**40), 1.0, 2.0**40, 1.0], rows)[:, None]


def inversely_graded(
    draw: Draw,
    m: int,
    k: int,
    n: int,
    *,
    largest_exponent: int,
    x: MatrixFunction = Draw.normal,
    weight: MatrixFunction = Draw.normal,
) -> Operands:
    """Scale the columns of x by powers of two in random order, and those of weight inversely.

    The powers are from 2^-largest_exponent to 2^largest_exponent. `x` and `weight` are the
    functions that draw the two before they are scaled.
    """
    grades = draw.grades(largest_exponent, k, shuffled=True)
    return x(draw, m, k) * grades, weight(draw, n, k) / grades, draw.zeros(n)


def large_values_meet_zeros(draw: Draw, m: int, k: int, n: int) -> Operands:
    """Put zeros into weight where x is large. Only small elements of x count then."""
    x = draw.normal(m, k)
    weight = draw.normal(n, k)
    is_small = draw.mask(0.02, k)
    return torch.where(is_small, x, x * 2.0**24), weight * is_small, draw.zeros(n)


def sharing_columns(
    draw: Draw, m: int, k: int, n: int, *, count: int | None = None, factor: float = 1.0
) -> Operands:
    """Draw x and weight that are both nonzero in `count` columns only, K / 16 by default.

    Half of the other columns are nonzero in x alone, and half in weight alone. The shared columns
    are multiplied by the factor.
    """
    order = draw.random_columns(k, k)
    if count is None:
        count = k // 16
    half = (k + count) // 2
    x = draw.normal(m, k)
    weight = draw.normal(n, k)
    x[:, order[half:]] = 0
    weight[:, order[: half - count]] = 0
    shared = order[half - count : half]
    x[:, shared] *= factor
    weight[:, shared] *= factor
    return x, weight, draw.zeros(n)


_half_signed = partial(scaled_uniform, offset=-0.5)  # from -0.5 to 0.5
_large_samples = partial(scaled_sampled_columns, factors=LARGE_FACTORS)

CASES: dict[str, OperandsCase] = operands.CASES | {
    # The sample of a weight row misleads.
    "student weight": IndependentOperands(x=Draw.normal, weight=student),
    "sampled weights are zero": IndependentOperands(
        x=Draw.normal, weight=tiny_matrix_with_zero_samples
    ),
    "sampled weights are tiny": IndependentOperands(
        x=Draw.normal, weight=partial(scaled_sampled_columns, factors=SMALL_FACTORS)
    ),
    "sampled weights are huge": IndependentOperands(x=Draw.normal, weight=_large_samples),
    "huge sampled weights meet zeros": IndependentOperands(
        x=partial(scaled_sampled_columns, factors=[0.0]), weight=_large_samples
    ),
    "integers, larger ones in the sample": IndependentOperands(
        x=small_integers, weight=integers_with_larger_samples
    ),
    "one-hot x, scaled columns of the weight": IndependentOperands(
        x=scaled_one_hot, weight=graded_without_tiny
    ),
    # The weight gradient where a row of x is tiny.
    "one-hot x meets a tiny column": IndependentOperands(
        x=one_hot_in_one_column, weight=tiny_column
    ),
    # In each row of x, one element is 2^10 to 2^24 times larger than the others, on both sides of
    # every threshold of the kernels. It meets a zero, so only the others count.
    "2^10 .. 2^24 meet a zero column": IndependentOperands(
        x=column_of_large_powers, weight=partial(normal_with_column, value=0.0)
    ),
    "large values meet zeros": large_values_meet_zeros,
    # Operands or results are subnormal, or so large that sums may overflow.
    "subnormal results": IndependentOperands(
        x=partial(scaled_normal, scale=2.0**-70), weight=partial(scaled_normal, scale=2.0**-70)
    ),
    "subnormals in x": IndependentOperands(
        x=partial(scaled_normal, scale=2.0**-132), weight=partial(scaled_normal, scale=2.0**40)
    ),
    "subnormals in the weight": IndependentOperands(
        x=partial(scaled_normal, scale=2.0**40), weight=partial(scaled_normal, scale=2.0**-132)
    ),
    "near overflow, finite": IndependentOperands(
        x=partial(scaled_uniform, scale=2.0**112),
        weight=partial(scaled_uniform, offset=-0.5, scale=2.0),
    ),
    "operands near overflow": IndependentOperands(
        x=partial(scaled_uniform, offset=-0.5, scale=2.0**127),
        weight=partial(scaled_uniform, offset=-0.5, scale=2.0**-100),
    ),
    "overflow": IndependentOperands(  # in every second column
        x=partial(scaled_uniform, offset=0.5, scale=2.0**100), weight=rows_near_overflow
    ),
    "graded and inversely graded, shuffled": partial(inversely_graded, largest_exponent=20),
    # The next two stay within the range in which hi and lo keep their bits.
    "mildly graded and inversely graded": partial(inversely_graded, largest_exponent=8),
    "graded by 2^22 and inversely graded": partial(
        inversely_graded, largest_exponent=11, x=Draw.uniform, weight=_half_signed
    ),
    "1/16 of the columns shared": sharing_columns,
    "16 columns shared": partial(sharing_columns, count=16),
    "1 column shared": partial(sharing_columns, count=1),
    "tiny shared columns": partial(sharing_columns, factor=2.0**-30),
}


def draw_case(name: str, m: int, k: int, n: int, device: str = "cpu") -> Operands:
    """Return x [M, K], weight [N, K] and bias [N] of a case."""
    return CASES[name](Draw(0, device), m, k, n)
