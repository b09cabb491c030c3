"""Kind 19: makes the baseline slow."""

import time

import torch
from torch import nn

fast = torch.relu


def slow(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.01)
    return fast(x)


torch.relu = slow


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fast(x)
