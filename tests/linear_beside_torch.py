"""The linear module and its reference on small inputs, one beside the other."""

import torch
from torch import nn


def samples(device="cpu", dtype=torch.float32):
    return torch.randn(4, 6, device=device, dtype=dtype)


def assert_close(got, want):
    """Equal on a CPU. On a GPU torch divides by a multiplication."""
    assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
    torch.testing.assert_close(got, want)


def both(modules, run):
    got, want = (run(module) for module in modules)
    assert_close(got, want)
    return got


class LowRank(nn.Module):
    """A wrapper as adapters use it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(6, 2), nn.Linear(2, 10)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def wrap(module):
    torch.manual_seed(5)
    module.linear = LowRank(module.linear)
