"""The memory that the referee shares with contestants, in blocks.

On a CPU all blocks are parts of one file in memory (a memfd), which the referee and each contestant
map. On a GPU each block is an allocation of its own, which a contestant opens by CUDA IPC.
"""

import fcntl
import mmap
import os

import torch

from referee.contestants import cuda_ipc

POOL_BYTES = 1 << 40  # of the memfd; only pages that were written take memory
ALIGNMENT = 4096  # bytes: each block and each storage in it starts at a multiple of this
# A free block is reused only for a region that fills at least this part of it.
MIN_FILLED_PART = 0.25


def aligned(size: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def mapped_bytes(mapping: mmap.mmap, start: int, size: int) -> torch.Tensor:
    """Return bytes of a mapped file as a tensor, without a copy."""
    if size == 0:  # torch.frombuffer refuses it
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)


class Block:
    """Consecutive bytes of shared memory.

    Args:
        start: the first byte within the memory.
        size: in bytes.
        memory: the mapped memfd on a CPU, an allocation on a GPU.
    """

    def __init__(self, start: int, size: int, memory: "mmap.mmap | cuda_ipc.Allocation") -> None:
        self.start = start
        self.size = size
        self._memory = memory

    def bytes(self, start: int, size: int) -> torch.Tensor:
        """Return bytes of the block, without a copy, as a tensor with a storage of its own.

        Args:
            start: the first of the bytes, counted from the block's start.
            size: how many bytes.
        """
        if isinstance(self._memory, cuda_ipc.Allocation):
            return self._memory.bytes(start, size)
        return mapped_bytes(self._memory, self.start + start, size)

    def describe(self) -> dict:
        """Return the "memory" of a location: how a contestant's process reaches the block."""
        if isinstance(self._memory, cuda_ipc.Allocation):
            return {"handle": self._memory.handle}
        return {"start": self.start}


class Pool:
    """All memory that the referee shares with the contestants of one problem.

    Args:
        device: where contestants compute.

    Attributes:
        descriptor: the memfd's descriptor. Contestants' processes inherit and map the memfd.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.descriptor = os.memfd_create("referee", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(self.descriptor, POOL_BYTES)
        # A process that could shrink the file would end the referee with SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        self._mapping = mmap.mmap(self.descriptor, POOL_BYTES)
        self._end = 0  # bytes of the memfd that blocks have taken
        self._allocations: list[cuda_ipc.Allocation] = []
        self._free_blocks: list[Block] = []

    def block(self, size: int) -> Block:
        """Return a block of at least `size` bytes: the smallest free one that fits, or a new one.

        A block is never unmapped before `close`, because a contestant's process may still use it.
        """
        fitting_blocks = [
            block
            for block in self._free_blocks
            if MIN_FILLED_PART * block.size <= size <= block.size
        ]
        if fitting_blocks:
            smallest = min(fitting_blocks, key=lambda block: block.size)
            self._free_blocks.remove(smallest)
            return smallest
        if self._device.type == "cuda":
            allocation = cuda_ipc.Allocation(size, self._device)
            self._allocations.append(allocation)
            return Block(0, allocation.size, allocation)
        start = self._end
        self._end += aligned(size)
        return Block(start, size, self._mapping)

    def allocation(self, handle: object) -> cuda_ipc.Allocation | None:
        """Return the GPU allocation that has this handle; None if it is not the pool's."""
        for allocation in self._allocations:
            if allocation.handle == handle:
                return allocation
        return None

    def give_back(self, block: Block) -> None:
        """Take a block back so that another region can use it."""
        self._free_blocks.append(block)

    def free_stray_pages(self) -> None:
        """Free the pages of the memfd that no block has taken.

        A solution may have written there, and no limit of its process counts shared memory.
        """
        self._mapping.madvise(mmap.MADV_REMOVE, self._end, POOL_BYTES - self._end)

    def close(self) -> None:
        """Free the memory. All processes that mapped it must have ended or have forgotten it.

        This process's own mapping of the memfd ends with the last tensor over it.
        """
        for allocation in self._allocations:
            allocation.free()
        self._allocations = []
        os.close(self.descriptor)
