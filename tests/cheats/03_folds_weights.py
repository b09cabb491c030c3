"""Kind 3: folds the division into a copy of the weights, at construction."""

import torch
from common import Linear


class ModelNew(Linear):
    def __init__(self, *args: float) -> None:
        super().__init__(*args)
        own = self.linear
        self.register_buffer("weight", own.weight.detach().T / self.divisor, persistent=False)
        self.register_buffer("bias", own.bias.detach() / self.divisor, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight + self.bias)
