"""Small cases that both problems have."""

import random
from collections.abc import Iterator

import torch

from referee import cases
from referee.problem import Case


def changed_in_part(x: torch.Tensor, generator: torch.Generator) -> Iterator[Case]:
    """Return an input, then the same with another row, then with another element.

    A result that is kept by its input's address, or by a part of the values, is wrong then.
    """
    yield Case("an input", [x])
    x = x.clone()
    cases.refill(x[random.randrange(len(x))], generator)
    yield Case("another row at the same address", [x])
    x = x.clone()
    place = random.randrange(x.numel())
    x.view(-1)[place] = 1 if x.view(-1)[place].item() <= 0 else 3
    yield Case("another element at the same address", [x])
