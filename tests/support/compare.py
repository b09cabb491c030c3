"""Comparisons that several tests share: of bits, and of errors against float64."""

import platform

import torch
from torch.utils._pytree import tree_leaves

from referee.comparison.compare import share_memory

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_bits(x):
    """Return the bits of x as integers."""
    return x.contiguous().view(BITS[x.element_size()])


def bits(x):
    """Return the bits of x as integers, with the same pattern for every NaN."""
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return raw_bits(x)


def relu_by_definition(x):
    """Return x < 0 ? 0 : x, which keeps -0.0 and the bits of every NaN.

    torch.relu may change these (`torch_may_change_bits` says where).
    """
    return torch.where(x < 0, torch.zeros_like(x), x)


def assert_same_bits(got, want):
    """Assert that two tensors have the same dtype, device, shape and bits; any two NaN are equal.

    If `got` and `want` are sequences of tensors, their tensors are compared in pairs.
    """
    if not isinstance(want, torch.Tensor):
        for pair in zip(got, want, strict=True):
            assert_same_bits(*pair)
        return
    got = got.detach()
    want = want.detach()
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


def torch_may_change_bits(x):
    """Return where torch.relu(x) may have other bits than our kernels, which keep those of x.

    These are NaN and, on a GPU, -0.0. On an x86 CPU they are only the NaN of half types, which
    torch converts to float32 and back.
    """
    if not x.is_floating_point():
        return torch.zeros_like(x, dtype=torch.bool)
    if x.is_cuda:
        return x.isnan() | (x == 0)
    if x.element_size() > 2 and platform.machine() == "x86_64":
        return torch.zeros_like(x, dtype=torch.bool)
    return x.isnan()


def assert_is_relu(got, x):
    """Assert that `got` is a correct result of our ReLU, and has memory of its own.

    Its bits, those of NaN included, are the definition's. They are also torch.relu's, except where
    torch may change the bits of x. The strides are torch's.
    """
    want = relu_by_definition(x)
    assert_same_bits(got, want)  # its message shows the first element that differs
    assert torch.equal(raw_bits(got.detach()), raw_bits(want))
    reference = torch.relu(x)
    differs = raw_bits(got.detach()) != raw_bits(reference)
    assert not (differs & ~torch_may_change_bits(x)).any()
    assert torch.equal(got.isnan(), reference.isnan())
    assert got.stride() == reference.stride()
    if x.numel():
        assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def whole_memory(x):
    """Return all memory of a tensor as bytes, with the gaps of a strided view."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def fill_free_memory(size, device):
    """Fill free memory with 0xff, which is NaN in every float dtype.

    A new tensor of about `size` bytes then holds NaN until it is written.
    """
    if size < 1 << 20:  # the C library may return any of its small blocks
        sizes = range(size, size + 1024, 64)
    elif size < 1 << 25:
        sizes = [size] * 4
    else:  # the C library maps new pages for these
        sizes = [size]
    blocks = [torch.full((n,), 0xFF, dtype=torch.uint8, device=device) for n in sizes]
    del blocks


def checked_call(call, tensors, size):
    """Return the results of a call; assert that they have new memory, and no tensor has changed.

    If the call leaves an element of its result unwritten, the caller's comparison finds a NaN there
    (`fill_free_memory`).

    Args:
        call: a function without arguments; it returns a tensor, or several.
        tensors: the tensors that the call must not change.
        size: about the number of bytes of a result.
    """

    def geometry(x):
        return x.shape, x.stride(), x.data_ptr()

    device = tensors[0].device
    before = [(geometry(x), whole_memory(x).clone()) for x in tensors]
    fill_free_memory(size, device)
    results = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    for x, (old_geometry, old_memory) in zip(tensors, before, strict=True):
        assert geometry(x) == old_geometry
        assert_same_bits(whole_memory(x), old_memory)
        assert not any(share_memory(result, x) for result in tree_leaves(results))
    return results


def outcome(function, *arguments):
    """Return the function's result, or the type and the first line of its error."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error), str(error).partition("\n")[0]


def unpack_mask(mask):
    """Return the bits of a mask as booleans: eight for each byte, the lowest bit first."""
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (mask.unsqueeze(-1) >> places & 1).bool().flatten(-2)


def assert_mask_of(out, mask):
    """Assert that the mask's bits are `out > 0`, and that each row ends with bits of zero."""
    unpacked = unpack_mask(mask)
    columns = out.shape[1]
    assert torch.equal(unpacked[:, :columns], out > 0)
    assert not unpacked[:, columns:].any()


def as_matrix(x):
    """Return x as a matrix: all dimensions but the last become one."""
    return torch.atleast_2d(x).flatten(0, -2)


def exact_gradients(x, weight, grad_z):
    """Return the gradients of x, weight and bias in float64.

    `grad_z` is the gradient of z = x weight^T + bias.
    """
    rows = as_matrix(x.double())
    grads = as_matrix(grad_z.double())
    return (grads @ weight.double()).view(x.shape), grads.t() @ rows, grads.sum(0)


def rounding_errors(x, weight, bias=None, unit=2.0**-24):
    """Return an allowance for sums that are too short for a promise.

    In such a sum, or with few results, chance and cuBLAS's partial sums decide whether our product
    or torch's errs less. So ours may err by a few roundings more: by 16 of them, or sqrt(K) / 4 if
    that is more.

    Args:
        x: the product's first operand; in all operands, NaN and infinities count as zeros.
        weight: the second one.
        bias: the bias, or None.
        unit: the largest relative error of one rounding.

    Returns:
        The largest error that so many roundings of a sum may cause if its terms have random signs.
    """
    x, weight = (t.double().nan_to_num(0, 0, 0).flatten(0, -2) for t in (x, weight))
    squares = x.square() @ weight.square().t()
    if bias is not None:
        squares = squares + bias.double().square()
    return max(16.0, x.size(-1) ** 0.5 / 4) * unit * squares.max().sqrt().item()


def assert_as_accurate(got, torch_result, exact, slack=1.0, allowance=0.0):
    """Assert that the largest error of `got` is at most `slack` times torch's plus `allowance`.

    Half types may err by one rounding more. NaN and infinities must be those of `exact`.

    Args:
        got: our result.
        torch_result: torch's result.
        exact: the result in float64.
        slack: a factor.
        allowance: an absolute error.
    """
    assert got.dtype == torch_result.dtype
    assert got.shape == torch_result.shape
    assert got.device == torch_result.device
    if got.numel() == 0:
        return
    special = ~exact.to(got.dtype).isfinite()
    assert_same_bits(got[special], exact.to(got.dtype)[special])

    def largest(values):
        return values.masked_fill(special, 0).abs().max().item()

    error = largest(got.double() - exact)
    torch_error = largest(torch_result.double() - exact)
    if got.dtype in (torch.float16, torch.bfloat16):
        info = torch.finfo(got.dtype)
        torch_error += max(info.eps * largest(exact), info.tiny) / 2
    allowed = slack * torch_error + allowance
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}"
