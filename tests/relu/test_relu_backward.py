"""ReLU, backward: the bits of torch's gradient, from a mask of one bit for each element."""

from itertools import permutations, product

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from model import Model
from model_new import ModelNew
from problems.elementwise import special_values
from tests.support.compare import assert_same_bits, checked_call, unpack_mask
from tests.support.tensors import FLOATING, VIEWS, draw, draw_view, step


def assert_same_gradient(x, grad_output):
    """Assert that x's gradient has the bits and the strides of torch's."""
    got, want = (step(module, x, grad_output)[1] for module in (ModelNew(), Model()))
    assert_same_bits(got, want)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_gradients_match_torch_for_any_size(device, dtype):
    """The output's gradient may also be an expanded value."""
    for size in [0, 1, 2, 3, 7, 8, 9, 31, 63, 64, 65, 127, 128, 129, 1000, 4097, 70001, 300007]:
        x = draw((size,), dtype, device)
        assert_same_gradient(x, draw((size,), dtype, device))
        for value in (1.5, float("nan")):
            assert_same_gradient(x, torch.tensor(value, dtype=dtype, device=device).expand(size))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_gradients_match_torch_for_any_layout(device, view, dtype):
    """For each x, the output's gradient is dense, expanded, with gaps, misaligned or permuted."""
    x = draw_view(view, dtype, device)
    reverse_order = tuple(range(x.dim()))[::-1]
    assert_same_gradient(x, draw(x.shape, dtype, device))
    assert_same_gradient(x, draw((), dtype, device).expand(x.shape))
    assert_same_gradient(x, draw((*x.shape, 2), dtype, device)[..., 1])
    assert_same_gradient(x, draw((x.numel() + 1,), dtype, device)[1:].view(x.shape))
    assert_same_gradient(x, draw(x.shape[::-1], dtype, device).permute(reverse_order))


def dense_strides(shape, order):
    """Return the strides of a dense tensor; `order` lists its dimensions from the innermost on."""
    strides = [0] * len(shape)
    stride = 1
    for dimension in order:
        strides[dimension] = stride
        stride *= shape[dimension]
    return strides


def change_strides_of_size_1(strides, shape, new_stride):
    """Return the strides, but `new_stride` for each dimension of size 1."""
    return [new_stride if n == 1 else stride for n, stride in zip(shape, strides, strict=True)]


@pytest.mark.parametrize("shape", [(1, 3), (1, 2, 2), (2, 1, 3), (2, 3, 1, 2)], ids=str)
def test_strides_of_dimensions_of_size_1_do_not_matter(device, shape):
    """Such a stride is the dense one, 1 or 5, in every order of dimensions.

    The output's gradient may also be expanded, with strides of 0.
    """
    strides = []
    for order in permutations(range(len(shape))):
        dense = dense_strides(shape, order)
        strides.append(dense)
        strides.append(change_strides_of_size_1(dense, shape, 1))
        strides.append(change_strides_of_size_1(dense, shape, 5))
    expanded = [0] * len(shape)
    values = draw((99,), torch.float32, device)
    grad_output = draw((99,), torch.float32, device)
    for x_stride, grad_stride in product(strides, [*strides, expanded]):
        x = values.as_strided(shape, x_stride)
        assert_same_gradient(x, grad_output.as_strided(shape, grad_stride))


def test_large_gradients_of_several_threads_match_torch(three_threads):
    x, grad_output = (draw((3, 3_000_011), torch.float32) for _ in range(2))
    assert_same_gradient(x, grad_output)
    assert_same_gradient(x.t(), grad_output.t())


@pytest.mark.gpu
def test_gradients_of_more_than_2_to_the_31_elements_match_torch():
    """An index does not fit into 32 bits there."""
    if torch.cuda.mem_get_info()[0] < 50 << 30:
        pytest.skip("needs 50 GiB of GPU memory")
    n = 2**31 + 12345
    x = draw((n // 1000 + 1, 1000), torch.float16, "cuda").requires_grad_()
    noise = draw((n,), torch.float16, "cuda")
    for grad_output in (draw(x.shape, torch.float16, "cuda"), noise.as_strided(x.shape, (997, 1))):
        (got,) = torch.autograd.grad(ModelNew()(x), x, grad_output)
        for rows in torch.arange(len(x)).split(1 << 18):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            want = torch.ops.aten.threshold_backward(grad_output[part], x[part], 0)
            assert_same_bits(got[part], want)
        del got


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_gradients_of_special_values_match_torch(device, dtype):
    """Each special value of x meets each one of the output's gradient."""
    values = special_values(dtype).to(device)
    x, grad_output = torch.meshgrid(values, values, indexing="ij")
    for repeat in (1, 9):
        assert_same_gradient(x.repeat(repeat, 1).contiguous(), grad_output.repeat(repeat, 1))


def test_gradient_is_written_to_new_memory(device):
    """The gradient has no memory of x or of the output's gradient, which do not change."""
    x, grad_output = torch.randn(2, 1000, device=device)
    checked_call(lambda: step(ModelNew(), x, grad_output), [x, grad_output], x.nbytes)


def test_one_bit_for_each_element_is_saved(device):
    saved = []
    x = torch.randn(64, 1000, device=device, requires_grad=True)

    def save(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        ModelNew()(x)
    assert [(t.dtype, t.numel()) for t in saved] == [(torch.uint8, x.numel() // 8)]
    assert torch.equal(unpack_mask(saved[0]), x.flatten() > 0)


def test_nothing_is_saved_without_a_gradient(device):
    x = torch.randn(100, device=device, requires_grad=True)
    with torch.no_grad():
        out = ModelNew()(x)
    assert out.grad_fn is None
    assert not out.requires_grad
    assert ModelNew()(x.detach()).grad_fn is None


def test_x_and_the_output_may_change_after_the_forward(device):
    """We save a mask. torch saves the output, and raises if it has changed."""
    x = torch.randn(100, device=device)
    leaf = x.clone().requires_grad_()
    changing_x = leaf * 1
    out = ModelNew()(changing_x)
    changing_x.detach().zero_()
    out.mul_(3)
    out.sum().backward()
    assert_same_bits(leaf.grad, 3 * (x > 0).float())
    out = Model()(leaf)
    out.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_second_gradients_by_x_are_zeros(device, inplace):
    """They are zeros as torch's, not None, also if the output's gradient needs no gradient."""
    leaf = special_values(torch.float32).to(device).repeat(3)

    def run(module):
        x = leaf.clone().requires_grad_()
        grads = [module(x * 1).sum()]
        for _ in range(3):
            assert grads[-1].requires_grad
            grads.append(torch.autograd.grad(grads[-1].sum(), x, create_graph=True)[0])
        return grads[1:]

    assert_same_bits(run(ModelNew(inplace)), run(nn.ReLU(inplace)))


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.transpose(0, 1), lambda x: x[:, ::2]])
def test_gradients_agree_with_finite_differences(device, make):
    """This holds for first and second gradients, also batched and forward-mode."""
    x = torch.randn(5, 4, 3, dtype=torch.float64, device=device)
    x = torch.where(x.abs() < 0.1, x.sign(), x).requires_grad_()  # away from the kink
    checks = {"check_batched_grad": True, "check_forward_ad": True}
    assert gradcheck(lambda x: ModelNew()(make(x)), x, **checks, check_batched_forward_grad=True)
    checks = {"check_batched_grad": True, "check_fwd_over_rev": True, "check_rev_over_rev": True}
    assert gradgradcheck(lambda x: ModelNew()(make(x)), x, **checks)


def test_gradients_match_torch_for_the_samples_by_which_torch_tests_relu(device):
    """These are the samples with which torch tests its own ReLU."""
    # The module may need packages that do not come with torch.
    op_db = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db

    (info,) = [op for op in op_db if op.name == "nn.functional.relu"]
    for dtype in FLOATING:
        for sample in info.sample_inputs(device, dtype, requires_grad=True):
            assert_same_gradient(sample.input, torch.ones_like(sample.input))
