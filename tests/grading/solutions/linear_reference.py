"""KernelBench's level 2 #63, with half of its features: x `[1024, 4096]`, weight `[4096, 4096]`."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int, divisor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.divisor = divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) / self.divisor


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(1024, 4096)]


def get_init_inputs() -> list:
    return [4096, 4096, 2.0]
