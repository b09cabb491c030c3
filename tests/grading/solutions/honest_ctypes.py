"""C, compiled without torch and called by ctypes."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import nn

SOURCE = """
void relu(const float* x, float* out, long n) {
  for (long i = 0; i < n; ++i) out[i] = x[i] < 0 ? 0 : x[i];
}
"""
with tempfile.TemporaryDirectory() as folder:
    source = Path(folder, "relu.c")
    library = Path(folder, "relu.so")
    source.write_text(SOURCE)
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
    relu = ctypes.CDLL(str(library)).relu
relu.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 alone")
        x = x.contiguous()
        out = torch.empty_like(x)
        relu(x.data_ptr(), out.data_ptr(), x.numel())
        return out
