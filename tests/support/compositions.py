"""Random compositions of operands: distributions, structured zeros, scales and value grids."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from problems.operands import (
    Draw,
    MatrixFunction,
    block_diagonal_mask,
    lognormal,
    mask_in_each_row,
    positive_lognormal,
    round_to_integers,
)
from tests.support.named_operands import flush_tiny, student

# Where the values of x or weight come from.
DISTRIBUTIONS: dict[str, MatrixFunction] = {
    "normal": Draw.normal,
    "uniform": Draw.uniform,
    "signed uniform": lambda draw, rows, k: 2 * draw.uniform(rows, k) - 1,
    "lognormal": partial(lognormal, sigma=1),
    "wide lognormal": partial(lognormal, sigma=2),
    "positive lognormal": positive_lognormal,
    "student": student,
    "relu": lambda draw, rows, k: draw.normal(rows, k).relu(),
    "softmax": lambda draw, rows, k: (3 * draw.normal(rows, k)).softmax(1),
    "around 3": lambda draw, rows, k: 3 + draw.normal(rows, k),
    "ones": Draw.ones,
    "powers of 2": lambda draw, rows, k: draw.powers(-8, 8, rows, k) * draw.normal(rows, k).sign(),
}

# Which elements are kept; all others become zeros.
KEPT: dict[str, MatrixFunction] = {
    "1/2 kept": lambda draw, rows, k: draw.mask(0.5, rows, k),
    "1/10 kept": lambda draw, rows, k: draw.mask(0.1, rows, k),
    "1/100 kept": lambda draw, rows, k: draw.mask(0.01, rows, k),
    "columns from K/4": lambda draw, rows, k: draw.indices(k) >= k // 4,
    "columns from 7K/8": lambda draw, rows, k: draw.indices(k) >= 7 * k // 8,
    "1/2 of the columns": lambda draw, rows, k: draw.mask(0.5, k),
    "1/16 of the columns": lambda draw, rows, k: draw.mask(1 / 16, k),
    "8 blocks": block_diagonal_mask,
    "one-hot": partial(mask_in_each_row, count=1),
    "4 in a row": partial(mask_in_each_row, count=4),
    "32 in a row": partial(mask_in_each_row, count=32),
    "some rows": lambda draw, rows, k: draw.mask(0.7, rows, 1),
}


def _large_columns(draw: Draw, k: int, *, count: int, factor: float) -> Tensor:
    """Return the factor for `count` random columns, and 1 for all others."""
    return draw.ones(k).scatter(0, draw.random_columns(count, k), factor)


# Factors for the columns of x and weight, that is, along K.
COLUMN_SCALES: dict[str, Callable[[Draw, int], Tensor]] = {
    "one column large": partial(_large_columns, count=1, factor=1e4),
    "last column large": lambda draw, k: torch.where(draw.indices(k) == k - 1, 1e4, 1.0),
    "16 columns large": partial(_large_columns, count=16, factor=300.0),
    "columns graded": lambda draw, k: draw.grades(10, k, shuffled=False),
    "columns scaled": lambda draw, k: draw.powers(-6, 6, k) ** 2,
}

# Factors for the rows of x or weight.
ROW_SCALES: dict[str, Callable[[Draw, int], Tensor]] = {
    "rows scaled": lambda draw, rows: draw.powers(-2, 2, rows, 1) ** 15,
    "some rows large": lambda draw, rows: torch.where(draw.mask(0.3, rows, 1), 1e4, 1.0),
}

# Roundings to the few values that a narrower dtype has.
GRIDS: dict[str, Callable[[Tensor], Tensor]] = {
    "float16": lambda rows: rows.clamp(-6e4, 6e4).half().float(),
    "bfloat16": lambda rows: rows.bfloat16().float(),
    "int8": lambda rows: round_to_integers(rows, 127),
    "12 bits": lambda rows: round_to_integers(rows, 4095),
}


@dataclass
class Side:
    """One operand, x or weight, while it is composed.

    Attributes:
        values: the rows, `[rows, K]`.
        parts: the names of all that it is made of.
    """

    values: Tensor
    parts: list[str]

    def scale(self, factors: Tensor, name: str) -> None:
        """Multiply the rows or the columns by factors that have this name."""
        self.values = self.values * factors
        self.parts.append(name)


def operands(
    seed: int, m: int, k: int, n: int, device: str = "cpu"
) -> tuple[str, Tensor, Tensor, Tensor]:
    """Return the name, x [M, K], weight [N, K] and bias [N] of one composition.

    x and weight each have a distribution or a mixture of two. Chance adds a grid of values, zeros,
    and scaled rows to either. It also scales the columns of x, of weight, of both, or of one
    inversely to the other. The seed alone decides what is composed; the values depend on the device
    too.
    """
    choose = random.Random(seed)
    draw = Draw(seed, device)
    side_x = _unscaled_side(choose, draw, m, k)
    side_weight = _unscaled_side(choose, draw, n, k)
    if choose.random() < 0.4:
        _scale_columns(choose, draw, side_x, side_weight)
    for side in (side_x, side_weight):
        if choose.random() < 0.2:
            name = choose.choice(list(ROW_SCALES))
            side.scale(ROW_SCALES[name](draw, len(side.values)), name)
    x = flush_tiny(side_x.values)
    weight = flush_tiny(side_weight.values)
    names = [", ".join(side.parts) for side in (side_x, side_weight)]
    if choose.random() < 0.1:  # the second half of x repeats the first, that of weight undoes it
        half = k // 2
        x[:, half : 2 * half] = x[:, :half]
        weight[:, half : 2 * half] = -weight[:, :half]
        names.append("cancelling halves")
    bias = draw.normal(n) * choose.choice([0.0, 1.0])
    return "; ".join(names), x, weight, bias


def _scale_columns(choose: random.Random, draw: Draw, x: Side, weight: Side) -> None:
    """Scale the columns of x, of weight, of both, or of x and inversely of weight."""
    name = choose.choice(list(COLUMN_SCALES))
    factors = COLUMN_SCALES[name](draw, x.values.shape[1])
    power_of_x, power_of_weight = choose.choice([(1, 0), (0, 1), (1, 1), (1, -1)])
    if power_of_x == 1:
        x.scale(factors, name)
    if power_of_weight == 1:
        weight.scale(factors, name)
    elif power_of_weight == -1:
        weight.scale(factors**-1, f"{name}, inverse")


def _unscaled_side(choose: random.Random, draw: Draw, rows: int, k: int) -> Side:
    """Return x or weight before its rows and columns are scaled."""
    name = choose.choice(list(DISTRIBUTIONS))
    side = Side(DISTRIBUTIONS[name](draw, rows, k), [name])
    if choose.random() < 0.2:
        name = choose.choice(list(DISTRIBUTIONS))
        share = choose.choice([0.001, 0.03, 0.5])
        factor = 2.0 ** choose.randint(-10, 10)
        other = factor * DISTRIBUTIONS[name](draw, rows, k)
        side.values = torch.where(draw.mask(share, rows, k), other, side.values)
        side.parts.append(f"{share} of it {factor:g} {name}")
    if choose.random() < 0.2:
        name = choose.choice(list(GRIDS))
        side.values = GRIDS[name](side.values)
        side.parts.append(name)
    if choose.random() < 0.4:
        name = choose.choice(list(KEPT))
        side.values = side.values * KEPT[name](draw, rows, k)
        side.parts.append(name)
    return side
