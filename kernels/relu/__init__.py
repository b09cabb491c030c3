"""ReLU."""

from collections.abc import Callable

import torch

from kernels.watchers import PLAIN, is_dtensor, is_watched

_torch_relu = torch.relu


def relu_of_others(x: object, relu: Callable) -> object:
    """ReLU of what is no plain tensor, or where somebody watches: torch's own, but for DTensors."""
    if torch.relu is not _torch_relu or is_watched(x):
        return torch.relu(x)
    if type(x) in PLAIN:
        return relu(x)
    return relu_of_shards(x, relu) if is_dtensor(x) else torch.relu(x)


def relu_of_shards(x: object, relu: Callable) -> object:
    """ReLU of a DTensor: sharded as it comes, replicated where sums are due before."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    placements = [Replicate() if type(p) is Partial else p for p in x.placements]
    if any(type(p) not in (Replicate, Shard) for p in placements):
        return torch.relu(x)
    x = x.redistribute(placements=placements)
    out = relu(x.to_local(grad_placements=placements))
    return DTensor.from_local(
        out, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )
