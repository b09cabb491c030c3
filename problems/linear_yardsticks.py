"""Products that are timed beside the linear module, in eager's process."""

import math
from collections.abc import Callable

import torch
from torch import nn

PRODUCT, LIBRARY = "product alone", "cuBLASLt epilogue"
TRITON = "Triton tf32x3"  # the product alone, as accurate as float32
THREE = "3 float16 products"  # in one call, concatenated along K: no split, no epilogue


def yardstick(name: str, module: nn.Module, inputs: list) -> Callable[..., object] | None:
    """Return a call that takes the module's arguments; None where it is not for the dtype.

    Raises:
        ValueError: the divisor is none that the library's epilogue can apply.
    """
    weight, divisor = module.linear.weight, module.divisor
    if name == PRODUCT:
        return lambda x: x @ weight.T
    if name == LIBRARY:  # relu(z / divisor)
        if not (divisor > 0 and math.frexp(divisor)[0] == 0.5):
            raise ValueError("1 / divisor is not exact")
        bias, scale = module.linear.bias, 1 / divisor
        # The bias is divided outside of the timed call; its values do not matter to the time.
        divided = (bias / divisor).detach()
        return lambda x: torch._addmm_activation(divided, x, weight.T, alpha=scale)
    if inputs[0].dtype != torch.float32:
        return None
    if name == TRITON:
        return _triton_product(weight)
    left, right = (torch.cat([t.detach().half()] * 3, dim=1) for t in (inputs[0], weight))
    return lambda x: torch.mm(left, right.T, out_dtype=torch.float32)


def _triton_product(weight: torch.Tensor) -> Callable[..., object] | None:
    """Return Triton's product of three TF32 products; None where eager may use TF32 itself."""
    if torch.get_float32_matmul_precision() != "highest":
        return None
    from problems.triton_tf32x3 import product

    return lambda x: product(x, weight)
