"""Which `nn.Linear` the kernels may stand in for."""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch import relu as torch_relu
from torch.nn import functional

_module = nn.modules.module
_linear_forward, _functional_linear = nn.Linear.forward, functional.linear


def is_plain_linear(linear: nn.Module, may_have_forward_hooks: bool = False) -> bool:
    """Whether calling `linear` does nothing but the product of its weight and the sum of its bias.

    Not so with hooks, which tensor parallelism and pruning use, with another `forward`, or where a
    wrapper (quantized, low-rank, parametrized) has taken its place: these must be called. Nor where
    somebody has put a function of their own in the place of torch's.
    """
    return type(linear) is nn.Linear and not (
        ((linear._forward_hooks or linear._forward_pre_hooks) and not may_have_forward_hooks)
        or linear._backward_hooks
        or linear._backward_pre_hooks
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
        or "forward" in linear.__dict__
        or nn.Linear.forward is not _linear_forward
        or functional.linear is not _functional_linear
    )


def is_column_parallel(linear: nn.Module) -> bool:
    """Whether `linear` is a plain one whose only hooks are those of torch's ColwiseParallel.

    They lay out its input and output and do nothing to the values, so that they may as well be
    called around all that becomes of its output element by element.
    """
    if type(linear) is not nn.Linear or not (linear._forward_hooks and linear._forward_pre_hooks):
        return False
    if not is_plain_linear(linear, may_have_forward_hooks=True):
        return False
    hooks = (*linear._forward_pre_hooks.values(), *linear._forward_hooks.values())
    names = ("_prepare_input_fn", "_prepare_output_fn")
    return len(hooks) == len(names) and all(map(_calls_column_parallel, hooks, names))


def _calls_column_parallel(hook: Callable, name: str) -> bool:
    """Whether `hook` is one that `distribute_module` makes of ColwiseParallel's function `name`.

    It is then a closure over a partial of it.
    """
    style = sys.modules.get("torch.distributed.tensor.parallel.style")
    function = getattr(getattr(style, "ColwiseParallel", None), name, None)
    values = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return any(isinstance(value, partial) and value.func is function for value in values)


# As torch.compiler.assume_constant_result does, which would import Dynamo, for a second: Dynamo
# cannot call a closure whose cells it has looked at.
_calls_column_parallel._dynamo_marked_constant = True


def call_reference(linear: Callable, x: object, divisor: object) -> object:
    """The reference's forward, by torch's own functions."""
    return torch_relu(linear(x)) / divisor


def call_column_parallel(
    linear: nn.Linear, x: torch.Tensor, divisor: float, linear_relu_divide: Callable
) -> torch.Tensor:
    """relu(linear(x)) / divisor where `linear` `is_column_parallel`.

    Its weight is a DTensor, sharded over features.
    """
    (lay_out_input,) = linear._forward_pre_hooks.values()
    (lay_out_output,) = linear._forward_hooks.values()
    x = lay_out_input(linear, (x,))
    out = linear_relu_divide(x, linear.weight, linear.bias, divisor)
    if out is NotImplemented:
        out = linear.forward(x).relu() / divisor
    return lay_out_output(linear, (x,), out)
