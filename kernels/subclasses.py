"""Tensors with a Python side of their own: subclasses, DTensor among them, proxies and modes."""

import functools
import sys
from types import ModuleType

import torch


def serve_subclasses(extension: ModuleType) -> None:
    """Tells the extension what to call for such tensors: the operator, which they can intercept.

    In place that is torch's own `relu_`, which they know.
    """
    extension.operators = torch.ops.relu_divide_kernels
    operator = extension.operators.relu.default
    register_once = functools.cache(register_sharding_rule)

    def relu(x: object) -> object:
        # DTensor has no rule for an operator that it does not know. Importing DTensor takes a
        # second, so the rule waits until somebody has.
        if "torch.distributed.tensor" in sys.modules:
            register_once(operator)
        return operator(x)

    def relu_in_place(x: object) -> object:
        return x.relu_()

    linear_relu_divide = extension.operators.linear_relu_divide.default
    extension.set_fallbacks(relu, relu_in_place, linear_relu_divide)


def register_sharding_rule(operator: torch._ops.OpOverload) -> None:
    """ReLU of a DTensor: replicated, or sharded in any dimension as it comes."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(operator)
    def rule(x: object) -> list:
        placements = [Replicate(), *(Shard(dimension) for dimension in range(x.ndim))]
        return [([placement], [placement]) for placement in placements]
