"""The gradient: bit for bit torch's, from one bit an element."""

import pytest
import torch
from tensors import (
    FLOATING,
    assert_same_bits,
    draw,
    large_misaligned,
    misaligned,
    random_views,
    short_views,
    special_values,
    views,
)
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from model import Model
from model_new import ModelNew, _extension


def gradient(module, x, grad_output):
    x = x.detach().requires_grad_()
    out = module(x)
    (grad,) = torch.autograd.grad(out, x, grad_output)
    return grad


def assert_same_gradient(x, grad_output):
    got = gradient(ModelNew(), x, grad_output)
    want = gradient(Model(), x, grad_output)
    assert_same_bits(got, want)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_sizes(device, dtype):
    for size in [0, 1, 2, 3, 7, 8, 9, 31, 63, 64, 65, 127, 128, 129, 1000, 4097, 70001, 300007]:
        x = draw((size,), dtype, device)
        assert_same_gradient(x, draw((size,), dtype, device))


def test_several_threads_and_huge_pages(three_threads):
    x, grad_output = (draw((3, 6_000_011), torch.float32) for _ in range(2))
    assert_same_gradient(x, grad_output)
    assert_same_gradient(x.t(), grad_output.t())
    assert_same_gradient(x, grad_output.flip(1)[:, :1].expand(x.shape))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 50 << 30:
        pytest.skip("needs 50 GiB of GPU memory")
    n = 2**31 + 12345
    x = draw((n // 1000 + 1, 1000), torch.float16, "cuda").requires_grad_()
    noise = draw((n,), torch.float16, "cuda")
    grad_output = noise.as_strided(x.shape, (997, 1))
    (got,) = torch.autograd.grad(ModelNew()(x), x, grad_output)
    for rows in torch.arange(len(x)).split(1 << 18):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        want = torch.ops.aten.threshold_backward(grad_output[part], x[part], 0)
        assert_same_bits(got[part], want)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_special_values(device, dtype):
    values = special_values(dtype, device)
    x, grad_output = torch.meshgrid(values, values, indexing="ij")
    for repeat in (1, 9):
        assert_same_gradient(x.repeat(repeat, 1).contiguous(), grad_output.repeat(repeat, 1))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_short_rows(device, dtype):
    for x in short_views(dtype, device):
        print(tuple(x.shape), x.stride())
        dense = draw(x.shape, dtype, device)
        assert_same_gradient(x, dense)
        assert_same_gradient(dense, x)
        assert_same_gradient(x, x)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_layouts(device, dtype):
    for name, x in views(dtype, device):
        print(name, tuple(x.shape), x.stride())
        assert_same_gradient(x, torch.ones_like(x))
        assert_same_gradient(x, draw(x.shape, dtype, device))
        assert_same_gradient(x, draw((), dtype, device).expand(x.shape))
        assert_same_gradient(x, draw((*x.shape, 2), dtype, device)[..., 1])
        if x.dim() > 0:
            longer_rows = draw((*x.shape[:-1], x.shape[-1] + 1), dtype, device)
            assert_same_gradient(x, longer_rows[..., 1:])
        assert_same_gradient(
            x, draw(x.shape[::-1], dtype, device).permute(tuple(range(x.dim()))[::-1])
        )


def test_random_layouts(device):
    count = 600 if device == "cpu" else 200
    for x, other in zip(
        random_views(count, torch.float32, device),
        random_views(count, torch.float32, device, seed=1),
        strict=True,
    ):
        print(tuple(x.shape), x.stride())
        order = sorted(range(x.dim()), key=lambda d: (other.shape * 5)[d])
        back = sorted(range(x.dim()), key=order.__getitem__)
        assert_same_gradient(x, draw([x.shape[d] for d in order], x.dtype, device).permute(back))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", [(256, 8), (512, 264), (2048, 1000), (3, 512, 16), (1024, 9)])
def test_transposed_gradient(device, dtype, shape):
    """In whole tiles and not."""
    x = draw(shape, dtype, device)
    assert_same_gradient(x, draw(x.mT.shape, dtype, device).mT)
    assert_same_gradient(x.mT, draw(shape, dtype, device).mT.contiguous())


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf"), 0.0])
def test_gradient_of_a_sum(device, dtype, value):
    for shape in (1,), (7,), (64,), (1001,), (3, 70_001):
        x, one = draw(shape, dtype, device), torch.tensor(value, dtype=dtype, device=device)
        assert_same_gradient(x, one.expand(shape))
        assert_same_gradient(x.permute(*range(x.dim())[::-1]), one.expand(shape[::-1]))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", [(1000, 5, 77), (13, 9001), (300, 7, 9, 11), (2, 3, 70_003)])
def test_permuted_gradient(device, dtype, shape):
    x, order = draw(shape, dtype, device), range(len(shape))[::-1]
    assert_same_gradient(x, draw(shape[::-1], dtype, device).permute(*order))
    assert_same_gradient(x.permute(*order), draw(shape[::-1], dtype, device))


def test_gradient_of_a_sum_where_a_dimension_is_1(device):
    """The stride of that dimension is torch's too."""
    for size, stride in ((1, 4), (1, 2)), ((3, 1), (2, 7)), ((2, 1, 3), (3, 5, 1)):
        x = draw((32,), torch.float32, device).as_strided(size, stride)
        assert_same_gradient(x, torch.ones((), device=device).expand(size))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_misaligned_gradient_or_input(device, dtype):
    aligned = draw((70001,), dtype, device)
    for _, grad_output in misaligned(dtype, device):
        print(tuple(grad_output.shape), grad_output.storage_offset())
        x = aligned[: len(grad_output)]
        assert_same_gradient(x, grad_output)
        assert_same_gradient(grad_output, x)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_misaligned_gradient_and_input(device, dtype):
    views = [view for _, view in misaligned(dtype, device) if len(view) in (257, 4103, 70001)]
    for x in views:
        for grad_output in views:
            if len(x) == len(grad_output):
                assert_same_gradient(x, grad_output)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_large_misaligned_gradient(dtype):
    for memory, view in large_misaligned(dtype):
        print(len(memory), view.storage_offset())
        aligned = memory[: len(view)]
        for x, grad_output in (view, aligned), (aligned, view), (view, view):
            assert_same_gradient(x, grad_output)


def test_gradient_is_written_to_fresh_memory(device):
    grad_output = torch.rand(1000, device=device)
    before = grad_output.clone()
    grad = gradient(ModelNew(), torch.randn(1000, device=device), grad_output)
    assert grad.data_ptr() != grad_output.data_ptr()
    assert_same_bits(grad_output, before)


def test_one_bit_an_element_is_kept(device):
    kept = []
    x = torch.randn(64, 1000, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ModelNew()(x)
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.uint8, x.numel() // 8)]


def test_mask_bits():
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, float("nan"), float("inf"), -1.0, 2.0, -3.0, 4.0])
    _, mask = _extension.operators.relu_with_mask(x)
    assert mask.tolist() == [0b10110001, 0b10]


def test_no_mask_without_a_gradient(device):
    x = torch.randn(100, device=device, requires_grad=True)
    with torch.no_grad():
        out = ModelNew()(x)
    assert out.grad_fn is None
    assert not out.requires_grad
    out = ModelNew()(x.detach())
    assert out.grad_fn is None


def test_input_may_change_after_the_forward(device):
    x = torch.randn(100, device=device)
    leaf = x.clone().requires_grad_()
    moving = leaf * 1
    out = ModelNew()(moving)
    moving.detach().zero_()
    out.sum().backward()
    assert_same_bits(leaf.grad, (x > 0).float())


def test_output_may_change_after_the_forward(device):
    """torch keeps the output and must raise here; ours keeps bits, and the gradient is right."""
    x = torch.randn(100, device=device, requires_grad=True)
    out = ModelNew()(x)
    out.mul_(3)
    out.sum().backward()
    assert_same_bits(x.grad, 3 * (x > 0).float())
    out = Model()(x)
    out.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_backward_raises_as_torch_does(device):
    x = torch.randn(10, device=device, requires_grad=True)
    out = ModelNew()(x).sum()
    out.backward(retain_graph=True)
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_double_backward(device):
    x = torch.randn(1000, device=device, requires_grad=True)
    grad_output = torch.randn(1000, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(ModelNew()(x), x, grad_output, create_graph=True)
    (second,) = torch.autograd.grad((grad**2).sum(), grad_output)
    assert_same_bits(second, torch.where(x > 0, 2 * grad_output, torch.zeros_like(x)).detach())


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("order", [2, 3])
def test_gradients_of_gradients_by_the_input(device, inplace, order):
    """Zeros, as torch's, and not nothing; without a gradient of the output's gradient too."""
    leaf = special_values(torch.float32, device).repeat(3)

    def run(module):
        x = leaf.clone().requires_grad_()
        grads = [module(x * 1).sum()]
        for _ in range(order):
            assert grads[-1].requires_grad
            grads.append(torch.autograd.grad(grads[-1].sum(), x, create_graph=True)[0])
        return grads[1:]

    for got, want in zip(run(ModelNew(inplace)), run(nn.ReLU(inplace)), strict=True):
        assert_same_bits(got.detach(), want.detach())


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.transpose(0, 1), lambda x: x[:, ::2]])
def test_gradcheck(device, make):
    x = torch.randn(5, 6, 3, dtype=torch.float64, device=device)
    x = torch.where(x.abs() < 0.1, x.sign(), x).requires_grad_()  # away from the kink
    checks = {"check_batched_grad": True, "check_forward_ad": True}
    assert gradcheck(lambda x: ModelNew()(make(x)), x, **checks, check_batched_forward_grad=True)
    assert gradgradcheck(
        lambda x: ModelNew()(make(x)),
        x,
        check_batched_grad=True,
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
    )


def test_opinfo_samples_with_gradients(device):
    # Which may need packages that torch does not bring.
    op_db = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db

    (info,) = [op for op in op_db if op.name == "nn.functional.relu"]
    for dtype in FLOATING:
        for sample in info.sample_inputs(device, dtype, requires_grad=True):
            assert_same_gradient(sample.input, torch.ones_like(sample.input))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(mask=a["mask"].to(torch.int8)), "mask must be"),
        (lambda a: a.update(mask=a["mask"][:-1]), "mask must be"),
        (lambda a: a.update(grad_output=a["grad_output"].to(torch.int32)), "grad_output must be"),
        (lambda a: a.update(stride=[1]), "stride must have 2"),
    ],
)
def test_backward_operator_checks_its_arguments(change, message):
    arguments = {
        "grad_output": torch.rand(4, 8),
        "mask": torch.zeros(4, dtype=torch.uint8),
        "stride": [8, 1],
    }
    change(arguments)
    with pytest.raises(RuntimeError, match=message):
        _extension.operators.relu_backward(**arguments)
