"""Exact comparison of two tensors: their values, and whether they share memory."""

import torch

PIECE = 1 << 24  # elements that are compared at a time
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def first_mismatch(actual: torch.Tensor, expected: torch.Tensor, exact: bool = False) -> str | None:
    """Return how many elements of two tensors differ, and the first, in words; None if none does.

    Equal elements have the same bits. Unless `exact`, any NaN also equals any other (vectorised
    half types rewrite payloads), and +0 equals -0 (torch versions differ in the sign that relu
    returns). Everything is decided on integers: no NaN can slip through an inequality, and a
    processor that flushes subnormals to zero cannot hide one.

    Args:
        actual: the tensor that is checked.
        expected: what it should be, of the same shape, dtype and device.
        exact: every bit counts.
    """
    a, b = actual.reshape(-1), expected.reshape(-1)
    count = first = 0
    for start in range(0, len(a), PIECE):
        differs = _differs(a[start : start + PIECE], b[start : start + PIECE], exact)
        found = int(differs.sum())
        if found and not count:
            first = start + int(differs.view(torch.uint8).argmax())
        count += found
    if count == 0:
        return None
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), actual.shape)]
    values = f"got {a[first].item()}, expected {b[first].item()}"
    return f"{count:,} of {len(a):,} elements differ, the first at {index}: {values}"


def _differs(a: torch.Tensor, b: torch.Tensor, exact: bool) -> torch.Tensor:
    """Return a mask of where two flat tensors differ; an empty one if they are equal."""
    integer = INTEGERS[a.element_size()]
    x, y = a.view(integer), b.view(integer)
    if torch.equal(x, y):
        return torch.zeros(0, dtype=torch.bool)
    differs = x != y
    if a.is_floating_point() and not exact:
        infinity = torch.tensor(torch.inf, dtype=a.dtype).view(integer).item()
        x, y = (bits & torch.iinfo(integer).max for bits in (x, y))  # without the sign
        are_both_nan = (x > infinity) & (y > infinity)
        are_both_zero = (x | y) == 0
        differs &= ~are_both_nan & ~are_both_zero
    return differs


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the storages of two tensors overlap by at least one byte."""
    one, two = a.untyped_storage(), b.untyped_storage()
    start = max(one.data_ptr(), two.data_ptr())
    end = min(one.data_ptr() + one.nbytes(), two.data_ptr() + two.nbytes())
    return a.device == b.device and start < end
