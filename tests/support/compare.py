"""Exact comparisons, and comparisons of errors, that several tests share."""

import torch
from torch.utils._pytree import tree_leaves

from referee.compare import share_memory

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x):
    """The bits of x as integers, with one pattern for every NaN."""
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return x.contiguous().view(BITS[x.element_size()])


def relu_by_definition(x):
    """x < 0 ? 0 : x, which keeps NaN and -0: torch.relu, but for the sign of zero on some GPUs."""
    return torch.where(x < 0, torch.zeros_like(x), x)


def assert_same_bits(got, want):
    """Of two tensors, or of each of several."""
    if not isinstance(want, torch.Tensor):
        for pair in zip(got, want, strict=True):
            assert_same_bits(*pair)
        return
    got, want = got.detach(), want.detach()
    assert got.dtype == want.dtype
    assert got.device == want.device
    assert got.shape == want.shape
    wrong = bits(got) != bits(want)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {at}: "
            f"got {got[at].item()!r}, expected {want[at].item()!r}"
        )


def assert_is_relu(got, x):
    """got is what torch.relu(x) returns: bits, strides, and memory of its own."""
    assert_same_bits(got, relu_by_definition(x))
    reference = torch.relu(x)
    assert got.stride() == reference.stride()
    assert torch.equal(bits(got + 0), bits(reference + 0))  # + 0 drops the sign of zero
    if x.numel():
        assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def watched(call, tensors, size):
    """What the call returns, in memory of its own; no tensor is changed, nor what its view skips.

    Before it, free blocks of about `size` bytes are full of 0xff, a NaN in every float dtype, for
    results to land in: several, since the C library hands small ones out as it likes.
    """

    def geometry(x):
        return x.shape, x.stride(), x.data_ptr()

    before, device = [], tensors[0].device
    for x in tensors:
        memory = torch.empty(0, dtype=torch.uint8, device=device).set_(x.untyped_storage())
        before.append((geometry(x), memory, memory.clone()))
    few = [size] * (4 if size < 1 << 25 else 1)  # from there on the C library maps new pages
    sizes = range(size, size + 1024, 64) if size < 1 << 20 else few
    blocks = [torch.full((n,), 0xFF, dtype=torch.uint8, device=device) for n in sizes]
    del blocks
    results = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    for x, (form, memory, values) in zip(tensors, before, strict=True):
        assert geometry(x) == form
        assert_same_bits(memory, values)
        assert not any(share_memory(result, x) for result in tree_leaves(results))
    return results


def outcome(function, *arguments):
    """What the function returns, or the type and the first line of its error."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error), str(error).partition("\n")[0]


def unpacked(mask):
    """The bits of a mask, eight for each byte of its last dimension."""
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (mask.unsqueeze(-1) >> places & 1).bool().flatten(-2)


def assert_mask_of(out, mask):
    """A bit for each element of out, and zeros behind the last of a row."""
    bits = unpacked(mask)
    assert torch.equal(bits[:, : out.shape[1]], out > 0)
    assert not bits[:, out.shape[1] :].any()


def as_matrix(x):
    return torch.atleast_2d(x).flatten(0, -2)


def exact_gradients(x, weight, grad_z):
    """The gradients of x, weight and bias for that of the product, in float64."""
    rows, grads = as_matrix(x.double()), as_matrix(grad_z.double())
    return (grads @ weight.double()).view(x.shape), grads.t() @ rows, grads.sum(0)


def rounding_errors(x, weight, bias=None, unit=2.0**-24):
    """16 roundings, or sqrt(K) / 4, of a sum of x weight^T whose terms have random signs.

    By so much more than torch's may a split product err where it promises nothing: in sums so
    short, or of results so few, that luck and cuBLAS's partial sums decide who errs less.
    """
    x, weight = (t.double().nan_to_num(0, 0, 0).flatten(0, -2) for t in (x, weight))
    squares = x.square() @ weight.square().t()
    if bias is not None:
        squares = squares + bias.double().square()
    return max(16.0, x.size(-1) ** 0.5 / 4) * unit * squares.max().sqrt().item()


def assert_as_accurate(got, own, exact, slack=1.0, allowance=0.0):
    """Against `exact` got errs at most as `own`, torch's, does, and one rounding of half types.

    NaN and infinity must be where they are there. `slack` times torch's error, and `allowance`
    more, are let pass.
    """
    assert (got.dtype, got.shape, got.device) == (own.dtype, own.shape, own.device)
    if got.numel() == 0:
        return
    special = ~exact.to(got.dtype).isfinite()
    assert_same_bits(got[special], exact.to(got.dtype)[special])
    error, allowed = (
        (t.double() - exact).masked_fill(special, 0).abs().max().item() for t in (got, own)
    )
    if got.dtype in (torch.float16, torch.bfloat16):
        largest = exact.masked_fill(special, 0).abs().max().item()
        allowed += max(torch.finfo(got.dtype).eps * largest, torch.finfo(got.dtype).tiny) / 2
    allowed = slack * allowed + allowance
    assert error <= allowed, f"error {error:.3e}, torch's own {allowed:.3e}"
