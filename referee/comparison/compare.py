"""Comparison of two tensors: their bits, their distance, and whether they share memory."""

import math
from collections.abc import Iterator, Sequence

import torch

BLOCK = 1 << 24  # elements that are compared at a time, to save memory
# Integer dtypes by their bytes. Elements of any dtype are compared as integers of the same size.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def blocks(length: int) -> Iterator[slice]:
    """Yield slices of at most BLOCK elements which together cover a flat tensor."""
    for start in range(0, length, BLOCK):
        yield slice(start, start + BLOCK)


def flat_reals(x: torch.Tensor) -> torch.Tensor:
    """Return the elements as a flat tensor; a complex one as its real and its imaginary part."""
    flat = x.detach().reshape(-1)
    return torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat


def first_true(mask: torch.Tensor) -> int:
    """Return the position of the first true element of a flat mask, which must have one."""
    for block in blocks(len(mask)):
        if mask[block].any():
            return block.start + int(mask[block].view(torch.uint8).argmax())
    raise ValueError("no element is true")


def describe_index(position: int, shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return where an element of `flat_reals(x)` is in x, for messages.

    Example: for x of shape [2, 3], the element at position 5 is "[1, 2]". If x is complex, each of
    its elements is two reals, and position 5 is the imaginary part of the third: "[0, 2].imag".

    Args:
        position: the index in the flat tensor.
        shape: the shape of x.
        dtype: the dtype of x.
    """
    part = ""
    if dtype.is_complex:
        position, is_imaginary = divmod(position, 2)
        part = ".imag" if is_imaginary else ".real"
    index = [int(i) for i in torch.unravel_index(torch.tensor(position), shape)]
    return f"{index}{part}"


def describe_values(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Return two values in words, with enough digits to tell neighbours in got's dtype apart.

    Args:
        got: a tensor of one element.
        expected: likewise.
    """
    if got.is_floating_point() and got.dtype != torch.float64:
        return f"got {got.item():.9g}, expected {expected.item():.9g}"
    return f"got {got.item()}, expected {expected.item()}"


def first_mismatch(
    actual: torch.Tensor, expected: torch.Tensor, bitwise: bool = False
) -> str | None:
    """Return in words how many elements differ, and the first of them; None if all are equal.

    Elements are equal if their bits are. Unless `bitwise` is true, two more kinds are equal:

    - any two NaNs, because vectorised half-type code rewrites their payloads;
    - +0 and -0, because torch's versions differ in the sign that relu returns.

    The bits are compared as integers. So no NaN slips through an inequality, and a processor that
    flushes subnormals to zero hides none.

    Args:
        actual: the tensor that is checked; it may be flat.
        expected: the right values, of the same size, dtype and device. Its shape is the message's.
        bitwise: whether every bit counts.
    """
    a, b = flat_reals(actual), flat_reals(expected)
    count = first = 0
    for block in blocks(len(a)):
        differs = _differs(a[block], b[block], bitwise)
        count_here = int(differs.sum())
        if count_here and not count:
            first = block.start + first_true(differs)
        count += count_here
    if count == 0:
        return None
    index = describe_index(first, expected.shape, expected.dtype)
    values = describe_values(a[first], b[first])
    return f"{count:,} of {len(a):,} elements differ, the first at {index}: {values}"


def _differs(a: torch.Tensor, b: torch.Tensor, bitwise: bool) -> torch.Tensor:
    """Return a mask of the elements that differ; an empty mask if two flat tensors are equal."""
    integer = INTEGERS[a.element_size()]
    a_bits, b_bits = a.view(integer), b.view(integer)
    if torch.equal(a_bits, b_bits):
        return torch.zeros(0, dtype=torch.bool)
    differs = a_bits != b_bits
    if a.is_floating_point() and not bitwise:
        infinity = torch.tensor(torch.inf, dtype=a.dtype).view(integer).item()
        all_but_sign = torch.iinfo(integer).max
        a_magnitude, b_magnitude = a_bits & all_but_sign, b_bits & all_but_sign
        are_both_nan = (a_magnitude > infinity) & (b_magnitude > infinity)
        are_both_zero = (a_magnitude | b_magnitude) == 0
        differs &= ~are_both_nan & ~are_both_zero
    return differs


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the storages of two tensors overlap by at least one byte."""
    one, two = a.untyped_storage(), b.untyped_storage()
    start = max(one.data_ptr(), two.data_ptr())
    end = min(one.data_ptr() + one.nbytes(), two.data_ptr() + two.nbytes())
    return a.device == b.device and start < end


def relative_difference(x: torch.Tensor, y: torch.Tensor, where_finite: bool = False) -> float:
    """Return |x - y| / |y|, with Frobenius norms; for integers, the share of elements that differ.

    Elements that are not finite count as zeros.

    Args:
        x: a tensor.
        y: the tensor with which it is compared. The result is inf if its shape is another, or if it
            is zero and x is not.
        where_finite: whether elements are left out if they are not finite in y.
    """
    if x.shape != y.shape:
        return math.inf
    x, y = flat_reals(x), flat_reals(y)
    if not y.is_floating_point():
        return int((x != y).sum()) / max(len(x), 1)
    squared_distance = squared_norm = 0.0
    for block in blocks(len(x)):
        x_part, y_part = x[block].double(), y[block].double()
        if where_finite:
            x_part = torch.where(y_part.isfinite(), x_part, y_part)
        x_part, y_part = x_part.nan_to_num(0, 0, 0), y_part.nan_to_num(0, 0, 0)
        squared_distance += (x_part - y_part).square_().sum().item()
        squared_norm += y_part.square().sum().item()
    if squared_norm == 0:
        return math.inf if squared_distance else 0.0
    return math.sqrt(squared_distance / squared_norm)
