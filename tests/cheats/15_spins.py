"""Kind 15: a thread of its own is never at rest."""

import threading
import zlib

import torch
from torch import nn


def spin() -> None:
    while True:
        zlib.crc32(bytes(1 << 24))  # without the interpreter's lock, for which calls would wait


threading.Thread(target=spin, daemon=True).start()


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)
