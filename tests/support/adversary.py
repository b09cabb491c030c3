"""A search for operands on which a float32 product's errors come closest to their bound.

The search is an evolution: pairs of a row of x and a row of weight are scored by error / bound, the
best pairs survive, and changed copies of them are tried next.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from problems.operands import Draw
from tests.support.compositions import operands
from tests.support.promises import Reference, bound_ratio

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
COMPOSITIONS = 8  # how many compositions the search begins with


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows: row i of x `[count, k]` and row i of weight `[count, k]`."""

    x: Tensor
    weight: Tensor

    def exchanged(self) -> "Pairs":
        """Return the pairs with x and weight in each other's place."""
        return Pairs(self.weight, self.x)


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
    pairs = _first_pairs(count, k, seed, device)
    bias = draw.zeros(count)
    for _ in range(rounds):
        out = product(pairs.x, pairs.weight, bias)
        ratios = bound_ratio(out, Reference(pairs.x, pairs.weight, bias, 1.0, relu))
        best, partner = ratios.max(1)
        largest = max(largest, best.max().item())
        kept = best.topk(count // 4).indices
        kept_pairs = Pairs(pairs.x[kept], pairs.weight[partner[kept]])
        new_x = _change_x(draw, kept_pairs)
        new_weight = _change_weight(draw, kept_pairs)
        both_new = _change_x(draw, new_weight)
        pairs = _join([kept_pairs, new_x, new_weight, both_new])
    return largest


def _join(groups: list[Pairs]) -> Pairs:
    """Return the pairs of all groups."""
    return Pairs(
        torch.cat([pairs.x for pairs in groups]), torch.cat([pairs.weight for pairs in groups])
    )


def _first_pairs(count: int, k: int, seed: int, device: str) -> Pairs:
    """Return the rows of x and weight of several random compositions."""
    size = count // COMPOSITIONS
    groups = []
    for composition_seed in range(seed * COMPOSITIONS, (seed + 1) * COMPOSITIONS):
        _, x, weight, _ = operands(composition_seed, size, k, size, device)
        groups.append(Pairs(x, weight))
    return _join(groups)


def _runs(draw: Draw, rows: int, k: int) -> Tensor:
    """Return a mask `[rows, k]` of one run of 1 to 128 columns in each row.

    Half of the runs begin at a multiple of their length.
    """
    length = draw.powers(0, 7, rows, 1)
    any_first = (draw.uniform(rows, 1) * k).floor()
    aligned_first = (any_first / length).floor() * length
    first = torch.where(draw.mask(0.5, rows, 1), any_first, aligned_first)
    column = draw.indices(k)
    return (column >= first) & (column < first + length)


def _scattered_columns(draw: Draw, rows: int, k: int) -> Tensor:
    """Return a mask `[rows, k]` of random columns. Their share differs from row to row."""
    return draw.uniform(rows, k) < draw.uniform(rows, 1) ** 2


def _places(draw: Draw, rows: int, k: int) -> Tensor:
    """Return a mask `[rows, k]` of the columns to change."""
    runs = _runs(draw, rows, k)
    scattered = _scattered_columns(draw, rows, k)
    kinds = [runs, runs, scattered, runs & scattered]
    return _pick_rows(kinds, _random_indices(draw, len(kinds), rows))


def _random_indices(draw: Draw, count: int, *shape: int) -> Tensor:
    """Return random indices below `count`."""
    return (draw.uniform(*shape) * count).long()


def _pick_rows(choices: list[Tensor], choice_of_row: Tensor) -> Tensor:
    """Return row i of choice number `choice_of_row[i]`, for each i. A choice is `[rows, k]`."""
    row = torch.arange(len(choice_of_row), device=choice_of_row.device)
    return torch.stack(choices)[choice_of_row, row]


def _mantissas(draw: Draw, *shape: int) -> Tensor:
    """Return numbers in [1, 2): half of them random, and half those on which the split errs most.

    The latter are near the ends of [1, 2), or exceed 1 by up to 2^-11, half of hi's last place.
    """
    steps = torch.tensor([0.0, 2.0**-23, 2.0**-12, 2.0**-11, 2.0**-11 - 2.0**-23, 1 - 2.0**-23])
    special = steps.to(draw.device)[_random_indices(draw, len(steps), *shape)]
    return 1 + torch.where(draw.mask(0.5, *shape), draw.uniform(*shape), special)


def _change_weight(draw: Draw, pairs: Pairs) -> Pairs:
    """Return copies of the pairs as `_change_x` does, with the roles of x and weight exchanged."""
    return _change_x(draw, pairs.exchanged()).exchanged()


def _change_x(draw: Draw, pairs: Pairs) -> Pairs:
    """Return copies of the pairs, each changed in one random way at some columns.

    All ways but two change x alone.
    """
    x = pairs.x
    weight = pairs.weight
    rows, k = x.shape
    power = draw.powers(-12, 12, rows, 1)
    all_products_positive = x.abs() * torch.where(weight < 0, -1, 1)
    repeated_element = x.gather(1, _random_indices(draw, k, rows, 1)).expand(rows, k)
    power_of_element = x.sign() * torch.frexp(x).exponent.float().exp2()
    ways = [
        Pairs(x * power, weight),
        Pairs(x, weight * power),
        Pairs(x * power, weight / power),
        Pairs(torch.zeros_like(x), weight),
        Pairs(-x, weight),
        Pairs(all_products_positive, weight),
        Pairs(repeated_element, weight),
        Pairs(power_of_element * _mantissas(draw, rows, k), weight),
        Pairs(power_of_element * _mantissas(draw, rows, 1), weight),
        Pairs(x.roll(1, 0), weight),
    ]
    way_of_row = _random_indices(draw, len(ways), rows)
    places = _places(draw, rows, k)
    new_x = _pick_rows([way.x for way in ways], way_of_row)
    new_weight = _pick_rows([way.weight for way in ways], way_of_row)
    return Pairs(torch.where(places, new_x, x), torch.where(places, new_weight, weight))
