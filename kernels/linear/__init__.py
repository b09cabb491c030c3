"""Linear -> ReLU -> divide."""

import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder

import torch
from torch import nn
from torch.nn import functional

from kernels.watchers import DEVICE, PLAIN, TRACERS, is_dtensor, is_plain, is_watched

FLOP_COUNTER = "torch.utils.flop_counter"

_modules = nn.modules.module
_forward, _linear, _relu = nn.Linear.forward, functional.linear, torch.relu


def is_plain_linear(linear: nn.Module) -> bool:
    """Whether calling `linear` does nothing but the product of its weight and the sum of its bias.

    Not so with hooks, which tensor parallelism and pruning use, with another `forward`, or where a
    wrapper (quantized, low-rank, parametrized) has taken its place: these must be called. Nor where
    somebody has put a function of their own in the place of torch's.
    """
    if type(linear) is not nn.Linear:
        return False
    own = linear.__dict__
    return not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or _modules._global_forward_hooks
        or _modules._global_forward_pre_hooks
        or _modules._global_backward_hooks
        or _modules._global_backward_pre_hooks
        or "forward" in own
        or "_call_impl" in own
        or "_compiled_call_impl" in own
        or type(own["_parameters"]) is not dict
        or nn.Linear.forward is not _forward
        or functional.linear is not _linear
        or torch.relu is not _relu
    )


def is_number(divisor: object) -> bool:
    """Whether the operator takes the divisor as torch would: a float, or an int that is one."""
    return type(divisor) is float or (type(divisor) is int and abs(divisor) < 2**53)


class FlopFormulas:
    """Registers the formulas when somebody imports torch's counter. Importing it here would import
    Triton, which takes longer than all else in a warm start."""

    def find_spec(self, name: str, path: list | None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == FLOP_COUNTER else None
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), register_flops())
        return spec


def register_flops() -> None:
    """Tells torch's counter what the operators' products take, now and when it is imported."""
    if not any(isinstance(finder, FlopFormulas) for finder in sys.meta_path):
        sys.meta_path.insert(0, FlopFormulas())
    if FLOP_COUNTER not in sys.modules:
        return
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    operators = torch.ops.relu_divide_kernels
    if operators.linear_relu_divide in flop_registry:  # by another copy of this module
        return

    @register_flop_formula([operators.linear_relu_divide, operators.linear_relu_divide_with_mask])
    def _forward(x: tuple, weight: tuple, *_: object, **__: object) -> int:
        return 2 * math.prod(x) * weight[0]

    @register_flop_formula(operators.linear_relu_divide_gradients)
    def _backward(
        grad: tuple, _: tuple, x: tuple, weight: tuple, *__: object, **___: object
    ) -> int:
        return 2 * math.prod(grad) * sum(operand[-1] for operand in (x, weight) if operand)


def linear_of_others(
    linear: nn.Linear, x: object, divisor: float, linear_relu_divide: Callable
) -> object:
    """Of operands that are no plain tensors, or where somebody watches: the reference, but for
    DTensors."""
    blind = DEVICE + TRACERS
    if is_watched(x, blind=blind):  # FX's would record the reading of the parameters
        return torch.relu(linear(x)) / divisor
    operands = [x, linear.weight] + ([] if linear.bias is None else [linear.bias])
    if not is_watched(*operands, blind=blind):
        if all(is_plain(t) for t in operands):
            return linear_relu_divide(x, linear.weight, linear.bias, divisor)
        if all(is_dtensor(t) for t in operands):
            placements = placements_of(*operands)
            if placements is not None:
                return linear_of_shards(operands, placements, divisor, linear_relu_divide)
    return torch.relu(linear(x)) / divisor


def linear_in_graph(
    module: nn.Module, x: torch.Tensor, linear_relu_divide: Callable
) -> torch.Tensor:
    """The module's forward as Dynamo traces it.

    A divisor that changed between calls is a symbol there. The operator takes numbers only, so the
    graph would be compiled anew for each: its division is left to torch.
    """
    from torch.fx.experimental.symbolic_shapes import has_static_value

    linear, divisor = module.linear, module.divisor
    if not (
        is_plain_linear(linear)
        and type(divisor) in (float, int)
        and type(x) in PLAIN
        and type(linear.weight) in PLAIN
        and type(linear.bias) in (*PLAIN, type(None))
    ):
        return torch.relu(linear(x)) / module.divisor
    if has_static_value(divisor):
        return linear_relu_divide(x, linear.weight, linear.bias, divisor)
    return linear_relu_divide(x, linear.weight, linear.bias, 1.0) / divisor


def placements_of(x: object, weight: object, bias: object = None) -> list[tuple] | None:
    """For each dimension of the mesh, the placements of x's gradient, the weight's and the result.

    None if no process can make its part of the result alone: x is then neither replicated nor
    sharded over rows, or weight and bias are neither replicated nor sharded over features.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if bias is not None and bias.placements != weight.placements:
        return None
    replicated, features, last = Replicate(), Shard(0), x.ndim - 1
    placements = []
    for of_x, of_weight in zip(x.placements, weight.placements, strict=True):
        if of_x == replicated == of_weight:
            placements.append((replicated, replicated, replicated))
        elif of_x == replicated and of_weight == features:
            placements.append((Partial(), features, Shard(last)))
        elif type(of_x) is Shard and of_x.dim < last and of_weight == replicated:
            placements.append((of_x, Partial(), of_x))
        else:
            return None
    return placements


def linear_of_shards(
    operands: list, placements: list[tuple], divisor: float, linear_relu_divide: Callable
) -> object:
    """Each process makes its part of the result from its parts of the operands."""
    from torch.distributed.tensor import DTensor

    grad_x, grad_weight, of_out = map(list, zip(*placements, strict=True))
    x, weight, *bias = operands
    local = linear_relu_divide(
        x.to_local(grad_placements=grad_x),
        weight.to_local(grad_placements=grad_weight),
        bias[0].to_local(grad_placements=grad_weight) if bias else None,
        divisor,
    )
    shape = (*x.shape[:-1], weight.shape[0])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, x.device_mesh, of_out, run_check=False, shape=torch.Size(shape), stride=stride
    )
