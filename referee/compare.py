"""Exact comparison of two tensors: layout, values, memory."""

from dataclasses import dataclass

import torch

_equal, _storage = torch.equal, torch.Tensor.untyped_storage

CHUNK = 1 << 24  # elements at a time: the masks of a 6 GB tensor stay within 0.5 GB
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True)
class Mismatch:
    """Elements that differ: how many, of how many, and the first of them."""

    count: int
    total: int
    index: tuple[int, ...]
    got: float
    expected: float

    def __str__(self) -> str:
        return (
            f"{self.count:,} of {self.total:,} elements differ, the first at "
            f"{list(self.index)}: got {self.got}, expected {self.expected}"
        )


def first_mismatch(
    actual: torch.Tensor, expected: torch.Tensor, exact: bool = False
) -> Mismatch | None:
    """Compares two tensors of one shape, dtype and device; None if they are equal.

    Equal means the same bits. Unless `exact`, any NaN also answers a NaN (vectorised half types
    rewrite payloads), and +0 answers -0 (torch versions differ in the sign that relu returns).
    Everything is decided on integers: no NaN can slip through an inequality, and a processor
    that flushes subnormals to zero cannot hide one.
    """
    a, b = actual.reshape(-1), expected.reshape(-1)
    total, count, first = a.numel(), 0, -1
    for start in range(0, total, CHUNK):
        differs = _differences(a[start : start + CHUNK], b[start : start + CHUNK], exact)
        if differs is not None:
            found = int(differs.sum())
            if found and not count:
                first = start + int(differs.to(torch.uint8).argmax())
            count += found
    if not count:
        return None
    index = _unravel(first, actual.shape)
    return Mismatch(count, total, index, a[first].item(), b[first].item())


def layout_mismatch(actual: object, expected: torch.Tensor, what: str = "output") -> str | None:
    """Differences in type, dtype, device, shape or strides, in words; None if there are none."""
    if type(actual) is not type(expected):
        return f"the {what} is a {type(actual).__name__}, not a {type(expected).__name__}"
    for name in ("dtype", "device", "shape"):
        got, want = getattr(actual, name), getattr(expected, name)
        if got != want:
            return f"the {what}'s {name} is {got}, expected {want}"
    if actual.stride() != expected.stride():
        return f"the {what}'s strides are {actual.stride()}, expected {expected.stride()}"
    return None


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the storages of two tensors overlap by at least one byte."""
    one, two = _storage(a), _storage(b)
    start = max(one.data_ptr(), two.data_ptr())
    end = min(one.data_ptr() + one.nbytes(), two.data_ptr() + two.nbytes())
    return a.device == b.device and start < end


def _differences(a: torch.Tensor, b: torch.Tensor, exact: bool) -> torch.Tensor | None:
    """A mask of what differs in two flat tensors; None is the quick answer for equal bits."""
    integer = INTEGERS[a.element_size()]
    x, y = a.view(integer), b.view(integer)
    if _equal(x, y):
        return None
    differs = x != y
    if exact or not a.is_floating_point():
        return differs
    infinity = torch.tensor(torch.inf, dtype=a.dtype).view(integer).item()
    x, y = (bits & torch.iinfo(integer).max for bits in (x, y))  # without the sign
    return differs & ~((x > infinity) & (y > infinity)) & ((x | y) != 0)


def _unravel(position: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, remainder = divmod(position, size)
        index.append(remainder)
    return tuple(reversed(index))
