"""Products that are timed beside the linear module, in eager's process."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

# The names of the yardsticks.
PRODUCT = "product alone"  # torch's product, without bias, ReLU and division
LIBRARY = "cuBLASLt epilogue"  # the product with bias and ReLU, fused by cuBLASLt
TRITON = "Triton tf32x3"  # the product alone, as accurate as float32
# One product of float16 operands that are concatenated three times along K: the arithmetic of an
# fp16x3 kernel, without the split and without an epilogue.
THREE_PRODUCTS = "3 float16 products"

Yardstick = Callable[[Tensor], object]


def yardstick(name: str, module: nn.Module, inputs: list) -> Yardstick | None:
    """Return a yardstick: a function that is called with the module's input.

    Args:
        name: the yardstick's name.
        module: the reference, whose parameters the yardstick multiplies.
        inputs: the inputs of the module's forward.

    Returns:
        The function; None if there is no such yardstick for the dtype or the precision setting.

    Raises:
        ValueError: the name is LIBRARY, and the divisor is no power of two above 0.
    """
    [x] = inputs
    weight = module.linear.weight
    if name == PRODUCT:
        return lambda x: x @ weight.T
    if name == LIBRARY:
        return _library_call(module)
    if x.dtype != torch.float32:
        return None
    if name == TRITON:
        return _triton_product(weight)
    return _three_products(x, weight)


def _library_call(module: nn.Module) -> Yardstick:
    """Return cuBLASLt's product with an epilogue, relu(x weight^T / divisor + bias / divisor)."""
    weight = module.linear.weight
    divisor = module.divisor
    is_power_of_two = divisor > 0 and math.frexp(divisor)[0] == 0.5
    if not is_power_of_two:
        raise ValueError("1 / divisor is not exact")
    scale = 1 / divisor
    # The bias is divided outside of the timed call; its values do not matter to the time.
    divided_bias = (module.linear.bias / divisor).detach()
    return lambda x: torch._addmm_activation(divided_bias, x, weight.T, alpha=scale)


def _triton_product(weight: Tensor) -> Yardstick | None:
    """Return Triton's product of three TF32 products; None where eager may use TF32 itself."""
    if torch.get_float32_matmul_precision() != "highest":
        return None
    from problems.triton_tf32x3 import product

    return lambda x: product(x, weight)


def _three_products(x: Tensor, weight: Tensor) -> Yardstick:
    """Return the product for THREE_PRODUCTS.

    It ignores its argument, because x is converted here, outside of the timed call.
    """
    x_three_times = torch.cat([x.detach().half()] * 3, dim=1)
    weight_three_times = torch.cat([weight.detach().half()] * 3, dim=1)
    return lambda _: torch.mm(x_three_times, weight_three_times.T, out_dtype=torch.float32)
