"""A module of ours and its reference on small inputs, one beside the other."""

import torch
from compare import assert_same_bits

from model_new import ModelNew


def samples(device="cpu", dtype=torch.float32):
    return torch.randn(4, 6, device=device, dtype=dtype)


def assert_same(got, want, is_relu):
    """Equal bits of ReLU. On a GPU the reference divides by a multiplication."""
    if is_relu:
        return assert_same_bits(got.detach(), want.detach())
    assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
    torch.testing.assert_close(got, want)


def both(modules, run):
    """What `run` makes of ours, which is what it makes of the reference: a tensor, or several."""
    got, want = (run(module) for module in modules)
    pairs = [(got, want)] if isinstance(want, torch.Tensor) else zip(got, want, strict=True)
    for pair in pairs:
        assert_same(*pair, is_relu=isinstance(modules[0], ModelNew))
    return got


def step(module, x, call=None):
    """The output, by `call` or else the module's, and the gradients of x and of the parameters."""
    leaf = x.detach().clone().requires_grad_()
    out = (call or module)(leaf)
    return out, *torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])
