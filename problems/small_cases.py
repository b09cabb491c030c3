"""Small cases that both problems have, and the record of a layout."""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from referee.comparison.case import OwnCase
from referee.reference.random_values import draw_into


class Layout(NamedTuple):
    """A layout of x.

    Attributes:
        name: of the case.
        shape: of a dense tensor.
        view: returns x, a view of the dense tensor.
    """

    name: str
    shape: tuple[int, ...]
    view: Callable[[torch.Tensor], torch.Tensor]


def changed_in_part(x: torch.Tensor, generator: torch.Generator) -> Iterator[OwnCase]:
    """Yield x, then a copy with another row, then a copy of that with another element.

    A solution that keeps the result of an input, and finds it again by the input's address or by a
    part of its values, gets the second and the third case wrong.
    """
    yield OwnCase("an input", [x])
    x = x.clone()
    draw_into(x[random.randrange(len(x))], generator)
    yield OwnCase("another row at the same address", [x])
    x = x.clone()
    elements = x.view(-1)
    place = random.randrange(x.numel())
    elements[place] = 1 if elements[place].item() <= 0 else 3  # changes the result in both cases
    yield OwnCase("another element at the same address", [x])
