"""A Triton kernel, which needs a GPU."""

import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def kernel(x, out, n, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    values = tl.load(x + i, mask=i < n)
    tl.store(out + i, tl.where(values < 0, 0.0, values), mask=i < n)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.numel():
            kernel[triton.cdiv(x.numel(), 1024),](x, out, x.numel(), block=1024)
        return out
