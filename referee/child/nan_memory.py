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


def set_malloc_threshold() -> None:
    """Give malloc the threshold that all processes have, see FREED_FIRST_BYTES."""
    torch.empty(FREED_FIRST_BYTES, dtype=torch.uint8)  # freed at once


def poison_free_memory(size: int, device: torch.device) -> None:
    """Fill free memory with NaN; do nothing for the size 0.

    The allocator probably uses this memory for a result of `size` bytes next. If the solution does
    not write its whole result, NaN stays in it.
    """
    if not size:
        return
    sizes = [size]
    if size < 1 << 20:
        # malloc may take a free block that is somewhat larger.
        sizes = list(range(size, size + 1024, 64))
    elif size < 1 << 25:
        # Freed blocks below malloc's threshold (about 32 MiB, see FREED_FIRST_BYTES) stay with
        # malloc. It may take any of several free ones.
        sizes = [size] * 4
    blocks = [torch.empty(n, dtype=torch.uint8, device=device).fill_(0xFF) for n in sizes]
    del blocks  # the memory is free again


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
