"""How many terms the sums of a reference have, as its operators' operands tell."""

import math

import torch

from referee.child.watch import Seen

CUMULATIVE = ("cumsum", "cumprod", "logcumsumexp", "_softmax", "_log_softmax")  # over a dimension
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0}
REDUCTIONS = ("sum", "mean", "prod", "var", "std", "norm", "logsumexp", "pool", "loss", "dist")


class Terms(Seen):
    """Notes the operators that are called, and the terms of their longest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 1

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        self.most = max(self.most, _terms(name, args, out))
        return out


def _terms(name: str, args: tuple, out: object) -> int:
    """Of a sum that gives one element."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if not tensors or not tensors[0].dim():
        return 1
    if name in CUMULATIVE:
        return tensors[0].shape[args[1]]
    if name in PRODUCTS:
        return tensors[PRODUCTS[name]].shape[-1]
    if name == "convolution":  # args[6]: whether it is a transposed one
        return args[1].numel() // max(args[1].shape[args[6]], 1)
    if name == "native_layer_norm":
        return math.prod(args[1])
    if name in ("native_batch_norm", "native_group_norm"):
        return tensors[0].numel() // max(tensors[0].shape[1], 1)
    if "attention" in name:
        return max(x.shape[-1] for x in tensors) + tensors[1].shape[-2]
    out = out[0] if isinstance(out, tuple) else out
    is_sum = isinstance(out, torch.Tensor) and any(word in name for word in REDUCTIONS)
    return max(1, tensors[0].numel() // max(out.numel(), 1)) if is_sum else 1
