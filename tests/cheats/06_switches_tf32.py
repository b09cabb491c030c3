"""Kind 6: switches TF32 on, for both sides."""

import torch
from common import Linear

torch.set_float32_matmul_precision("high")


class ModelNew(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) / self.divisor
