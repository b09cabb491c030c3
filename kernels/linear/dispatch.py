"""What the forward of Linear -> ReLU -> divide calls: our operator, or the reference's ops."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import Linear, Parameter
from torch.nn.modules import module as global_hooks
from torch.overrides import has_torch_function_variadic

from kernels.watchers import (
    DEVICE_MODES,
    PLAIN_TYPES,
    TRACER_MODES,
    is_dtensor,
    is_linear_replaced,
    is_plain,
    is_watched,
)

Operands = tuple[Tensor, Tensor | None, float]


def operands_unless_watched(module: nn.Module, kind: type, x: object) -> Operands | None:
    """Return weight, bias and divisor of a call that no other Python code wants to see.

    The attributes are read from the modules' dictionaries: `nn.Module`'s own search for `linear`
    and for its parameters takes a third of a small call.

    Args:
        module: a module of this class, or of a subclass.
        kind: `LinearReluDivideNew`. A subclass may find `linear` in another way, and gets None.
        x: what the module's forward was given.

    Returns:
        None where somebody watches, hooks or replaces something, or where an operand is anything
        but a plain tensor; then `linear_of_others` says what to do.
    """
    attributes = module.__dict__
    if type(module) is not kind or "linear" in attributes:
        return None
    linear = attributes["_modules"].get("linear")
    divisor = module.divisor
    if not is_plain_linear(linear):
        return None
    if type(divisor) is not float and not is_number(divisor):  # almost always a float
        return None
    attributes = linear.__dict__
    parameters = attributes["_parameters"]
    weight = parameters.get("weight")
    bias = parameters.get("bias", NotImplemented)  # None means that there is no bias to add
    if (
        type(x) is Tensor
        and type(weight) is Parameter
        and (bias is None or type(bias) is Parameter)
        and "weight" not in attributes  # an attribute of the instance hides the parameter
        and "bias" not in attributes
        and not has_torch_function_variadic(x, weight, bias)
    ):
        return weight, bias, divisor
    return None


def is_plain_linear(linear: object) -> bool:
    """Return whether calling `linear` does nothing but x weight^T + bias.

    It does more where there are hooks, which tensor parallelism and pruning use, where the module
    has another `forward`, where a wrapper (quantized, low-rank, parametrized) has taken its place,
    and where other code has replaced the functions by which torch calls it.
    """
    if type(linear) is not Linear:
        return False
    attributes = linear.__dict__
    return not (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or global_hooks._global_forward_hooks
        or global_hooks._global_forward_pre_hooks
        or global_hooks._global_backward_hooks
        or global_hooks._global_backward_pre_hooks
        or "forward" in attributes
        or "_call_impl" in attributes
        or "_compiled_call_impl" in attributes
        or type(attributes["_parameters"]) is not dict
        or is_linear_replaced()
    )


def is_number(divisor: object) -> bool:
    """Return whether the operator takes the divisor as torch would.

    The operator takes a float. An int becomes one without rounding below 2^53.
    """
    return type(divisor) is float or (type(divisor) is int and abs(divisor) < 2**53)


def linear_of_others(
    module: nn.Module, x: object, operator: Callable, exported: Callable
) -> object:
    """Compute the module's forward where `operands_unless_watched` returns None.

    The kernels still compute it for parameters given as x, for tensors by which torch traces, and
    for DTensors. Everything else goes through the reference's own ops.

    Args:
        module: a `LinearReluDivideNew`.
        x: what its forward was given.
        operator: our operator, under the name of this build.
        exported: the same under the stable name, which saved programs hold.
    """
    linear = module.linear
    unconcerned = DEVICE_MODES + TRACER_MODES
    # A tracer such as FX's would record that the parameters are read: x is asked about first.
    if (
        not is_plain_linear(linear)
        or not is_number(module.divisor)
        or is_watched(x, unconcerned=unconcerned)
    ):
        return _reference(module, x)
    weight, bias = linear.weight, linear.bias
    operands = [x, weight] if bias is None else [x, weight, bias]
    if is_watched(*operands, unconcerned=unconcerned):
        return _reference(module, x)
    if all(is_plain(operand) for operand in operands):
        if torch.compiler.is_exporting():
            operator = exported
        return operator(x, weight, bias, module.divisor)
    if all(is_dtensor(operand) for operand in operands):
        placements = placements_of(x, weight, bias)
        if placements is not None:
            return _linear_of_dtensors(x, weight, bias, module.divisor, placements, operator)
    return _reference(module, x)


def linear_in_graph(module: nn.Module, x: Tensor, operator: Callable, exported: Callable) -> Tensor:
    """Compute the module's forward as Dynamo traces it.

    A divisor that changed between calls is a symbol in the graph. The operator takes numbers only,
    so the graph would be compiled anew for each: the division is left to torch then.
    """
    from torch.fx.experimental.symbolic_shapes import has_static_value

    linear, divisor = module.linear, module.divisor
    if not (
        is_plain_linear(linear)
        and type(divisor) in (float, int)
        and type(x) in PLAIN_TYPES
        and type(linear.weight) in PLAIN_TYPES
        and type(linear.bias) in (*PLAIN_TYPES, type(None))
    ):
        return _reference(module, x)
    if torch.compiler.is_exporting():
        operator = exported
    if has_static_value(divisor):
        return operator(x, linear.weight, linear.bias, divisor)
    return operator(x, linear.weight, linear.bias, 1.0) / divisor


def _reference(module: nn.Module, x: object) -> object:
    """Compute the module's forward as the reference does.

    The divisor is read last, because a hook on `linear` may change it.
    """
    return torch.relu(module.linear(x)) / module.divisor


def placements_of(x: object, weight: object, bias: object = None) -> list[tuple] | None:
    """Return how gradients and the result of DTensors are placed, for each dimension of the mesh.

    Args:
        x: a DTensor `[..., K]`.
        weight: a DTensor `[N, K]`.
        bias: a DTensor `[N]`, or None.

    Returns:
        For each mesh dimension the placements of x's gradient, of weight's gradient and of the
        result. None if a process cannot compute its part of the result alone: it can if x is
        replicated or sharded over rows, and weight and bias are replicated or sharded over
        features, not both sharded at once.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if bias is not None and bias.placements != weight.placements:
        return None
    replicated, by_features, last = Replicate(), Shard(0), x.ndim - 1
    placements = []
    for of_x, of_weight in zip(x.placements, weight.placements, strict=True):
        is_by_rows = type(of_x) is Shard and of_x.dim < last
        if of_x == replicated and of_weight == replicated:
            placements.append((replicated, replicated, replicated))
        elif of_x == replicated and of_weight == by_features:
            placements.append((Partial(), by_features, Shard(last)))
        elif is_by_rows and of_weight == replicated:
            placements.append((of_x, Partial(), of_x))
        else:
            return None
    return placements


def _linear_of_dtensors(
    x: object,
    weight: object,
    bias: object | None,
    divisor: float,
    placements: list[tuple],
    operator: Callable,
) -> object:
    """Compute each process's part of the result from its parts of the operands."""
    from torch.distributed.tensor import DTensor

    grad_x, grad_weight, of_out = map(list, zip(*placements, strict=True))
    local_bias = None
    if bias is not None:
        local_bias = bias.to_local(grad_placements=grad_weight)
    local_out = operator(
        x.to_local(grad_placements=grad_x),
        weight.to_local(grad_placements=grad_weight),
        local_bias,
        divisor,
    )
    shape = (*x.shape[:-1], weight.shape[0])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local_out, x.device_mesh, of_out, run_check=False, shape=torch.Size(shape), stride=stride
    )
