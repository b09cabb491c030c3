"""Linear -> ReLU -> divide of tensor subclasses, DTensor among them, and under modes."""

import functools
from collections.abc import Iterator
from types import ModuleType

import torch
from torch._subclasses.fake_tensor import FakeTensor

# bundle: skip
from kernels.binding.subclasses import PLAIN, is_dtensor

# bundle: end


def serve_linear(extension: ModuleType) -> None:
    """Tells the extension what to call for such tensors: the operators, which they can intercept.

    NotImplemented leaves the product to the module's own `linear`.
    """
    operators = extension.operators
    shard = functools.cache(register_linear_sharding)

    def multiplies_shards(x: object, weight: object, bias: object) -> bool:
        shard(operators)
        return is_product_of_shards(x, weight, bias)

    def linear_relu_divide(x: object, weight: object, bias: object, divisor: object) -> object:
        tensors = (x, weight) if bias is None else (x, weight, bias)
        if is_dtensor(x) or is_dtensor(weight):
            if not multiplies_shards(x, weight, bias):
                return NotImplemented
        elif any(type(tensor) not in (*PLAIN, FakeTensor) for tensor in tensors):
            return NotImplemented
        return operators.linear_relu_divide.default(x, weight, bias, divisor)

    def linear_relu_divide_in_graph(
        x: object, weight: object, bias: object, divisor: object
    ) -> object:
        """Stands for the extension's linear_relu_divide in graphs that Dynamo traces.

        A divisor that changed between calls is a symbol there. The operator takes numbers only, so
        the graph would be compiled anew for each: its division is left to torch.
        """
        from torch.fx.experimental.symbolic_shapes import has_static_value

        if type(divisor) not in (float, int):
            return NotImplemented
        tensors = (x, weight) if bias is None else (x, weight, bias)
        is_sharded = all(is_dtensor(tensor) for tensor in tensors)  # C++ asks how
        if not is_sharded and any(type(tensor) not in PLAIN for tensor in tensors):
            return NotImplemented
        operator = operators.linear_relu_divide.default
        if has_static_value(divisor):
            return operator(x, weight, bias, divisor)
        return operator(x, weight, bias, 1.0) / divisor

    extension.linear_of_subclasses = linear_relu_divide
    extension.is_product_of_shards = multiplies_shards
    extension.linear_relu_divide_in_graph = linear_relu_divide_in_graph


def is_product_of_shards(x: object, weight: object, bias: object) -> bool:
    """Whether all are DTensors of which each process can make its part of the result alone.

    x is then replicated or sharded over rows, weight and bias are replicated or sharded over
    features. All other shards of a product are summed before ReLU.
    """
    if not (is_dtensor(x) and is_dtensor(weight) and (bias is None or is_dtensor(bias))):
        return False
    like_weight = weight.placements
    shards_features = are_placements_of_a_product(x.placements, x.ndim, like_weight)
    return (
        shards_features is not None
        and (bias is None or bias.placements == like_weight)
        and (not shards_features or has_whole_bytes(weight.shape[0], x.device_mesh))
    )


@functools.lru_cache  # asked twice in a call
def are_placements_of_a_product(x: tuple, ndim: int, weight: tuple) -> bool | None:
    """Whether the weight is sharded over features; None if no process can make its part alone."""
    from torch.distributed.tensor import Replicate, Shard

    if (
        any(type(placement) not in (Replicate, Shard) for placement in (*x, *weight))
        or Shard(ndim - 1) in x
        or Shard(1) in weight
    ):
        return None
    return Shard(0) in weight


def has_whole_bytes(features: int, mesh: object) -> bool:
    """Whether a shard of the mask, which has a bit a feature, is the mask of a shard."""
    return features % (8 * mesh.size()) == 0


def register_linear_sharding(operators: torch._ops._OpNamespace) -> None:
    """Linear -> ReLU -> divide of DTensors: replicated, sharded over rows, or over features."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def ways(like_x: object, features: int) -> Iterator[tuple]:
        """The placements of x, weight, out, and of the gradients of the first two.

        Those of bias are weight's. Those of mask are out's.
        """
        last = like_x.ndim - 1
        yield Replicate(), Replicate(), Replicate(), Replicate(), Replicate()
        for row in map(Shard, range(last)):
            yield row, Replicate(), row, row, Partial()
        if has_whole_bytes(features, like_x.mesh):
            yield Replicate(), Shard(0), Shard(last), Partial(), Shard(0)

    def inputs(*pairs: tuple) -> list:
        return [None if tensor is None else placement for tensor, placement in pairs]

    @register_sharding(operators.linear_relu_divide.default)
    def forward(x: object, weight: object, bias: object, divisor: float) -> list:
        return [
            ([out], [*inputs((x, xs), (weight, ws), (bias, ws)), None])
            for xs, ws, out, _, _ in ways(x, weight.shape[0])
        ]

    @register_sharding(operators.linear_relu_divide_with_mask.default)
    def forward_with_mask(x: object, weight: object, bias: object, divisor: float) -> list:
        return [(out * 2, placements) for out, placements in forward(x, weight, bias, divisor)]

    @register_sharding(operators.linear_relu_divide_gradients.default)
    def gradients(
        grad: object, mask: object, x: object, weight: object, output_mask: int, divisor: float
    ) -> list:
        return [
            ([gx, gw, gw], [out, out, *inputs((x, xs), (weight, ws)), None, None])
            for xs, ws, out, gx, gw in ways(grad, grad.shape[-1])
        ]

    @register_sharding(operators.linear_relu_divide_backward.default)
    def backward(grad: object, mask: object, divisor: float, wants_bias: bool) -> list:
        return [
            ([out, gw], [out, out, None, None]) for _, _, out, _, gw in ways(grad, grad.shape[-1])
        ]
