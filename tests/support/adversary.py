"""A search for operands on which a float32 product errs most, in parts of its bound."""

from collections.abc import Callable

import torch
from compositions import operands
from ranges import Reference, bound_ratio
from torch import Tensor

from problems.operands import Draw

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
COMPOSITIONS = 8  # that the search begins with


def hunt(
    product: Product,
    count: int,
    k: int,
    rounds: int,
    seed: int,
    device: str = "cpu",
    relu: bool = True,
) -> float:
    """The largest error found, in parts of its bound.

    `product` takes x `[count, k]`, weight `[count, k]` and bias `[count]`, and returns
    relu(x weight^T + bias), or the same without relu. Each round tries every row of x with every
    row of weight; the best pairs stay, and changed copies of them take the places of the others.
    """
    draw = Draw(seed, device)
    largest = 0.0
    x, weight = _beginning(count, k, seed, device)
    bias = draw.zeros(count)
    for _ in range(rounds):
        parts = bound_ratio(product(x, weight, bias), Reference(x, weight, bias, 1.0, relu))
        best, partner = parts.max(1)
        largest = max(largest, best.max().item())
        kept = best.topk(count // 4).indices
        x = x[kept]
        weight = weight[partner[kept]]
        one = _changed(draw, x, weight)
        other = _changed(draw, weight, x)[::-1]
        both = _changed(draw, *other)
        x, weight = map(torch.cat, zip((x, weight), one, other, both, strict=True))
    return largest


def _beginning(count: int, k: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Rows of random compositions."""
    size = count // COMPOSITIONS
    seeds = range(seed * COMPOSITIONS, (seed + 1) * COMPOSITIONS)
    _, x, weight, _ = zip(*(operands(s, size, k, size, device) for s in seeds), strict=True)
    return torch.cat(x), torch.cat(weight)


def _places(d: Draw, rows: int, k: int) -> Tensor:
    """A run of columns of each row, or some at random, or both."""
    length = d.powers(0, 7, rows, 1)
    first = (d.uniform(rows, 1) * k).floor()
    first = torch.where(d.mask(0.5, rows, 1), first, (first / length).floor() * length)
    column = d.index(k)
    run = (column >= first) & (column < first + length)
    spread = d.uniform(rows, k) < d.uniform(rows, 1) ** 2
    kind = d.uniform(rows, 1)
    return torch.where(kind < 0.5, run, torch.where(kind < 0.75, spread, run & spread))


def _mantissas(d: Draw, *shape: int) -> Tensor:
    """In [1, 2): those whose pieces are rounded most, the ends, and any."""
    steps = torch.tensor([0.0, 2.0**-23, 2.0**-12, 2.0**-11, 2.0**-11 - 2.0**-23, 1 - 2.0**-23])
    chosen = steps.to(d.options["device"])[(d.uniform(*shape) * len(steps)).long()]
    return 1 + torch.where(d.mask(0.5, *shape), d.uniform(*shape), chosen)


def _changed(d: Draw, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of pairs of rows, each changed in one way at some columns, mostly in x."""
    rows, k = x.shape
    power = d.powers(-12, 12, rows, 1)
    signs = x.abs() * torch.where(weight < 0, -1, 1)
    same = x.gather(1, (d.uniform(rows, 1) * k).long()).expand(rows, k)
    mantissas = x.sign() * torch.frexp(x).exponent.float().exp2()
    changes = [
        (x * power, weight),
        (x, weight * power),
        (x * power, weight / power),
        (x * 0, weight),
        (-x, weight),
        (signs, weight),
        (same, weight),
        (mantissas * _mantissas(d, rows, k), weight),
        (mantissas * _mantissas(d, rows, 1), weight),
        (x.roll(1, 0), weight),
    ]
    which = (d.uniform(rows) * len(changes)).long()
    row = d.index(rows)
    places = _places(d, rows, k)
    new_x, new_weight = (torch.stack(side)[which, row] for side in zip(*changes, strict=True))
    return torch.where(places, new_x, x), torch.where(places, new_weight, weight)
