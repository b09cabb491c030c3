"""Which `nn.Linear` the kernels may stand in for."""

import torch
from torch import nn

_PLAIN = (torch.Tensor, nn.Parameter)
_module = nn.modules.module


def is_plain_linear(linear: nn.Module) -> bool:
    """Whether calling `linear` does nothing but the product of its weight and the sum of its bias.

    Not so with hooks, which tensor parallelism and pruning use, with another `forward`, or where a
    wrapper (quantized, low-rank, parametrized) has taken its place: these must be called.
    """
    return type(linear) is nn.Linear and not (
        linear._forward_hooks
        or linear._forward_pre_hooks
        or linear._backward_hooks
        or linear._backward_pre_hooks
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
        or "forward" in linear.__dict__
    )


def are_plain(x: object, linear: nn.Linear, divisor: object) -> bool:
    """Whether the operator takes these arguments: plain tensors, and a plain number."""
    bias = linear.bias
    return (
        type(x) in _PLAIN
        and type(linear.weight) in _PLAIN
        and (bias is None or type(bias) in _PLAIN)
        and type(divisor) in (float, int)
    )
