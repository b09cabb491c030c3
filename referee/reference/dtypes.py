"""The dtypes that the user can choose for a problem."""

import torch

NAMES = "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES.split()}
