"""A search for operands on which a float32 product's errors come closest to their bound.

The search is an evolution: pairs of a row of x and a row of weight are scored by error / bound, the
best pairs survive, and changed copies of them are tried next.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from problems.operands import Draw
from tests.support.compositions import operands
from tests.support.promises import Reference, bound_ratio

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
COMPOSITIONS = 8  # how many compositions the search begins with


def hunt(
    product: Product,
    count: int,
    k: int,
    rounds: int,
    seed: int,
    device: str = "cpu",
    relu: bool = True,
) -> float:
    """Return the largest error / bound that the search finds.

    Each round multiplies every row of x with every row of weight, and pairs each row of x with the
    row of weight that gives its largest error / bound. The best quarter of these pairs stays, and
    three changed copies of each take the places of the others.

    Args:
        product: takes x `[count, k]`, weight `[count, k]` and bias `[count]`. It returns
            relu(x weight^T + bias), or the same without relu.
        count: how many rows x and weight have.
        k: the length of the rows.
        rounds: how many rounds the search takes.
        seed: of the random numbers.
        device: where the operands are.
        relu: whether the product applies relu.
    """
    draw = Draw(seed, device)
    largest = 0.0
    x, weight = _first_rows(count, k, seed, device)
    bias = draw.zeros(count)
    for _ in range(rounds):
        ratios = bound_ratio(product(x, weight, bias), Reference(x, weight, bias, 1.0, relu))
        best, partner = ratios.max(1)
        largest = max(largest, best.max().item())
        kept = best.topk(count // 4).indices
        x = x[kept]
        weight = weight[partner[kept]]
        # The second copy changes x, the third one weight, and the fourth one both. The parameters
        # of `_changed` are exchanged for weight, because most ways change the first one.
        x2, weight2 = _changed(draw, x, weight)
        weight3, x3 = _changed(draw, weight, x)
        x4, weight4 = _changed(draw, x3, weight3)
        x = torch.cat([x, x2, x3, x4])
        weight = torch.cat([weight, weight2, weight3, weight4])
    return largest


def _first_rows(count: int, k: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the rows of x and weight of several random compositions."""
    size = count // COMPOSITIONS
    xs = []
    weights = []
    for composition_seed in range(seed * COMPOSITIONS, (seed + 1) * COMPOSITIONS):
        _, x, weight, _ = operands(composition_seed, size, k, size, device)
        xs.append(x)
        weights.append(weight)
    return torch.cat(xs), torch.cat(weights)


def _places(draw: Draw, rows: int, k: int) -> Tensor:
    """Return a mask `[rows, k]` of the columns to change.

    Half of the rows have a run of 1 to 128 columns, which half of the time begins at a multiple of
    its length. A quarter have random columns, and a quarter the random columns within a run.
    """
    length = draw.powers(0, 7, rows, 1)
    any_first = (draw.uniform(rows, 1) * k).floor()
    aligned_first = (any_first / length).floor() * length
    first = torch.where(draw.mask(0.5, rows, 1), any_first, aligned_first)
    column = draw.indices(k)
    run = (column >= first) & (column < first + length)
    spread = draw.uniform(rows, k) < draw.uniform(rows, 1) ** 2
    kind = draw.uniform(rows, 1)
    run_or_spread = torch.where(kind < 0.75, spread, run & spread)
    return torch.where(kind < 0.5, run, run_or_spread)


def _mantissas(draw: Draw, *shape: int) -> Tensor:
    """Return numbers in [1, 2): half of them random, and half those on which the split errs most.

    The latter are near the ends of [1, 2), or exceed 1 by up to 2^-11, half of hi's last place.
    """
    steps = torch.tensor([0.0, 2.0**-23, 2.0**-12, 2.0**-11, 2.0**-11 - 2.0**-23, 1 - 2.0**-23])
    index = (draw.uniform(*shape) * len(steps)).long()
    special = steps.to(draw.device)[index]
    return 1 + torch.where(draw.mask(0.5, *shape), draw.uniform(*shape), special)


def _changed(draw: Draw, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of pairs of rows, each changed in one random way at some columns.

    Most ways change x alone.
    """
    rows, k = x.shape
    power = draw.powers(-12, 12, rows, 1)
    all_products_positive = x.abs() * torch.where(weight < 0, -1, 1)
    one_column = (draw.uniform(rows, 1) * k).long()
    repeated_element = x.gather(1, one_column).expand(rows, k)
    power_of_element = x.sign() * torch.frexp(x).exponent.float().exp2()
    ways = [
        (x * power, weight),
        (x, weight * power),
        (x * power, weight / power),
        (torch.zeros_like(x), weight),
        (-x, weight),
        (all_products_positive, weight),
        (repeated_element, weight),
        (power_of_element * _mantissas(draw, rows, k), weight),
        (power_of_element * _mantissas(draw, rows, 1), weight),
        (x.roll(1, 0), weight),
    ]
    way_of_row = (draw.uniform(rows) * len(ways)).long()
    row = draw.indices(rows)
    places = _places(draw, rows, k)
    new_x = torch.stack([way[0] for way in ways])[way_of_row, row]
    new_weight = torch.stack([way[1] for way in ways])[way_of_row, row]
    return torch.where(places, new_x, x), torch.where(places, new_weight, weight)
