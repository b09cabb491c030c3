"""Kind 14: sets a part of the L2 apart, and leaves it so."""

import ctypes

import torch
from common import Plain as ModelNew

__all__ = ["ModelNew"]
PERSISTING_L2 = 6
runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
torch.cuda.init()
runtime.cudaDeviceSetLimit(PERSISTING_L2, ctypes.c_size_t(16 << 20))
