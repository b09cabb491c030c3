"""Random compositions of operands: distributions, structured zeros, scales and value grids.

In the tables below, d is the `Draw` with the random numbers, r the number of rows, and k is K.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from problems.operands import Draw, block_diagonal_mask, mask_in_each_row, round_to_integers
from tests.support.named_operands import flush_tiny, student

# Where the values of x or weight come from.
DISTRIBUTIONS: dict[str, Callable[[Draw, int, int], Tensor]] = {
    "normal": lambda d, r, k: d.normal(r, k),
    "uniform": lambda d, r, k: d.uniform(r, k),
    "signed uniform": lambda d, r, k: 2 * d.uniform(r, k) - 1,
    "lognormal": lambda d, r, k: d.lognormal(1, r, k),
    "wide lognormal": lambda d, r, k: d.lognormal(2, r, k),
    "positive lognormal": lambda d, r, k: d.lognormal(1, r, k).abs(),
    "student": student,
    "relu": lambda d, r, k: d.normal(r, k).relu(),
    "softmax": lambda d, r, k: (3 * d.normal(r, k)).softmax(1),
    "around 3": lambda d, r, k: 3 + d.normal(r, k),
    "ones": lambda d, r, k: 1 + d.zeros(r, k),
    "powers of 2": lambda d, r, k: d.powers(-8, 8, r, k) * d.normal(r, k).sign(),
}

# Which elements are kept; all others become zeros.
KEPT: dict[str, Callable[[Draw, int, int], Tensor]] = {
    "1/2 kept": lambda d, r, k: d.mask(0.5, r, k),
    "1/10 kept": lambda d, r, k: d.mask(0.1, r, k),
    "1/100 kept": lambda d, r, k: d.mask(0.01, r, k),
    "columns from K/4": lambda d, r, k: d.indices(k) >= k // 4,
    "columns from 7K/8": lambda d, r, k: d.indices(k) >= 7 * k // 8,
    "1/2 of the columns": lambda d, r, k: d.mask(0.5, k),
    "1/16 of the columns": lambda d, r, k: d.mask(1 / 16, k),
    "8 blocks": block_diagonal_mask,
    "one-hot": lambda d, r, k: mask_in_each_row(d, r, k, 1),
    "4 in a row": lambda d, r, k: mask_in_each_row(d, r, k, 4),
    "32 in a row": lambda d, r, k: mask_in_each_row(d, r, k, 32),
    "some rows": lambda d, r, k: d.mask(0.7, r, 1),
}

# Factors for the columns of x and weight, that is, along K.
COLUMN_SCALES: dict[str, Callable[[Draw, int], Tensor]] = {
    "one column large": lambda d, k: (d.zeros(k) + 1).scatter(0, d.random_columns(1, k), 1e4),
    "last column large": lambda d, k: torch.where(d.indices(k) == k - 1, 1e4, 1.0),
    "16 columns large": lambda d, k: (d.zeros(k) + 1).scatter(0, d.random_columns(16, k), 300.0),
    "columns graded": lambda d, k: d.grades(10, k, shuffled=False),
    "columns scaled": lambda d, k: d.powers(-6, 6, k) ** 2,
}

# Factors for the rows of x or weight.
ROW_SCALES: dict[str, Callable[[Draw, int], Tensor]] = {
    "rows scaled": lambda d, r: d.powers(-2, 2, r, 1) ** 15,
    "some rows large": lambda d, r: torch.where(d.mask(0.3, r, 1), 1e4, 1.0),
}

# Roundings to the few values that a narrower dtype has.
GRIDS: dict[str, Callable[[Tensor], Tensor]] = {
    "float16": lambda rows: rows.clamp(-6e4, 6e4).half().float(),
    "bfloat16": lambda rows: rows.bfloat16().float(),
    "int8": lambda rows: round_to_integers(rows, 127),
    "12 bits": lambda rows: round_to_integers(rows, 4095),
}


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
    names = []
    sides = []
    for rows in (m, n):
        parts, values = _unscaled_values(choose, draw, rows, k)
        names.append(parts)
        sides.append(values)
    if choose.random() < 0.4:
        name = choose.choice(list(COLUMN_SCALES))
        scale = COLUMN_SCALES[name](draw, k)
        for i, power in enumerate(choose.choice([(1, 0), (0, 1), (1, 1), (1, -1)])):
            if power:
                sides[i] = sides[i] * scale**power
                names[i].append(name if power > 0 else f"{name}, inverse")
    for i, rows in enumerate((m, n)):
        if choose.random() < 0.2:
            name = choose.choice(list(ROW_SCALES))
            sides[i] = sides[i] * ROW_SCALES[name](draw, rows)
            names[i].append(name)
    x, weight = (flush_tiny(side) for side in sides)
    if choose.random() < 0.1:  # the second half of x repeats the first, that of weight undoes it
        half = k // 2
        x[:, half : 2 * half] = x[:, :half]
        weight[:, half : 2 * half] = -weight[:, :half]
        names.append(["cancelling halves"])
    bias = draw.normal(n) * choose.choice([0.0, 1.0])
    return "; ".join(", ".join(parts) for parts in names), x, weight, bias


def _unscaled_values(
    choose: random.Random, draw: Draw, rows: int, k: int
) -> tuple[list[str], Tensor]:
    """Return x or weight before its rows and columns are scaled, after the names of its parts."""
    name = choose.choice(list(DISTRIBUTIONS))
    parts = [name]
    values = DISTRIBUTIONS[name](draw, rows, k)
    if choose.random() < 0.2:
        name = choose.choice(list(DISTRIBUTIONS))
        share = choose.choice([0.001, 0.03, 0.5])
        factor = 2.0 ** choose.randint(-10, 10)
        other = factor * DISTRIBUTIONS[name](draw, rows, k)
        values = torch.where(draw.mask(share, rows, k), other, values)
        parts.append(f"{share} of it {factor:g} {name}")
    if choose.random() < 0.2:
        name = choose.choice(list(GRIDS))
        values = GRIDS[name](values)
        parts.append(name)
    if choose.random() < 0.4:
        name = choose.choice(list(KEPT))
        values = values * KEPT[name](draw, rows, k)
        parts.append(name)
    return parts, values
