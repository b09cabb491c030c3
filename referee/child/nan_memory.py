"""Fills memory with NaN, so that elements that the solution does not write are found.

Bytes 0xff are a NaN in every float dtype.

On a CPU, glibc's malloc chooses the memory of a result. It keeps freed blocks up to a threshold and
hands them out again. A larger block is new memory of the kernel's, with a page fault for each 4 KiB
when it is written. The threshold is the size of the largest such block that was freed, at most
32 MiB.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MAX_THRESHOLD = 32 << 20
FREED_FIRST_BYTES = 31 << 20  # just below the largest threshold
# A result of fewer bytes may get a free block that is up to LARGER_BYTES larger than itself.
SMALL_BYTES = 1 << 20
LARGER_BYTES = 1 << 10


def set_malloc_threshold() -> None:
    """Raise malloc's threshold, so that all processes have the same and times can be compared."""
    torch.empty(FREED_FIRST_BYTES, dtype=torch.uint8)  # freed at once


def fill_free_memory_with_nan(size: int, device: torch.device) -> None:
    """Fill free memory with NaN.

    The allocator probably uses this memory for a result of `size` bytes next. If the solution does
    not write its whole result, NaN stays in it.
    """
    # All blocks are held at once. Otherwise each would be the memory of the one before.
    blocks = [
        torch.empty(block_size, dtype=torch.uint8, device=device).fill_(0xFF)
        for block_size in _sizes_of_likely_blocks(size)
    ]
    del blocks  # the memory is free again


def _sizes_of_likely_blocks(size: int) -> list[int]:
    """Return the sizes of blocks of which the allocator probably takes one for a result.

    For 1,000 bytes these are 1,000, 1,064 and so on up to 1,960. Between SMALL_BYTES and
    MAX_THRESHOLD, the result may get any of several free blocks: for 2 MiB, four times 2 MiB.
    For 64 MiB the list has only 64 MiB: malloc keeps no such block, but a GPU's allocator does.
    """
    if size < SMALL_BYTES:
        return list(range(size, size + LARGER_BYTES, 64))
    if size < MAX_THRESHOLD:
        return [size] * 4
    return [size]


@contextmanager
def fill_new_tensors_with_nan() -> Iterator[None]:
    """Make torch.empty fill its tensors with NaN, for the time of a `with` block.

    torch does so in its deterministic mode. The debug mode "warn" of it allows nondeterministic
    functions. `torch.use_deterministic_algorithms` would do the same, but imports torch's compiler.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
