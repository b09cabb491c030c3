"""Outputs and gradients of relu(x weight^T + bias) / divisor against their float64 values."""

import torch
from torch import nn
from torch.autograd import grad

from referee.errors import U32, U_TF32, Allowance, Comparison, _blocks, _rows, precision
from referee.errors import compare_output as compare_output

Gradients = dict[str, torch.Tensor]


def clear_of_zero(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Where ReLU's side is certain at this precision, `[..., out_features]`, bool.

    Elsewhere rounding decides whether a gradient passes.
    """
    parts = [_is_clear(z, magnitude, x.dtype) for _, _, z, magnitude in _blocks(x, module.linear)]
    return torch.cat(parts, dim=1).view(*x.shape[:-1], module.linear.out_features)


def differentiate(
    module: nn.Module, x: torch.Tensor, grad_output: torch.Tensor, direction: torch.Tensor | None
) -> Gradients:
    """The output, the gradients of x and of the parameters by name, and the second gradient.

    That is what the gradient of x, in `direction`, gives the output's gradient.
    """
    x = x.detach().requires_grad_()
    leaves = {"x": x, **dict(module.named_parameters())}
    output = module(x)
    retain = direction is not None
    results = grad(output, list(leaves.values()), grad_output, retain_graph=retain)
    found = {"output": output.detach(), **dict(zip(leaves, results, strict=True))}
    if direction is not None:
        g = grad_output.detach().requires_grad_()
        [differentiable] = grad(output, x, g, create_graph=True)
        [found["second gradient"]] = grad(differentiable, g, direction)
    return found


def compare_gradients(
    ours: Gradients,
    eager: Gradients,
    x: torch.Tensor,
    module: nn.Module,
    grad_output: torch.Tensor,
    direction: torch.Tensor | None,
) -> dict[str, Comparison]:
    """The errors of what `differentiate` gave, by name; grad_output is 0 where not clear.

    There the second gradient has to be right for either side.
    """
    n, k = module.linear.weight.shape
    flat = _rows(x).double()
    m = len(flat)
    products = {"x": n, "linear.weight": m, "second gradient": k}
    found = {
        name: Comparison.of(name, Allowance.of(x.dtype, precision(), terms))
        for name, terms in products.items()
        if name in ours
    }

    def add(name: str, part: object, exact: torch.Tensor, magnitude: torch.Tensor) -> None:
        if name in found:
            for errors, got in ((found[name].solution, ours), (found[name].reference, eager)):
                errors.add(_rows(got[name])[part], exact, magnitude)

    if "linear.bias" in ours:
        found["linear.bias"] = Comparison.of("linear.bias", Allowance.of_sum(x.dtype, m))
    every = slice(None)
    grad_x, grad_x_magnitude = torch.zeros_like(flat), torch.zeros_like(flat)
    for part, weight, z, magnitude in _blocks(x, module.linear):
        passes = (z > 0).double() / module.divisor
        grad_z = _rows(grad_output)[:, part].double() * passes
        sizes = grad_z.abs()
        grad_x += grad_z @ weight
        grad_x_magnitude += sizes @ weight.abs()
        add("linear.weight", (part, every), grad_z.T @ flat, sizes.T @ flat.abs())
        add("linear.bias", (every, part), grad_z.sum(0)[None], sizes.sum(0)[None])
        if direction is not None:
            d = _rows(direction).double()
            second = (d @ weight.T) / module.divisor
            sizes = (d.abs() @ weight.abs().T) / abs(module.divisor)
            clear, compared = _is_clear(z, magnitude, x.dtype), found["second gradient"]
            for errors, results in ((compared.solution, ours), (compared.reference, eager)):
                got = _rows(results["second gradient"])[:, part]
                side = torch.where(clear, z > 0, got != 0)
                errors.add(got, second * side, sizes * side)
    add("x", every, grad_x, grad_x_magnitude)
    return found


def _is_clear(z: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 2:
        near = torch.finfo(dtype).eps  # the product may be rounded before the bias is added
    else:
        near = U_TF32 * 4 if dtype == torch.float32 and precision() != "highest" else U32 * 64
    return z.abs() > near * magnitude
