"""KernelBench's level 1 #19, at a size that fits everywhere: x `[1024, 32768]`."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(1024, 32768)]


def get_init_inputs() -> list:
    return []
