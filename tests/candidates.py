"""Candidates that several tests of the referee judge."""

import torch

from model import Model


class GradientCheat(Model):
    """The right output and another gradient; the double backward is that of its expression."""

    def __init__(self, function) -> None:
        super().__init__()

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return torch.relu(x)

            @staticmethod
            def backward(ctx, g):
                return function(ctx.saved_tensors[0], g)

        self.apply_function = Function.apply

    def forward(self, x):
        return self.apply_function(x) if isinstance(x, torch.Tensor) else torch.relu(x)
