"""GPU memory that two processes share by CUDA IPC, through the driver's library.

    owner of the memory                       other process

    export(address)  -> handle, byte_offset   open_handle(handle)  -> base, its own address
                                              bytes_at(base + byte_offset, size, device)
                                              close_handle(base)

A handle is 64 bytes that name one allocation; the driver opens it or refuses. The byte offset is
counted from the allocation's start to the address.

The referee's process and the contestant's both use this module. torch has functions for the same
purpose, but these also send files, counters and events, which a hostile process could forge.
"""

import ctypes
import math
from functools import cache

import torch

HANDLE_BYTES = 64
# The driver puts smaller allocations together into blocks of this size, and a handle opens a block.
DRIVER_BLOCK_BYTES = 2 << 20
LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class _Handle(ctypes.Structure):
    """C's struct CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaError(Exception):
    """A driver function has failed; the message has its name and status."""


@cache
def _driver() -> ctypes.CDLL:
    """Return the driver's library, loaded at the first call."""
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Call a driver function by its name; raise CudaError if it fails."""
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise CudaError(f"{name} failed with status {status}")


def bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the bytes at an address as a tensor, without a copy; the tensor does not own them."""
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    if size == 0:
        return empty
    # The public functions of torch for this need NumPy or a DLPack capsule for every tensor.
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return empty.set_(storage, 0, (size,), (1,))


class Allocation:
    """GPU memory of the referee's that another process can open as a whole.

    It does not come from torch's allocator, which puts several tensors into one allocation: a
    handle opens a whole allocation. Nothing else is in the driver's blocks that it takes.

    Args:
        size: in bytes.
        device: a GPU.

    Attributes:
        size: in bytes, a multiple of DRIVER_BLOCK_BYTES.
        handle: in hexadecimal; another process opens the memory with it.

    Raises:
        torch.OutOfMemoryError: the GPU has no room.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        torch.zeros(1, device=device)  # makes torch's context the current one
        self.size = math.ceil(size / DRIVER_BLOCK_BYTES) * DRIVER_BLOCK_BYTES
        self._device = device
        self._address = ctypes.c_uint64()
        try:
            self._allocate()
        except CudaError:
            torch.cuda.empty_cache()  # torch's allocator gives back what it keeps for later
            try:
                self._allocate()
            except CudaError as error:
                raise torch.OutOfMemoryError(f"{size:,} bytes on {device}: {error}") from None
        self.handle = _handle_of(self._address.value)

    def _allocate(self) -> None:
        """Allocate with the driver; raise CudaError if it refuses."""
        _call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(self.size))

    def bytes(self, start: int, size: int) -> torch.Tensor:
        """Return `size` bytes from byte `start` of the allocation, without a copy."""
        return bytes_at(self._address.value + start, size, self._device)

    def free(self) -> None:
        """Free the allocation."""
        _call("cuMemFree_v2", self._address)


def _handle_of(address: int) -> str:
    """Return the handle, in hexadecimal, of the allocation that starts at an address."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle).hex()


def export(address: int) -> tuple[str, int]:
    """Return the handle of the allocation that contains an address, and the byte offset.

    Example: for the address 0x7f0000000200 in an allocation that starts at 0x7f0000000000, the
    byte offset is 0x200.

    Raises:
        CudaError: the memory cannot be shared; memory of `cudaMallocAsync` never can.
    """
    base, _ = _allocation_at(address)
    return _handle_of(base), address - base


def open_handle(handle: str) -> int:
    """Open another process's allocation; return its start address in this process.

    Raises:
        CudaError: there is no such allocation, or the handle has not 64 bytes.
        ValueError: the handle is not hexadecimal.
    """
    data = bytes.fromhex(handle)
    if len(data) != HANDLE_BYTES:
        raise CudaError("the handle has the wrong size")
    structure = _Handle.from_buffer_copy(data)
    address = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), structure, LAZY_ENABLE_PEER_ACCESS)
    return address.value


def size_of(address: int) -> int:
    """Return the size in bytes of the allocation at an address, opened or this process's own."""
    _, size = _allocation_at(address)
    return size


def _allocation_at(address: int) -> tuple[int, int]:
    """Return the start and the size in bytes of the allocation that contains an address."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call(
        "cuMemGetAddressRange_v2",
        ctypes.byref(start),
        ctypes.byref(size),
        ctypes.c_uint64(address),
    )
    return start.value, size.value


def close_handle(address: int) -> None:
    """Close another process's allocation, which `open_handle` opened at this address."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
