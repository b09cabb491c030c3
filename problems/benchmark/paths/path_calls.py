"""Calls that compute a product on a path of one's choice, for `paths` and `path-grid`.

A call is that of a whole operator:

forward    linear_relu_divide. On the path "torch" it is a product with bias, and the fused pass.
gradient   linear_relu_divide_gradients, for one gradient. On every path, the fused pass that
           computes grad_z comes before the product.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from problems.benchmark.paths.choice import Gpu
from problems.benchmark.paths.kernel_paths import KERNEL_PATHS, MEASURED_CAPABILITIES
from problems.benchmark.paths.products import FORWARD_OF_TRANSPOSED_X, GRADIENT_OF_X, Product

Call = Callable[[Tensor], object]  # takes the first operand

DIVISOR = 2.0
# Bits of linear_relu_divide_gradients' argument output_mask: which gradients are computed.
GRAD_X = 1
GRAD_WEIGHT = 2


def check_device(command: str, device: str) -> None:
    """Raise a ValueError if the device has no paths to compare.

    Args:
        command: "paths" or "path-grid", for the message.
        device: "cpu" or "cuda".
    """
    wanted = " or ".join(f"{capability / 10:.1f}" for capability in MEASURED_CAPABILITIES)
    if device != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"{command} needs a CUDA GPU of compute capability {wanted}, got a CPU")
    capability = current_gpu().capability
    if capability not in MEASURED_CAPABILITIES:
        got = f"{capability / 10:.1f}"
        raise ValueError(f"{command} needs a GPU of compute capability {wanted}, got {got}")


def current_gpu() -> Gpu:
    """Return the GPU on which the calls run."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = 10 * properties.major + properties.minor
    return Gpu(capability, properties.multi_processor_count)


@contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """Set torch's precision of float32 products; "" changes nothing."""
    precision_before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision or precision_before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision_before)


def calls_by_path(product: Product, device: str) -> tuple[dict[str, Call], Tensor]:
    """Return a call for each path that can compute the product, and the operand to call it with.

    Args:
        product: the product to compute. Its precision is that of torch during the call.
        device: of the operands.
    """
    from model_new import linear_ops  # builds the kernels

    multiply, operand = _make_call(linear_ops, product, device)

    def call_by(path: str) -> Call:
        """Return a function that computes the product by a path."""

        def call(operand: Tensor) -> object:
            linear_ops.set_linear_path(path)
            try:
                return multiply(operand)
            finally:
                linear_ops.set_linear_path("auto")

        return call

    paths = _possible_paths(product, current_gpu())
    return {path: call_by(path) for path in paths}, operand


def _possible_paths(product: Product, gpu: Gpu) -> list[str]:
    """Return the paths that can compute the product on a GPU.

    For a gradient, skinny is left out because choose_path takes it for forwards alone.
    """
    paths = [path for path, capability in KERNEL_PATHS.items() if capability == gpu.capability]
    if "skinny" in paths and not (product.is_forward and product.dtype == "float32"):
        paths.remove("skinny")
    return [*paths, "torch"]


def _make_call(operators: object, product: Product, device: str) -> tuple[Call, Tensor]:
    """Return a function that computes the product, and the operand to call it with.

    Args:
        operators: those of the linear problem.
        product: what to compute.
        device: of the operands.
    """
    if product.is_forward:
        return _forward(operators, product, device)
    if product.operation == GRADIENT_OF_X:
        return _gradient_of_x(operators, product, device)
    return _gradient_of_weight(operators, product, device)


def _forward(operators: object, product: Product, device: str) -> tuple[Call, Tensor]:
    """Return the call for out [m, n] = relu(x [m, k] weight [n, k]^T + bias) / divisor, and x."""
    m, n, k = product.m, product.n, product.k
    if product.operation == FORWARD_OF_TRANSPOSED_X:
        x = _draw(product, device, k, m).t()
    else:
        x = _draw(product, device, m, k)
    weight = _draw(product, device, n, k)
    bias = _draw(product, device, n)
    return lambda x: operators.linear_relu_divide(x, weight, bias, DIVISOR), x


def _gradient_of_x(operators: object, product: Product, device: str) -> tuple[Call, Tensor]:
    """Return the call for grad_x [m, n] = grad_z [m, k] weight [k, n], and grad_output."""
    m, n, k = product.m, product.n, product.k
    grad_output = _draw(product, device, m, k)
    mask = _draw_mask(grad_output)
    weight = _draw(product, device, k, n)
    gradients = operators.linear_relu_divide_gradients
    return lambda grad: gradients(grad, mask, None, weight, GRAD_X, DIVISOR), grad_output


def _gradient_of_weight(operators: object, product: Product, device: str) -> tuple[Call, Tensor]:
    """Return the call for grad_weight [m, n] = grad_z [k, m]^T x [k, n], and grad_output."""
    m, n, k = product.m, product.n, product.k
    grad_output = _draw(product, device, k, m)
    mask = _draw_mask(grad_output)
    x = _draw(product, device, k, n)
    gradients = operators.linear_relu_divide_gradients
    return lambda grad: gradients(grad, mask, x, None, GRAD_WEIGHT, DIVISOR), grad_output


def _draw(product: Product, device: str, *shape: int) -> Tensor:
    """Return values of the product's dtype, uniform in [-1, 1)."""
    return torch.empty(shape, dtype=getattr(torch, product.dtype), device=device).uniform_(-1, 1)


def _draw_mask(grad_output: Tensor) -> Tensor:
    """Return a mask with random bits for grad_output, whose columns are a multiple of 8."""
    rows, columns = grad_output.shape
    return torch.randint(256, (rows, columns // 8), dtype=torch.uint8, device=grad_output.device)
