"""Kind 6: a float32 product in bfloat16."""

import torch
from common import Linear
from torch import nn


class ModelNew(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.linear.weight.bfloat16(), self.linear.bias.bfloat16()
        z = nn.functional.linear(x.bfloat16(), weight, bias).float()
        return torch.relu(z) / self.divisor
