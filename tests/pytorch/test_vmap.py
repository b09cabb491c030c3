"""A backward under vmap whose forward was outside it: all gradients are computed at once.

Such calls come from `torch.autograd.grad(is_grads_batched=True)` and `jacobian(vectorize=True)`,
which use torch's older vmap, and from `torch.func.vmap` over a function that calls
`torch.autograd.grad`. Each test asserts that the results are the reference's, and that our
operators are called for the whole batch.
"""

import warnings
from contextlib import contextmanager

import pytest
import torch

from model import Model
from model_new import ModelNew
from tests.support.beside_torch import assert_same_results, samples
from tests.support.tensors import OPERATORS, linear_modules

BATCH = 5


@pytest.fixture(params=["relu", "linear"])
def modules(request, device):
    if request.param == "relu":
        return ModelNew(), Model()
    return linear_modules(6, 10, 3.0, device=device)


@contextmanager
def no_fallback_of_ours():
    """Fail if vmap falls back to calling an operator of ours once for each element of the batch."""
    set_fallback_warnings = torch._C._debug_only_display_vmap_fallback_warnings
    set_fallback_warnings(True)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield
    finally:
        set_fallback_warnings(False)
    messages = [str(warning.message) for warning in found]
    assert not [message for message in messages if "relu_divide_kernels" in message]


def is_grads_batched(out, leaves, grad_outputs, **options):
    return torch.autograd.grad(out, leaves, grad_outputs, is_grads_batched=True, **options)


def vmap_of_grad(out, leaves, grad_outputs, **options):
    def gradients(grad_output):
        return torch.autograd.grad(out, leaves, grad_output, retain_graph=True, **options)

    return torch.func.vmap(gradients)(grad_outputs)


BATCHED_GRADS = [is_grads_batched, vmap_of_grad]


@pytest.mark.parametrize("batched_grad", BATCHED_GRADS)
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6), (6,)])
def test_batched_gradients_of_x_and_parameters_match_the_reference(
    device, modules, batched_grad, shape
):
    x = torch.randn(shape, device=device)
    grad_outputs = torch.randn(BATCH, *modules[1](x).shape, device=device)

    def run(module):
        leaf = x.clone().requires_grad_()
        return batched_grad(module(leaf), [leaf, *module.parameters()], grad_outputs)

    with no_fallback_of_ours():
        assert_same_results(modules, run)


@pytest.mark.parametrize("batched_grad", BATCHED_GRADS)
@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2], [1, 2]])
def test_only_the_wanted_gradients_of_linear_are_computed(device, batched_grad, wanted):
    x = samples(device)
    grad_outputs = torch.randn(BATCH, 4, 10, device=device)

    def run(module):
        leaf = x.clone().requires_grad_()
        leaves = [leaf, module.linear.weight, module.linear.bias]
        return batched_grad(module(leaf), [leaves[i] for i in wanted], grad_outputs)

    with no_fallback_of_ours():
        assert_same_results(linear_modules(6, 10, 3.0, device=device), run)


@pytest.mark.parametrize("batched_grad", BATCHED_GRADS)
def test_x_may_be_transposed_and_the_bias_missing(device, batched_grad):
    x = samples(device).t()
    grad_outputs = torch.randn(BATCH, 6, 10, device=device)

    def run(module):
        leaf = x.detach().requires_grad_()
        return batched_grad(module(leaf), [leaf, module.linear.weight], grad_outputs)

    with no_fallback_of_ours():
        assert_same_results(linear_modules(4, 10, 3.0, device=device, bias=False), run)


@pytest.mark.parametrize("batched_grad", BATCHED_GRADS)
def test_gradients_of_batched_gradients_match_the_reference(device, modules, batched_grad):
    x = samples(device)
    grad_outputs = torch.randn(BATCH, *modules[1](x).shape, device=device)

    def run(module):
        leaf = x.clone().requires_grad_()
        grads = grad_outputs.clone().requires_grad_()
        [grad_x] = batched_grad(module(leaf), [leaf], grads, create_graph=True)
        return torch.autograd.grad(grad_x.square().sum(), grads)

    with no_fallback_of_ours():
        assert_same_results(modules, run)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_vectorized_jacobian_matches_the_reference(device, modules, create_graph):
    x = samples(device)

    def run(module):
        return torch.autograd.functional.jacobian(
            module, x, vectorize=True, create_graph=create_graph
        )

    with no_fallback_of_ours():
        assert_same_results(modules, run)


def test_a_vectorized_hessian_matches_the_reference(device, modules):
    x = samples(device)

    def run(module):
        def sum_of_cubes(x):
            return module(x).pow(3).sum()

        return torch.autograd.functional.hessian(sum_of_cubes, x, vectorize=True)

    with no_fallback_of_ours():
        assert_same_results(modules, run)


def random_batch(shape, dim):
    """Draw a tensor of this shape, or a batch of such tensors along a new dimension `dim`."""
    if dim is None:
        return torch.randn(shape)
    return torch.randn(*shape[:dim], BATCH, *shape[dim:])


@pytest.mark.parametrize("mask_dim", [None, 0, 1])
@pytest.mark.parametrize("grad_dim", [None, 0, 1, 2])
@pytest.mark.parametrize("x_dim, weight_dim", [(0, None), (None, 1)])
def test_the_gradients_operator_takes_batches_of_any_operands(
    device, mask_dim, grad_dim, x_dim, weight_dim
):
    """The result is that of a loop over the batch. A dim of None means no batch."""
    in_dims = (grad_dim, mask_dim, x_dim, weight_dim)
    grad_output = random_batch((4, 10), grad_dim).to(device)
    mask = random_batch((4, 2), mask_dim).mul(100).to(device, torch.uint8)
    x = random_batch((4, 6), x_dim).to(device)
    weight = random_batch((10, 6), weight_dim).to(device)
    operands = (grad_output, mask, x, weight)

    def gradients(*operands):
        return OPERATORS.linear_relu_divide_gradients(*operands, 7, 3.0)

    with no_fallback_of_ours():
        got = torch.func.vmap(gradients, in_dims=in_dims)(*operands)
    for i in range(BATCH):
        pairs = zip(operands, in_dims, strict=True)
        own = [t if dim is None else t.select(dim, i).contiguous() for t, dim in pairs]
        for batch, want in zip(got, gradients(*own), strict=True):
            torch.testing.assert_close(batch[i], want)
