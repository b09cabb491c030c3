"""In place: torch's bits, and torch's rules for leaves, views, versions and overlaps."""

import pytest
import torch
from tensors import (
    DTYPES,
    FLOATING,
    assert_same_bits,
    draw,
    misaligned,
    relu_by_definition,
    views,
)
from torch import nn

from model_new import ModelNew


def both(run):
    """What `run` makes of the replacement and of torch's module, errors included."""
    results = []
    for module in (ModelNew(inplace=True), nn.ReLU(inplace=True)):
        try:
            results.append(run(module))
        except RuntimeError as error:
            results.append(str(error).splitlines()[0])
    return results


def test_off_by_default():
    x = torch.tensor([-1.0, 1.0])
    assert ModelNew()(x) is not x
    assert x.tolist() == [-1.0, 1.0]
    assert (repr(ModelNew()), repr(ModelNew(inplace=True))) == (
        "ModelNew()",
        "ModelNew(inplace=True)",
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_in_every_layout(device, dtype):
    for name, x in views(dtype, device):
        if "overlapping" in name or "expanded" in name:
            continue
        print(name)
        storage = torch.empty(0, dtype=dtype, device=device).set_(x.untyped_storage())
        before, address, version = storage.clone(), x.data_ptr(), x._version
        want = relu_by_definition(x)
        assert ModelNew(inplace=True)(x) is x
        assert_same_bits(x, want)
        assert (x.data_ptr(), x._version) == (address, version + 1)
        untouched = torch.ones_like(storage, dtype=torch.bool)
        untouched.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
        assert_same_bits(storage[untouched], before[untouched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_misaligned(device, dtype):
    for memory, x in misaligned(dtype, device):
        print(tuple(x.shape), x.storage_offset())
        want = memory.clone()
        want[x.storage_offset() :][: len(x)] = relu_by_definition(x)
        ModelNew(inplace=True)(x)
        assert_same_bits(memory, want)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_misaligned_gradient(device, dtype):
    """The mask's bytes and the aligned vectors then begin at different elements."""
    for memory, view in misaligned(dtype, device):
        print(tuple(view.shape), view.storage_offset())
        offset, size = view.storage_offset(), len(view)
        grad_output = draw((size,), dtype, device)

        def run(module, leaf=memory, offset=offset, size=size, grad_output=grad_output):
            x = leaf.clone().requires_grad_()
            changed = x * 1
            out = module(changed[offset : offset + size])
            (grad,) = torch.autograd.grad(out, x, grad_output)
            return torch.stack([changed.detach() + 0, grad])

        assert_same_bits(*both(run))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    pairs = draw((2**31 + 12345, 2), torch.int8, "cuda")
    want = pairs.clone()
    want[:, 0].clamp_(min=0)
    ModelNew(inplace=True)(pairs[:, 0])
    assert torch.equal(pairs, want)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_gradient(device, offset):
    leaf = draw((1003,), torch.float32, device)
    grad_output = draw((1003 - offset,), torch.float32, device)

    def run(module):
        x = leaf.clone().requires_grad_()
        out = module((x * 1)[offset:])
        (grad,) = torch.autograd.grad(out, x, grad_output)
        return grad

    assert_same_bits(*both(run))


def test_gradient_of_a_view_with_gaps(device):
    leaf = draw((6, 10), torch.float32, device)

    def run(module):
        x = leaf.clone().requires_grad_()
        base = x * 2
        module(base[:, ::2])
        (grad,) = torch.autograd.grad(base.pow(2).sum(), x)
        return grad

    assert_same_bits(*both(run))


def test_refusals_are_torchs(device):
    def leaf(module):
        return module(torch.randn(3, device=device, requires_grad=True))

    def view_of_leaf(module):
        return module(torch.randn(3, device=device, requires_grad=True)[1:])

    def expanded(module):
        return module(torch.randn(1, device=device).expand(3))

    def inference(module):
        with torch.inference_mode():
            x = torch.randn(3, device=device)
        return module(x)

    def boolean(module):
        return module(torch.tensor([True], device=device))

    def one_of_several_views(module):
        return module(torch.randn(4, device=device, requires_grad=True).mul(1).unbind()[0])

    for case in (leaf, view_of_leaf, expanded, inference, boolean, one_of_several_views):
        got, want = both(case)
        assert isinstance(want, str), case.__name__
        assert got == want, case.__name__


def test_refused_leaf_is_not_changed(device):
    x = torch.tensor([-1.0, 2.0], device=device, requires_grad=True)
    with pytest.raises(RuntimeError):
        ModelNew(inplace=True)(x)
    assert x.tolist() == [-1.0, 2.0]


def test_a_saved_tensor_that_is_overwritten_is_noticed(device):
    x = torch.randn(10, device=device, requires_grad=True)
    y = x.exp()  # keeps its output
    ModelNew(inplace=True)(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_leaf_without_grad_mode(device):
    x = torch.tensor([-1.0, 2.0], device=device, requires_grad=True)
    with torch.no_grad():
        ModelNew(inplace=True)(x)
    assert x.tolist() == [0.0, 2.0]


def test_inside_a_network(device):
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(8, 8), ModelNew(inplace=True), nn.Linear(8, 2)).to(device)
    torch.manual_seed(1)
    reference = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)).to(device)
    x = torch.randn(5, 8, device=device)
    for network in (layers, reference):
        network(x).sum().backward()
    for mine, theirs in zip(layers.parameters(), reference.parameters(), strict=True):
        assert_same_bits(mine.grad, theirs.grad)


def test_transforms(device):
    x = torch.randn(4, 6, device=device)
    for transform in (
        lambda f: torch.func.grad(lambda x: f(x.clone()).pow(2).sum())(x),
        lambda f: torch.func.jvp(lambda x: f(x.clone()), (x,), (x,))[1],
        lambda f: torch.func.vmap(lambda x: f(x.clone()))(x),
        lambda f: torch.compile(lambda x: f(x * 1), fullgraph=True, backend="aot_eager")(x),
    ):
        torch._dynamo.reset()
        assert_same_bits(*both(transform))
