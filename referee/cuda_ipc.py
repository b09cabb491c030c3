"""GPU memory that two processes share by CUDA's IPC handles, through the driver's library.

Both sides use this module. torch's functions for the same purpose are not used: they send
files, counters and events along, all of which a hostile process could make up. A handle is 64 bytes
that name one allocation; the driver opens it or refuses.
"""

import ctypes
from functools import cache

import torch

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CudaError(Exception):
    """A call of the driver failed; the message names it and its status."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise CudaError(f"{name} failed with status {status}")


def bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return a tensor of the bytes at an address, without a copy; it does not own them."""
    made = torch.empty(0, dtype=torch.uint8, device=device)
    if size == 0:
        return made
    # torch's public ways to do so need NumPy, or a capsule of DLPack for every tensor.
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return made.set_(storage, 0, (size,), (1,))


class Allocation:
    """Memory of a GPU that belongs to the referee and is shared as a whole.

    It is not torch's: torch puts several tensors into one allocation, and a handle opens all of it.

    Attributes:
        handle: by which another process opens it, as a hexadecimal text.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        torch.zeros(1, device=device)  # makes torch's context the current one
        self._device = device
        self._address = ctypes.c_uint64()
        try:
            self._allocate(size)
        except CudaError:
            torch.cuda.empty_cache()  # torch's allocator keeps memory that it does not use
            try:
                self._allocate(size)
            except CudaError as error:
                raise torch.OutOfMemoryError(f"{size:,} bytes on {device}: {error}") from None
        self.handle = _handle_of(self._address.value)

    def _allocate(self, size: int) -> None:
        _call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(size))

    def bytes(self, start: int, size: int) -> torch.Tensor:
        """Return a part of the allocation, without a copy."""
        return bytes_at(self._address.value + start, size, self._device)

    def free(self) -> None:
        """Free the allocation."""
        _call("cuMemFree_v2", self._address)


def _handle_of(address: int) -> str:
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle).hex()


def export(address: int) -> tuple[str, int]:
    """Return the handle of the allocation that an address lies in, and its distance from the start.

    Raises:
        CudaError: the memory cannot be shared, as that of `cudaMallocAsync`.
    """
    base, _ = _allocation_at(address)
    return _handle_of(base), address - base


def open_handle(handle: str) -> int:
    """Return the address at which this process now sees another's allocation.

    Raises:
        CudaError: there is no such allocation.
    """
    data = bytes.fromhex(handle)
    if len(data) != HANDLE_BYTES:
        raise CudaError("a handle of the wrong size")
    structure = _Handle.from_buffer_copy(data)
    address = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), structure, LAZY_ENABLE_PEER_ACCESS)
    return address.value


def size_of(address: int) -> int:
    """Return the bytes of the allocation that begins at an address, opened or this process's."""
    _, size = _allocation_at(address)
    return size


def _allocation_at(address: int) -> tuple[int, int]:
    """Return the start and the bytes of the allocation that an address is in."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call(
        "cuMemGetAddressRange_v2",
        ctypes.byref(start),
        ctypes.byref(size),
        ctypes.c_uint64(address),
    )
    return start.value, size.value


def close_handle(address: int) -> None:
    """Forget another process's allocation that was opened at this address."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
