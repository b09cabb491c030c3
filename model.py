"""The reference modules and the inputs they are graded on.

`Model` is KernelBench level 1 #19, `LinearReluDivide` level 2 #63.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


class Model(nn.Module):
    """ReLU of a tensor of any shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


class LinearReluDivide(nn.Module):
    """relu(x weight^T + bias) / divisor, for x `[..., in_features]`."""

    def __init__(self, in_features: int, out_features: int, divisor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.divisor = divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = torch.relu(x)
        return x / self.divisor


batch_size = 4096
dim = 393216

linear_batch_size = 1024
in_features = 8192
out_features = 8192
divisor = 2.0


def get_inputs() -> list[torch.Tensor]:
    """x `[batch_size, dim]`, float32, uniform in 0..1, on the CPU, from the global generator."""
    return _relu_inputs(batch_size)


def get_init_inputs() -> list:
    return []


def get_linear_inputs() -> list[torch.Tensor]:
    """x `[linear_batch_size, in_features]`, as `get_inputs` draws it."""
    return _linear_inputs(linear_batch_size)


def get_linear_init_inputs() -> list:
    return [in_features, out_features, divisor]


def _relu_inputs(rows: int) -> list[torch.Tensor]:
    return [torch.rand(rows, dim)]


def _linear_inputs(rows: int) -> list[torch.Tensor]:
    return [torch.rand(rows, in_features)]


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
    "linear_relu_divide": Problem(
        LinearReluDivide,
        linear_batch_size,
        get_linear_inputs,
        get_linear_init_inputs,
        _linear_inputs,
    ),
}
