"""Choose what the forward of Linear -> ReLU -> divide calls: our operator or torch's ops."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Linear, Parameter
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.overrides import has_torch_function_variadic

from kernels.interception import (
    DEVICE_MODE_PREFIXES,
    PLAIN_TYPES,
    TRACER_MODE_PREFIXES,
    is_dtensor,
    is_intercepted,
    is_plain_or_fake,
    is_reference_function_replaced,
)

Operands = tuple[Tensor, Tensor | None, float]


def operands_unless_intercepted(
    module: nn.Module, expected_class: type, x: object
) -> Operands | None:
    """Return weight, bias and divisor of a call that no other Python code intercepts.

    This is the fast path of most calls. It reads `linear` and its parameters from the modules'
    dictionaries because `nn.Module.__getattr__` would take a third of a small call's time. If a
    module's `__dict__` has an attribute that hides `linear` or a parameter, the result is None.

    Args:
        module: the `LinearReluDivideNew` that is called, or an object of a subclass.
        expected_class: `LinearReluDivideNew`. A subclass may redefine how `linear` is found, so for
            its objects this function returns None.
        x: the input of the module's forward.

    Returns:
        None if other code intercepts the call, if x is not exactly a `Tensor`, if weight or a bias
        is not exactly a `Parameter`, or if the divisor is not exact as a float. Then the caller
        uses `linear_slow_path`.
    """
    attributes = module.__dict__
    if type(module) is not expected_class or "linear" in attributes:
        return None
    linear = attributes["_modules"].get("linear")
    divisor = module.divisor
    if not is_plain_linear(linear):
        return None
    # Almost every divisor is a float, for which the first condition saves a function call.
    if type(divisor) is not float and not is_exact_as_float(divisor):
        return None
    linear_attributes = linear.__dict__
    parameters = linear_attributes["_parameters"]
    weight = parameters.get("weight")
    # An `nn.Linear(bias=False)` has the entry None. Without an entry, bias becomes NotImplemented,
    # which is neither None nor a parameter, so this function returns None.
    bias = parameters.get("bias", NotImplemented)
    if (
        type(x) is Tensor
        and type(weight) is Parameter
        and (bias is None or type(bias) is Parameter)
        and "weight" not in linear_attributes
        and "bias" not in linear_attributes
        and not has_torch_function_variadic(x, weight, bias)
    ):
        return weight, bias, divisor
    return None


def is_plain_linear(linear: object) -> bool:
    """Return whether our operator may replace the call of `linear`, and the ops that follow it.

    It may if `linear` computes x weight^T + bias and nothing else. It may not in these cases:

    * `linear`, or all modules, have hooks. Tensor parallelism and pruning use hooks.
    * `linear` has a `forward` or `_call_impl` of its own, or was compiled by `nn.Module.compile`.
    * A module of another class has taken its place: quantized, low-rank or parametrized.
    * The dictionary of its parameters is of another class. DeepSpeed's ZeRO-3 does that to collect
      parameters that are spread over processes.
    * Other code has replaced `torch.relu`, the division, or a function through which torch calls
      `linear`.
    """
    if type(linear) is not Linear:
        return False
    attributes = linear.__dict__
    return not (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
        or "forward" in attributes
        or "_call_impl" in attributes
        or "_compiled_call_impl" in attributes
        or type(attributes["_parameters"]) is not dict
        or is_reference_function_replaced()
    )


def is_exact_as_float(divisor: object) -> bool:
    """Return whether the operator, which takes the divisor as a float, gets exactly this number.

    An int below 2^53 converts to a float without rounding. torch itself has to divide by larger
    ints and by anything else, such as a tensor.
    """
    return type(divisor) is float or (type(divisor) is int and abs(divisor) < 2**53)


def linear_slow_path(
    module: nn.Module, x: object, operator: Callable, stable_operator: Callable
) -> object:
    """Compute the module's forward where `operands_unless_intercepted` returns None.

    If `_may_call_operator` is true, our operator still computes it in two cases:

    * All operands are plain or fake tensors. For example, x is a parameter.
    * All operands are DTensors, and each process can compute its part of the result alone.

    Everything else goes through the reference's own ops.

    Args:
        module: a `LinearReluDivideNew`, or an object of a subclass.
        x: the input of its forward.
        operator: our operator, in the namespace of this build.
        stable_operator: the same operator in the stable namespace, for programs that are saved.
    """
    if not _may_call_operator(module, x):
        return _reference_forward(module, x)
    linear = module.linear
    weight = linear.weight
    bias = linear.bias
    operands = [x, weight] if bias is None else [x, weight, bias]
    if all(is_plain_or_fake(operand) for operand in operands):
        if torch.compiler.is_exporting():
            operator = stable_operator
        return operator(x, weight, bias, module.divisor)
    if all(is_dtensor(operand) for operand in operands):
        placements = _placements_if_local(x, weight, bias)
        if placements is not None:
            return _linear_of_dtensors(x, linear, module.divisor, placements, operator)
    return _reference_forward(module, x)


def _may_call_operator(module: nn.Module, x: object) -> bool:
    """Return whether our operator may replace torch's calls in the module's forward."""
    linear = module.linear
    ignored_modes = DEVICE_MODE_PREFIXES + TRACER_MODE_PREFIXES
    # x is checked before the parameters are read: if x is a proxy of `torch.fx.symbolic_trace`, the
    # reads would be recorded in its graph.
    return (
        is_plain_linear(linear)
        and is_exact_as_float(module.divisor)
        and not is_intercepted(x, ignored_modes=ignored_modes)
        and not is_intercepted(linear.weight, linear.bias, ignored_modes=ignored_modes)
    )


def linear_in_graph(
    module: nn.Module, x: Tensor, operator: Callable, stable_operator: Callable
) -> Tensor:
    """Compute the module's forward while Dynamo traces it into a graph.

    Once a divisor has changed between calls, Dynamo makes it a symbol. The operator takes numbers
    only, so Dynamo would have to compile the graph again for each value of the divisor. Instead the
    operator divides by 1, and torch's own division follows.

    Args:
        module: a `LinearReluDivideNew`, or an object of a subclass.
        x: the input of its forward.
        operator: our operator, in the namespace of this build.
        stable_operator: the same operator in the stable namespace, for programs that are saved.
    """
    from torch.fx.experimental.symbolic_shapes import has_static_value

    linear = module.linear
    divisor = module.divisor
    if not (
        is_plain_linear(linear)
        and is_exact_as_float(divisor)
        and type(x) in PLAIN_TYPES
        and type(linear.weight) in PLAIN_TYPES
        and type(linear.bias) in (*PLAIN_TYPES, type(None))
    ):
        return _reference_forward(module, x)
    # In torch 2.9 to 2.11, Dynamo traces `torch.compiler.is_exporting()` as True in every graph.
    if torch.compiler._is_exporting_flag:
        operator = stable_operator
    if has_static_value(divisor):
        return operator(x, linear.weight, linear.bias, divisor)
    return operator(x, linear.weight, linear.bias, 1.0) / divisor


def _reference_forward(module: nn.Module, x: object) -> object:
    """Compute the module's forward by the torch ops that the reference calls.

    The divisor is read last because a hook on `linear` may change it.
    """
    return torch.relu(module.linear(x)) / module.divisor


@dataclass(frozen=True)
class _Placements:
    """The placements of a call's result and gradients, which are DTensors.

    Each list has one placement for each dimension of the device mesh.

    Attributes:
        grad_x: of the gradient of x.
        grad_weight: of the gradients of weight and bias.
        out: of the result.
    """

    grad_x: list
    grad_weight: list
    out: list


def _placements_if_local(x: object, weight: object, bias: object | None) -> _Placements | None:
    """Return the placements of gradients and result if each process can compute its part alone.

    Each process can compute its part alone in the cases of this table. M stands for any dimension
    of x but the last. Each dimension of the device mesh may be in a different case.

        x               weight, bias    gradient of x   gradients of    result
                                                        weight, bias
        replicated      replicated      replicated      replicated      replicated
        replicated      sharded over N  partial sums    sharded over N  sharded over N
        sharded over M  replicated      sharded over M  partial sums    sharded over M

    Args:
        x: a DTensor `[..., K]`.
        weight: a DTensor `[N, K]`.
        bias: a DTensor `[N]`, or None.

    Returns:
        The placements; None in all other cases.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if x.device_mesh != weight.device_mesh:
        return None
    if bias is not None and bias.device_mesh != weight.device_mesh:
        return None
    if bias is not None and bias.placements != weight.placements:
        return None
    replicated = Replicate()
    sharded_over_n = Shard(0)  # dimension 0 of weight and of bias
    last_dimension = x.ndim - 1  # dimension K of x, and dimension N of the result
    grad_x = []
    grad_weight = []
    out = []
    for x_placement, weight_placement in zip(x.placements, weight.placements, strict=True):
        is_sharded_over_m = type(x_placement) is Shard and x_placement.dim < last_dimension
        if x_placement == replicated and weight_placement == replicated:
            grad_x.append(replicated)
            grad_weight.append(replicated)
            out.append(replicated)
        elif x_placement == replicated and weight_placement == sharded_over_n:
            grad_x.append(Partial())
            grad_weight.append(sharded_over_n)
            out.append(Shard(last_dimension))
        elif is_sharded_over_m and weight_placement == replicated:
            grad_x.append(x_placement)
            grad_weight.append(Partial())
            out.append(x_placement)
        else:
            return None
    return _Placements(grad_x, grad_weight, out)


class _LocalTensor(torch.autograd.Function):
    """The local tensor of a DTensor, whose gradient can be differentiated again.

    The gradient of `DTensor.to_local` cannot be differentiated before torch 2.13.
    """

    @staticmethod
    def forward(ctx: object, x: object, grad_placements: list) -> Tensor:
        """Return the local tensor of x, a DTensor whose gradient will have `grad_placements`."""
        ctx.mesh = x.device_mesh
        ctx.grad_placements = grad_placements
        ctx.shape = x.shape
        ctx.stride = x.stride()
        local = x.to_local()
        # autograd sets the grad_fn of the returned tensor. x's own local tensor must not get one.
        # So a view of it is returned.
        return local.view_as(local)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[object, None]:
        """Return the gradient of x as a DTensor, and None for `grad_placements`."""
        from torch.distributed.tensor import DTensor

        grad_x = DTensor.from_local(
            grad,
            ctx.mesh,
            ctx.grad_placements,
            run_check=False,
            shape=ctx.shape,
            stride=ctx.stride,
        )
        return grad_x, None


def _linear_of_dtensors(
    x: object, linear: Linear, divisor: float, placements: _Placements, operator: Callable
) -> object:
    """Compute the forward of DTensors: each process computes its part from its local tensors.

    Args:
        x: a DTensor `[..., K]`.
        linear: the `nn.Linear`, whose weight `[N, K]` and bias `[N]` are DTensors.
        divisor: the divisor.
        placements: the result of `_placements_if_local` for x, weight and bias.
        operator: our operator.
    """
    from torch.distributed.tensor import DTensor

    local_x = _LocalTensor.apply(x, placements.grad_x)
    local_weight = _LocalTensor.apply(linear.weight, placements.grad_weight)
    local_bias = None
    if linear.bias is not None:
        local_bias = _LocalTensor.apply(linear.bias, placements.grad_weight)
    local_out = operator(local_x, local_weight, local_bias, divisor)
    shape = (*x.shape[:-1], linear.weight.shape[0])
    dense_stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local_out,
        x.device_mesh,
        placements.out,
        run_check=False,
        shape=torch.Size(shape),
        stride=dense_stride,
    )
