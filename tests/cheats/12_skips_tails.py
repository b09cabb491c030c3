"""Kind 12: what does not fill a vector of four stays as it was."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(x)
        tail = x.numel() % 4
        if tail and x.is_contiguous():
            out.view(-1)[-tail:] = x.reshape(-1)[-tail:]
        return out
