"""Kind 2: the result is right, the input is not what it was."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(x)
        x.zero_()
        return out
