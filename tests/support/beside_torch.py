"""Compare a module of ours with its reference, on small inputs."""

import torch

from model_new import ModelNew
from tests.support.compare import assert_same_bits


def samples(device="cpu", dtype=torch.float32):
    """Return the x of most comparisons, [4, 6]."""
    return torch.randn(4, 6, device=device, dtype=dtype)


def assert_same_or_close(got, want, is_relu):
    """Assert that a result of ReLU has the same bits, and a result of Linear is close.

    On a GPU the reference multiplies by the reciprocal of the divisor, so bits may differ.
    """
    if is_relu:
        assert_same_bits(got.detach(), want.detach())
        return
    assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
    torch.testing.assert_close(got, want)


def assert_same_results(modules, run):
    """Run both modules, assert that the results are the same, and return ours.

    Args:
        modules: our module and the reference.
        run: a function that takes a module and returns a tensor or several.
    """
    got, want = (run(module) for module in modules)
    pairs = [(got, want)] if isinstance(want, torch.Tensor) else zip(got, want, strict=True)
    for pair in pairs:
        assert_same_or_close(*pair, is_relu=isinstance(modules[0], ModelNew))
    return got


def output_and_gradients(module, x, call=None):
    """Return a module's output, and the gradients of x and of its parameters.

    The loss is the sum of the output's squares. If there is a `call`, it computes the output from
    x in place of the module, for example as a compiled form of the module.
    """
    leaf = x.detach().clone().requires_grad_()
    out = module(leaf) if call is None else call(leaf)
    return out, *torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])
