"""Calls that are timed beside a module, by name: they show what the device can do."""

import math
from collections.abc import Callable

import torch
from torch import nn

from referee.child.feed import flat_bytes

COPY, COPY_REUSED, COMPILED = "copy", "copy, reused memory", "torch.compile"
PRODUCT, LIBRARY = "product alone", "cuBLASLt epilogue"
THREE = "3 float16 products"  # in one call, concatenated along K: no split, no epilogue
TRITON = "Triton tf32x3"  # as accurate as float32; no epilogue
Calls = dict[str, Callable[[list], object]]


def make(name: str, module: nn.Module, inputs: list, size: int) -> Calls:
    """The calls of a yardstick; none where it is not for the dtype. Copies are of `size` bytes."""
    if name == COPY:
        return _copies(next(x for x in inputs if isinstance(x, torch.Tensor)), size)
    if name == COMPILED:
        # The compiler forgets what it has seen, or it would make one program for all shapes, and
        # none after the eighth.
        torch.compiler.reset()
        made = torch.compile(module)
        calls = {name: lambda inputs: made(*inputs)}
    else:
        weight, divisor = module.linear.weight.data, module.divisor
        if name == PRODUCT:
            return {name: lambda inputs: inputs[0] @ weight.T}
        if name == LIBRARY:  # relu(z / divisor)
            if not (divisor > 0 and math.frexp(divisor)[0] == 0.5):
                raise ValueError("1 / divisor is not exact")
            bias, scale = module.linear.bias.data / divisor, 1 / divisor
            calls = {name: lambda x: torch._addmm_activation(bias, x[0], weight.T, alpha=scale)}
        elif inputs[0].dtype != torch.float32:
            return {}
        elif name == TRITON:
            if torch.get_float32_matmul_precision() != "highest":
                return {}
            from referee.child import triton_tf32x3  # Triton is there where torch has CUDA

            calls = {name: lambda inputs: triton_tf32x3.product(inputs[0], weight)}
        else:
            left, right = (torch.cat([t.half()] * 3, dim=1) for t in (inputs[0], weight))
            calls = {name: lambda inputs: torch.mm(left, right.T, out_dtype=torch.float32)}
    calls[name](inputs)
    return calls


def _copies(x: torch.Tensor, size: int) -> Calls:
    """On a CPU also one that pays the page faults of fresh memory."""
    source = flat_bytes(x)[:size]  # of the headline's input there is no room for another
    if len(source) < size:
        source = torch.zeros(size, dtype=torch.uint8, device=x.device)
    target = torch.zeros_like(source)
    if x.is_cuda:
        return {COPY: lambda inputs: target.copy_(source)}
    return {COPY: lambda inputs: source.clone(), COPY_REUSED: lambda inputs: target.copy_(source)}
