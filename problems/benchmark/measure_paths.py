"""`paths`: times of each path that can compute a product, for the products of products.py.

A row of the results has the attributes of its `Product`, and:

seconds   the median seconds of each path, by its name
chosen    the path that choose_path takes for the product on this GPU

Each time is that of a whole call of an operator:

forward    linear_relu_divide. On the path "torch" it is a product with bias, and the fused pass.
gradient   linear_relu_divide_gradients, for one gradient. On every path, the fused pass that
           computes grad_z comes before the product.
"""

from collections.abc import Callable
from dataclasses import asdict
from statistics import median

import torch
from torch import Tensor

from problems.benchmark import products
from problems.benchmark.choice import chosen_paths
from problems.benchmark.products import FORWARD_OF_TRANSPOSED_X, GRADIENT_OF_X, Product
from problems.benchmark.rounds import time_in_turn

DIVISOR = 2.0
# Bits of linear_relu_divide_gradients' argument output_mask: which gradients are computed.
GRAD_X = 1
GRAD_WEIGHT = 2


def check_device(device: str) -> None:
    """Raise a ValueError if the device has no paths to compare."""
    if device != "cuda" or not torch.cuda.is_available():
        raise ValueError("paths needs a CUDA GPU of compute capability 9.0, got a CPU")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        raise ValueError(f"paths needs a GPU of compute capability 9.0, got {major}.{minor}")


@torch.no_grad()
def measure_paths(device: str = "cuda") -> list[dict]:
    """Return a row for each product of `products.PRODUCTS`."""
    chosen = chosen_paths(products.PRODUCTS, *_capability_and_multiprocessors())
    precision_before = torch.get_float32_matmul_precision()
    rows = []
    try:
        for product, path in zip(products.PRODUCTS, chosen, strict=True):
            torch.set_float32_matmul_precision(product.precision or precision_before)
            seconds = _time_paths(product, device)
            rows.append({**asdict(product), "seconds": seconds, "chosen": path})
    finally:
        torch.set_float32_matmul_precision(precision_before)
    return rows


def _capability_and_multiprocessors() -> tuple[int, int]:
    """Return the GPU's compute capability times 10, and the number of its multiprocessors."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return 10 * gpu.major + gpu.minor, gpu.multi_processor_count


def _time_paths(product: Product, device: str) -> dict[str, float]:
    """Return the median seconds of each path that can compute the product."""
    from model_new import linear_ops  # builds the kernels

    multiply, operand = _make_call(product, device)

    def call_by(path: str) -> Callable[[Tensor], object]:
        """Return a function that computes the product by a path."""

        def call(operand: Tensor) -> object:
            linear_ops.set_linear_path(path)
            return multiply(operand)

        return call

    try:
        calls = {path: call_by(path) for path in _possible_paths(product)}
        times = time_in_turn(calls, operand)
    finally:
        linear_ops.set_linear_path("auto")
    return {path: median(seconds) for path, seconds in times.items()}


def _possible_paths(product: Product) -> tuple[str, ...]:
    """Return the paths that can compute the product and that choose_path may take for it."""
    if product.is_forward and product.dtype == "float32":
        return ("skinny", "sm90", "torch")
    return ("sm90", "torch")


def _make_call(product: Product, device: str) -> tuple[Callable[[Tensor], object], Tensor]:
    """Return a function that computes the product, and the operand to call it with."""
    from model_new import linear_ops

    m, n, k = product.m, product.n, product.k
    dtype = getattr(torch, product.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).uniform_(-1, 1)

    def draw_mask(rows: int, columns: int) -> Tensor:
        shape = (rows, (columns + 7) // 8)
        return torch.randint(256, shape, dtype=torch.uint8, device=device)

    if product.is_forward:
        x = draw(k, m).t() if product.operation == FORWARD_OF_TRANSPOSED_X else draw(m, k)
        weight = draw(n, k)
        bias = draw(n)

        def forward(x: Tensor) -> Tensor:
            return linear_ops.linear_relu_divide(x, weight, bias, DIVISOR)

        return forward, x

    if product.operation == GRADIENT_OF_X:
        weight = draw(k, n)  # grad_x [m, n] = grad_z [m, k] weight [k, n]
        mask = draw_mask(m, k)

        def gradient_of_x(grad: Tensor) -> tuple[Tensor, ...]:
            return linear_ops.linear_relu_divide_gradients(
                grad, mask, None, weight, GRAD_X, DIVISOR
            )

        return gradient_of_x, draw(m, k)

    x = draw(k, n)  # grad_weight [m, n] = grad_z [k, m]^T x [k, n]
    mask = draw_mask(k, m)

    def gradient_of_weight(grad: Tensor) -> tuple[Tensor, ...]:
        return linear_ops.linear_relu_divide_gradients(grad, mask, x, None, GRAD_WEIGHT, DIVISOR)

    return gradient_of_weight, draw(k, m)
