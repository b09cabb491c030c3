"""Calls that are timed beside a module, by name: they show what the device can do."""

import math
from collections.abc import Callable

import torch
from torch import nn

from referee.child.feed import flat_bytes

COPY, COPY_REUSED, COMPILED = "copy", "copy, reused memory", "torch.compile"
PRODUCT, LIBRARY = "product alone", "cuBLASLt epilogue"
THREE = "3 float16 products"  # in one call, concatenated along K: no split, no epilogue
Calls = dict[str, Callable[[list], object]]


def copies(module: nn.Module, inputs: list, size: int) -> Calls:
    """Copies of so many bytes; on a CPU also one that pays the page faults of fresh memory."""
    x = next(x for x in inputs if isinstance(x, torch.Tensor))
    source = flat_bytes(x)[:size]  # of the headline's input there is no room for another
    if len(source) < size:
        source = torch.zeros(size, dtype=torch.uint8, device=x.device)
    target = torch.zeros_like(source)
    if x.is_cuda:
        return {COPY: lambda inputs: target.copy_(source)}
    return {COPY: lambda inputs: source.clone(), COPY_REUSED: lambda inputs: target.copy_(source)}


def compiled(module: nn.Module, inputs: list, size: int) -> Calls:
    """The compiled module. The compiler forgets what it has seen, or it would make one program for
    all shapes, and none after the eighth.
    """
    torch.compiler.reset()
    made = torch.compile(module)
    made(*inputs)
    return {COMPILED: lambda inputs: made(*inputs)}


def product(module: nn.Module, inputs: list, size: int) -> Calls:
    """x weight^T."""
    weight = module.linear.weight.data
    return {PRODUCT: lambda inputs: inputs[0] @ weight.T}


def library(module: nn.Module, inputs: list, size: int) -> Calls:
    """cuBLASLt's epilogue, which is relu(z / divisor)."""
    weight, divisor = module.linear.weight.data, module.divisor
    if not (divisor > 0 and math.frexp(divisor)[0] == 0.5):
        raise ValueError("1 / divisor is not exact")
    bias = module.linear.bias.data / divisor
    calls = {LIBRARY: lambda x: torch._addmm_activation(bias, x[0], weight.T, alpha=1 / divisor)}
    calls[LIBRARY](inputs)
    return calls


def three(module: nn.Module, inputs: list, size: int) -> Calls:
    """Three float16 products in one."""
    if inputs[0].dtype != torch.float32:
        return {}
    operands = inputs[0], module.linear.weight.data
    left, right = (torch.cat([t.half()] * 3, dim=1) for t in operands)
    torch.mm(left, right.T, out_dtype=torch.float32)
    return {THREE: lambda inputs: torch.mm(left, right.T, out_dtype=torch.float32)}


MAKE = {COPY: copies, COMPILED: compiled, PRODUCT: product, LIBRARY: library, THREE: three}
