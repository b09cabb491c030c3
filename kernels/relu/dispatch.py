"""Choose what the ReLU module's forward calls: our operator, or torch's own function."""

from collections.abc import Callable

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import has_torch_function_unary

from kernels.interception import TORCH_RELU, is_dtensor, is_intercepted


def is_relu_intercepted(x: object) -> bool:
    """Return whether the module must call `torch.relu` because other code intercepts that call.

    Dynamo counts as such code. Its graph then holds torch's own op, which Inductor fuses with the
    neighbouring ops.
    """
    if is_dynamo_compiling() or torch.relu is not TORCH_RELU:
        return True
    # `has_torch_function_unary` is false in most calls. It is true if x is of a subclass, and while
    # a function mode is active.
    return has_torch_function_unary(x) and is_intercepted(x)


def relu_slow_path(x: object, relu: Callable) -> object:
    """Compute ReLU where x is not exactly a `torch.Tensor` and the call is not intercepted.

    Args:
        x: a parameter, a `DTensor`, or anything else that `torch.relu` accepts or rejects.
        relu: our operator.
    """
    if type(x) is Parameter:
        return relu(x)
    if is_dtensor(x):
        return _relu_of_dtensor(x, relu)
    return torch.relu(x)


def _relu_of_dtensor(x: object, relu: Callable) -> object:
    """Compute ReLU of a `DTensor`: each process applies our operator to its local tensor.

    The result is sharded as x is. A DTensor of partial sums is summed and replicated first because
    the ReLU of a sum is not the sum of the ReLUs. torch computes ReLU for other placements.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    placements = []
    for placement in x.placements:
        target = Replicate() if type(placement) is Partial else placement
        if type(target) not in (Replicate, Shard):
            return torch.relu(x)
        placements.append(target)
    x = x.redistribute(placements=placements)
    out = relu(x.to_local(grad_placements=placements))
    # If x has gaps, the result has other strides than x.
    whole_out = torch.relu(torch.empty_strided(x.shape, x.stride(), device="meta"))
    return DTensor.from_local(
        out, x.device_mesh, placements, run_check=False, shape=x.shape, stride=whole_out.stride()
    )
