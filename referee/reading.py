"""Reads results where they lie in another process, which is stopped meanwhile.

A process describes a result by a dictionary: see `results.describe`.
Nothing of it is used without a check. What is not in memory when the process is stopped cannot get
there, so that a result that would be computed when somebody reads it is wrong, or cannot be read.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as ReadTimeoutError

import torch

from referee import cuda_ipc
from referee.memory import free_bytes
from referee.results import span_of

MOST_AT_ONCE = 1 << 30  # bytes of one call of process_vm_readv
SECONDS_FOR_A_READ = 30.0  # a read that takes longer waits for a page that will not come
LARGEST_NUMBER = 1 << 48  # of a side, a stride or an address
CPU = torch.device("cpu")


class UnreadableError(Exception):
    """The memory that a process named cannot be read; the message says why."""


class BadDescriptionError(Exception):
    """A process described a result in a way that no tensor can be; the message says how."""


class _IoVector(ctypes.Structure):
    """C's struct iovec."""

    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.POINTER(_IoVector),
    ctypes.c_ulong,
    ctypes.POINTER(_IoVector),
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def copy_memory(pid: int, address: int, size: int, target: int) -> None:
    """Copy bytes of another process's memory to an address of this one.

    Raises:
        UnreadableError: not all of them can be read.
    """
    done = 0
    while done < size:
        count = min(size - done, MOST_AT_ONCE)
        mine, theirs = _IoVector(target + done, count), _IoVector(address + done, count)
        got = _libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if got <= 0:
            raise UnreadableError(os.strerror(ctypes.get_errno()))
        done += got


def can_read(pid: int, address: int) -> bool:
    """Return whether the system lets this process read a byte of another's memory."""
    byte = ctypes.create_string_buffer(1)
    try:
        copy_memory(pid, address, 1, ctypes.addressof(byte))
    except UnreadableError:
        return False
    return True


def checked(description: dict) -> dict:
    """Return a description, after its shape, strides, address and dtype were checked.

    Raises:
        BadDescriptionError: no tensor can have them.
    """
    shape, strides = description.get("shape"), description.get("strides")
    numbers = [None]
    if isinstance(shape, list) and isinstance(strides, list) and len(shape) == len(strides):
        numbers = [*shape, *strides, description.get("address")]
    if not all(type(n) is int and 0 <= n < LARGEST_NUMBER for n in numbers):
        raise BadDescriptionError("its description has no valid shape, strides and address")
    if not isinstance(getattr(torch, str(description.get("dtype")), None), torch.dtype):
        raise BadDescriptionError("its dtype is none of torch's")
    return description


class Reader:
    """Reads the tensors of one process.

    Args:
        pid: the process.
        device: where its results lie, and where copies of them are made.
    """

    def __init__(self, pid: int, device: torch.device) -> None:
        self._pid = pid
        self._device = device
        self._opened: dict[str, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread = ThreadPoolExecutor(1)

    def whole(self, description: dict) -> torch.Tensor:
        """Return a described tensor.

        On a CPU it is a copy that is valid until the next read, on a GPU the process's own memory.

        Raises:
            BadDescriptionError: the description is not one of a tensor.
            UnreadableError: the memory is not there.
        """
        description = checked(description)
        dtype = getattr(torch, description["dtype"])
        size = span_of(description["shape"], description["strides"], dtype.itemsize)
        if self._device.type == "cuda":
            there = self._on_gpu(description, size, dtype.itemsize)
        else:
            there = self._on_cpu(description, size)
        made = torch.empty(0, dtype=dtype, device=there.device)
        return made.set_(there.untyped_storage(), 0, description["shape"], description["strides"])

    def elements(self, description: dict, places: torch.Tensor) -> torch.Tensor:
        """Return single elements of a described tensor, by their places in its flat order.

        Raises:
            BadDescriptionError, UnreadableError: as `whole` does.
        """
        description = checked(description)
        dtype = getattr(torch, description["dtype"])
        shape, strides = description["shape"], description["strides"]
        offsets = [_offset(place, shape, strides) for place in places.tolist()]
        if self._device.type == "cuda":
            size = span_of(shape, strides, dtype.itemsize)
            there = self._on_gpu(description, size, dtype.itemsize).view(dtype)
            return there[torch.tensor(offsets, device=self._device)]
        found = torch.empty(len(places), dtype=dtype)
        for i, offset in enumerate(offsets):
            address = description["address"] + offset * dtype.itemsize
            target = found.data_ptr() + i * dtype.itemsize
            copy_memory(self._pid, address, dtype.itemsize, target)
        return found

    def forget(self) -> None:
        """Give back what was opened, so that the process can free it."""
        for address in self._opened.values():
            cuda_ipc.close_handle(address)
        self._opened = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Forget everything; the process has ended or will be ended."""
        self.forget()
        self._thread.shutdown(wait=False)

    def _on_cpu(self, description: dict, size: int) -> torch.Tensor:
        """Return a copy of so many bytes that begin with a described tensor's first element."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            if size > free_bytes(CPU):
                raise UnreadableError(f"it spans {size:,} bytes, more than there is memory")
            self._buffer = torch.empty(size, dtype=torch.uint8)
        made = torch.empty(0, dtype=torch.uint8).set_(self._buffer.untyped_storage(), 0, (size,))
        target = self._buffer.data_ptr()
        reading = self._thread.submit(copy_memory, self._pid, description["address"], size, target)
        try:
            reading.result(timeout=SECONDS_FOR_A_READ)
        except ReadTimeoutError:
            raise UnreadableError(
                "a page of it does not come while the process is stopped"
            ) from None
        return made

    def _on_gpu(self, description: dict, size: int, item_bytes: int) -> torch.Tensor:
        """Return so many bytes that begin with a described tensor's first element, without a copy.

        An address between two elements would end this process's use of the GPU.
        """
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        handle, distance = description.get("handle"), description.get("distance")
        if not isinstance(handle, str) or type(distance) is not int:
            raise BadDescriptionError("its memory has no handle")
        if distance % item_bytes:
            raise BadDescriptionError("its address is no multiple of an element's size")
        try:
            if handle not in self._opened:
                self._opened[handle] = cuda_ipc.open_handle(handle)
            base = self._opened[handle]
            if distance < 0 or distance + size > cuda_ipc.size_of(base):
                raise BadDescriptionError("it reaches beyond its allocation")
        except (cuda_ipc.CudaError, ValueError) as error:
            raise UnreadableError(str(error)) from None
        return cuda_ipc.bytes_at(base + distance, size, self._device)


def _offset(place: int, shape: list[int], strides: list[int]) -> int:
    """Return how far an element is from the first in memory, in elements.

    In a transposed `[2, 3]`, of strides `[1, 2]`, element 1 in flat order has offset 2.
    """
    offset = 0
    for side, stride in zip(reversed(shape), reversed(strides), strict=True):
        offset += place % side * stride
        place //= side
    return offset
