"""ReLU of tensor subclasses, DTensor among them, of proxies, and under modes."""

import functools
from types import ModuleType

import torch
from torch import relu as torch_relu
from torch.nn import functional

# bundle: skip
from kernels.binding.subclasses import PLAIN, is_dtensor

# bundle: end


def serve_relu(extension: ModuleType) -> None:
    """Tells the extension what to call for such tensors: the operator, which modes can intercept.

    Other subclasses, and graphs, get torch's own functions, which they know. These also raise the
    errors for what is no tensor.
    """
    operator = extension.operators.relu.default
    shard = functools.cache(register_relu_sharding)

    def relu(x: object) -> object:
        is_sharded = is_dtensor(x)
        if not (is_sharded or type(x) in PLAIN) or extension.is_recorded():
            return torch_relu(x)
        if is_sharded:  # it has no rule for an operator that it does not know
            shard(operator)
        return operator(x)

    extension.relu_of_subclass = relu
    extension.relu_of_subclass_in_place = functools.partial(functional.relu, inplace=True)


def register_relu_sharding(operator: torch._ops.OpOverload) -> None:
    """ReLU of a DTensor: sharded as it comes, and replicated where sums are due before."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(operator)
    def rule(x: object) -> list:
        placements = [Replicate(), *(p for p in x.placements if not p.is_partial())]
        return [([placement], [placement]) for placement in placements]
