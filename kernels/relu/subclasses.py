"""ReLU of tensor subclasses, DTensor among them, of proxies, and under modes."""

import functools
from types import ModuleType

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

# bundle: skip
from kernels.binding.subclasses import is_dtensor

# bundle: end


def serve_relu(extension: ModuleType) -> None:
    """Tells the extension what to call for such tensors: the operator, which they can intercept.

    ReLU of what torch traces, and in place, is torch's own op, which they know.
    """
    operator = extension.operators.relu.default
    shard = functools.cache(register_relu_sharding)

    def relu(x: object) -> object:
        if not hasattr(x, "__torch_function__"):
            raise TypeError(
                f"relu(): argument 'input' (position 1) must be Tensor, not {type(x).__name__}"
            )
        is_traced = type(x) in (FakeTensor, FunctionalTensor) or isinstance(x, torch.fx.Proxy)
        if is_traced or extension.is_recorded():
            return x.relu()
        if is_dtensor(x):  # it has no rule for an operator that it does not know
            shard(operator)
        return operator(x)

    def relu_in_place(x: object) -> object:
        if not hasattr(x, "__torch_function__"):
            return relu(x)
        return x.relu_()

    extension.relu_of_subclass = relu
    extension.relu_of_subclass_in_place = relu_in_place


def register_relu_sharding(operator: torch._ops.OpOverload) -> None:
    """ReLU of a DTensor: sharded as it comes, and replicated where sums are due before."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(operator)
    def rule(x: object) -> list:
        placements = [Replicate(), *(p for p in x.placements if not p.is_partial())]
        return [([placement], [placement]) for placement in placements]
