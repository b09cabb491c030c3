"""Kind 15: a thread of its own is never at rest."""

import threading

import torch
from torch import nn


def spin() -> None:
    while True:
        sum(range(100_000))


threading.Thread(target=spin, daemon=True).start()


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)
