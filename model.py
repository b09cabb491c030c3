"""The reference modules, and their inputs as KernelBench draws them.

`Model` is KernelBench level 1 #19, `LinearReluDivide` level 2 #63. `run.py` takes the sizes and the
constructors' arguments from here, but draws x itself, in [-1, 1) (`problems/sizes.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


class Model(nn.Module):
    """ReLU of a tensor of any shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return max(x, 0), element by element."""
        return torch.relu(x)


class LinearReluDivide(nn.Module):
    """relu(x weight^T + bias) / divisor, for x `[..., in_features]`."""

    def __init__(self, in_features: int, out_features: int, divisor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.divisor = divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(x weight^T + bias) / divisor, `[..., out_features]`."""
        x = self.linear(x)
        x = torch.relu(x)
        return x / self.divisor


# ReLU: x is [batch_size, dim].
batch_size = 4096
dim = 393216

# Linear -> ReLU -> divide: x is [linear_batch_size, in_features].
linear_batch_size = 1024
in_features = 8192
out_features = 8192
divisor = 2.0


def get_inputs() -> list[torch.Tensor]:
    """Return x `[batch_size, dim]`, float32, on the CPU.

    It is uniform in [0, 1) and drawn from torch's global generator.
    """
    return _relu_inputs(batch_size)


def get_init_inputs() -> list:
    """Return the arguments with which `Model` is constructed: none."""
    return []


def get_linear_inputs() -> list[torch.Tensor]:
    """Return x `[linear_batch_size, in_features]`, drawn like the x of `get_inputs`."""
    return _linear_inputs(linear_batch_size)


def get_linear_init_inputs() -> list:
    """Return the arguments with which `LinearReluDivide` is constructed."""
    return [in_features, out_features, divisor]


def _relu_inputs(rows: int) -> list[torch.Tensor]:
    """Draw x `[rows, dim]`."""
    return [torch.rand(rows, dim)]


def _linear_inputs(rows: int) -> list[torch.Tensor]:
    """Draw x `[rows, in_features]`."""
    return [torch.rand(rows, in_features)]


@dataclass(frozen=True)
class Problem:
    """A reference module and its inputs.

    Attributes:
        reference: the `nn.Module` class whose results are right by definition.
        rows: the number of rows of x at the headline size, the size that is timed by default.
        get_inputs_at: takes a number of rows of x, and returns the positional arguments of
            `forward`.
        get_init_inputs: returns the positional arguments of the constructor.
    """

    reference: type[nn.Module]
    rows: int
    get_inputs_at: Callable[[int], list[torch.Tensor]]
    get_init_inputs: Callable[[], list]


PROBLEMS: dict[str, Problem] = {
    "relu": Problem(
        reference=Model,
        rows=batch_size,
        get_inputs_at=_relu_inputs,
        get_init_inputs=get_init_inputs,
    ),
    "linear_relu_divide": Problem(
        reference=LinearReluDivide,
        rows=linear_batch_size,
        get_inputs_at=_linear_inputs,
        get_init_inputs=get_linear_init_inputs,
    ),
}
