"""Fills memory with NaN, so that elements that the solution does not write are found.

Bytes 0xff are a NaN in every float dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# glibc's malloc takes a large block from the kernel anew, at a page fault for each 4 KiB, if it is
# larger than a threshold. The threshold grows with the largest block that was freed, up to 32 MiB.
# Every process frees a block of this size first so that all have the same threshold.
FREED_FIRST_BYTES = 31 << 20
# A result of fewer bytes may get a free block that is somewhat larger than itself.
SMALL_BYTES = 1 << 20
# A freed block of fewer bytes stays with malloc, whose threshold is about as large. A result may
# then get any of several free blocks.
KEPT_BY_MALLOC_BYTES = 32 << 20


def set_malloc_threshold() -> None:
    """Give malloc the threshold that all processes have, see FREED_FIRST_BYTES."""
    torch.empty(FREED_FIRST_BYTES, dtype=torch.uint8)  # freed at once


def poison_free_memory(size: int, device: torch.device) -> None:
    """Fill free memory with NaN; do nothing for the size 0.

    The allocator probably uses this memory for a result of `size` bytes next. If the solution does
    not write its whole result, NaN stays in it.
    """
    if size == 0:
        return
    # All blocks are held at once. Otherwise each would be the memory of the one before.
    blocks = [
        torch.empty(block_size, dtype=torch.uint8, device=device).fill_(0xFF)
        for block_size in _sizes_of_likely_blocks(size)
    ]
    del blocks  # the memory is free again


def _sizes_of_likely_blocks(size: int) -> list[int]:
    """Return the sizes of blocks of which the allocator probably takes one for a result.

    For 1,000 bytes these are 1,000, 1,064 and so on up to 1,960; for 2 MiB four times 2 MiB; and
    for 64 MiB only 64 MiB.
    """
    if size < SMALL_BYTES:
        return list(range(size, size + 1024, 64))
    if size < KEPT_BY_MALLOC_BYTES:
        return [size] * 4
    return [size]


@contextmanager
def nan_in_new_tensors() -> Iterator[None]:
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
