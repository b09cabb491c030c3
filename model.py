"""The reference modules and the inputs they are graded on (KernelBench level 1 #19)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


class Model(nn.Module):
    """ReLU of a tensor of any shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


batch_size = 4096
dim = 393216


def get_inputs() -> list[torch.Tensor]:
    """x `[batch_size, dim]`, float32, uniform in 0..1, on the CPU, from the global generator."""
    return _relu_inputs(batch_size)


def get_init_inputs() -> list:
    return []


def _relu_inputs(rows: int) -> list[torch.Tensor]:
    return [torch.rand(rows, dim)]


@dataclass(frozen=True)
class Problem:
    """A reference module and its inputs.

    Attributes:
        reference: the `nn.Module` class that defines what is right.
        rows: the number of rows of the headline input.
        get_inputs: the positional arguments of `forward` at the headline size.
        get_init_inputs: the positional arguments of the constructor.
        get_inputs_at: `get_inputs` with another number of rows.
    """

    reference: type[nn.Module]
    rows: int
    get_inputs: Callable[[], list[torch.Tensor]]
    get_init_inputs: Callable[[], list]
    get_inputs_at: Callable[[int], list[torch.Tensor]]


PROBLEMS: dict[str, Problem] = {
    "relu": Problem(Model, batch_size, get_inputs, get_init_inputs, _relu_inputs),
}
