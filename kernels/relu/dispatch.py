"""What the ReLU module's forward calls: our operator, or torch's own function."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function_unary

from kernels.watchers import PLAIN_TYPES, TORCH_RELU, is_dtensor, is_watched


def is_relu_watched(x: object) -> bool:
    """Return whether other Python code wants to see `torch.relu` called on x.

    A graph that Dynamo traces is such a case: it holds torch's own op, which Inductor fuses with
    its neighbours.
    """
    if is_dynamo_compiling() or torch.relu is not TORCH_RELU:
        return True
    if type(x) is Tensor and not has_torch_function_unary(x):
        return False
    return is_watched(x)


def relu_of_subclass(x: object, relu: Callable) -> object:
    """Compute ReLU of what is no plain `torch.Tensor`, and what nobody watches.

    Args:
        x: a parameter, a `DTensor`, or anything else that `torch.relu` takes or refuses.
        relu: our operator.
    """
    if type(x) in PLAIN_TYPES:
        return relu(x)
    if is_dtensor(x):
        return _relu_of_dtensor(x, relu)
    return torch.relu(x)


def _relu_of_dtensor(x: object, relu: Callable) -> object:
    """Compute each process's part of a `DTensor` by our operator.

    The result is sharded as x is. Partial sums are added up and replicated first, because ReLU of a
    sum is not the sum of ReLUs.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    placements = []
    for placement in x.placements:
        placements.append(Replicate() if type(placement) is Partial else placement)
        if type(placements[-1]) not in (Replicate, Shard):
            return torch.relu(x)
    x = x.redistribute(placements=placements)
    out = relu(x.to_local(grad_placements=placements))
    return DTensor.from_local(
        out, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )
