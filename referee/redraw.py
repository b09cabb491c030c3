"""New values for the parameters and buffers of the reference's module."""

import random

import torch
from torch import nn

from referee import cases
from referee.shared import without_repeats

SEEDS = 1 << 30


def new_seed() -> int:
    """Return a seed that no solution can foresee."""
    return random.randrange(SEEDS)


def changing_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that get new values for every call.

    They hold floats. Where several names share memory, as those of tied weights do, only the first
    is returned.
    """
    known = set()
    names = []
    for name, x in module.state_dict().items():
        memory = x.data_ptr(), x.shape, x.stride()
        if x.is_floating_point() and x.numel() and memory not in known:
            known.add(memory)
            names.append(name)
    return names


def redraw_module(module: nn.Module) -> None:
    """Overwrite a module's parameters and buffers with new values."""
    state = module.state_dict()
    for name in changing_names(module):
        x = without_repeats(state[name])
        x.copy_(new_values(x))


def new_values(old: torch.Tensor) -> torch.Tensor:
    """Return other values for a parameter or buffer, of the same signs; see `cases.redraw`."""
    return cases.redraw(old, new_seed())
