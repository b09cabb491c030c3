"""Reads results in the memory of a contestant's process, which is stopped.

The process describes each result by a dictionary, see `descriptions.describe`: shape, strides,
dtype, and an address or an IPC handle. The referee checks the description before it uses it.

The process cannot compute while it is stopped. A result that it would compute when somebody reads
it is therefore wrong or unreadable.
"""

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as ReadTimeoutError
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from referee.contestants import cuda_ipc
from referee.contestants.descriptions import span_of
from referee.contestants.free_memory import free_bytes
from referee.contestants.libc import error_of_last_call, libc
from referee.contestants.pool import Pool

Key = TypeVar("Key", bound=Hashable)
COPIED_AT_ONCE = 1 << 30  # bytes that one call of process_vm_readv copies
# An entry of /proc/PID/pagemap, and its bit for a page that is in memory: see proc_pid_pagemap(5).
PAGEMAP_BYTES = 8
PAGE_IS_PRESENT = 1 << 63
MAX_VECTORS = 1024  # pieces of memory that one call of process_vm_readv copies; Linux's IOV_MAX
# A longer read waits for a page that the stopped process itself would have to fill.
MAX_READ_SECONDS = 30.0
NO_PAGE = "a page of it does not come while the process is stopped"
CANNOT_SHARE = "CUDA IPC cannot share its memory; use memory that torch allocates"
MAX_NUMBER = 1 << 48  # sides, strides and addresses must be smaller
# A copy of a result with large gaps between its elements may take this part of the free memory.
SHARE_FOR_GAPS = 0.25
# The dtypes with which torch computes; it has no kernels for "bits8" and others.
DTYPES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
}
# By the bytes of an element. torch 2.9 has no kernels that index float8 or unsigned integers.
INDEXABLE_DTYPES = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
CPU = torch.device("cpu")


class UnreadableError(Exception):
    """The memory of a result cannot be read; the message says why."""


class BadDescriptionError(Exception):
    """A process's description of a result fits no tensor; the message says how."""


class Layout(NamedTuple):
    """A description of a result whose numbers and dtype were checked: some tensor may have them.

    Attributes:
        shape, strides, dtype: of the tensor.
        address: of its first element, in the process.
        handle, byte_offset: of its memory on a GPU, not yet checked; None on a CPU.
    """

    shape: list[int]
    strides: list[int]
    dtype: torch.dtype
    address: int
    handle: object
    byte_offset: object

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """The bytes from the first element to the last, both included."""
        return span_of(self.shape, self.strides, self.dtype.itemsize)

    def offsets(self, indices: list[int]) -> list[int]:
        """Return how far elements are from the first one in memory, counted in elements."""
        return [memory_offset(index, self.shape, self.strides) for index in indices]


class SomeElements(NamedTuple):
    """Some elements of a tensor in a process's memory.

    Attributes:
        description: the tensor's description, not yet checked.
        indices: the elements' indices in the flattened tensor.
    """

    description: dict
    indices: list[int]


class _Places(NamedTuple):
    """Where some elements of a tensor are in a process's memory.

    Attributes:
        addresses: the address of each element.
        item_bytes: the bytes of an element.
    """

    addresses: list[int]
    item_bytes: int

    @property
    def size(self) -> int:
        """The bytes of all elements."""
        return len(self.addresses) * self.item_bytes


class _IoVector(ctypes.Structure):
    """C's struct iovec."""

    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


libc.process_vm_readv.restype = ctypes.c_ssize_t
libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.POINTER(_IoVector),
    ctypes.c_ulong,
    ctypes.POINTER(_IoVector),
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def copy_memory(pid: int, address: int, size: int, target: int) -> None:
    """Copy memory of another process into this one.

    Args:
        pid: the other process.
        address: the address of the first byte there.
        size: how many bytes.
        target: the address in this process.

    Raises:
        UnreadableError: some of the bytes cannot be read.
    """
    done = 0
    while done < size:
        asked = min(size - done, COPIED_AT_ONCE)
        local, remote = _IoVector(target + done, asked), _IoVector(address + done, asked)
        copied = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if copied <= 0:
            raise UnreadableError(error_of_last_call().strerror)
        done += copied


def copy_scattered(pid: int, remote: list[_IoVector], target: int) -> None:
    """Copy pieces of another process's memory into this one, one after the other.

    Args:
        pid: the other process.
        remote: the pieces.
        target: the address in this process.

    Raises:
        UnreadableError: some of the bytes cannot be read.
    """
    for first in range(0, len(remote), MAX_VECTORS):
        vectors = remote[first : first + MAX_VECTORS]
        size = sum(vector.size for vector in vectors)
        array = (_IoVector * len(vectors))(*vectors)
        local = _IoVector(target, size)
        copied = libc.process_vm_readv(pid, ctypes.byref(local), 1, array, len(vectors), 0)
        if copied != size:  # after a part, no error is set
            reason = error_of_last_call().strerror if copied < 0 else "Bad address"
            raise UnreadableError(reason)
        target += size


def _are_present(pid: int, remote: list[_IoVector]) -> bool:
    """Return whether all pages of pieces of a process's memory are in the machine's memory.

    The pieces are elements, so none is longer than a page. If it cannot be found out, they count as
    absent.
    """
    pages = set()
    for vector in remote:
        start = vector.start or 0  # ctypes returns None for the address 0
        pages.add(start // mmap.PAGESIZE)
        pages.add((start + vector.size - 1) // mmap.PAGESIZE)
    try:
        with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
            entries = [
                os.pread(pagemap.fileno(), PAGEMAP_BYTES, page * PAGEMAP_BYTES) for page in pages
            ]
    except OSError:
        return False
    return all(int.from_bytes(entry, sys.byteorder) & PAGE_IS_PRESENT for entry in entries)


def layout_of(description: dict) -> Layout:
    """Check the shape, strides, address and dtype of a description, and return them.

    Raises:
        BadDescriptionError: no tensor can have them.
    """
    shape, strides = description.get("shape"), description.get("strides")
    are_lists = isinstance(shape, list) and isinstance(strides, list)
    is_valid = are_lists and len(shape) == len(strides)
    if is_valid:
        numbers = [*shape, *strides, description.get("address")]
        # isinstance would accept True, which is an int, too.
        is_valid = all(type(n) is int and 0 <= n < MAX_NUMBER for n in numbers)
    if not is_valid:
        raise BadDescriptionError("its description has no valid shape, strides and address")
    dtype = description.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES or not hasattr(torch, dtype):
        raise BadDescriptionError("its dtype is none that torch computes with")
    handle, byte_offset = description.get("handle"), description.get("byte_offset")
    address = description["address"]
    return Layout(shape, strides, getattr(torch, dtype), address, handle, byte_offset)


class Reader:
    """Reads results in one process's memory.

    Args:
        pid: the process.
        device: where its results are.
        pool: the referee's own memory, which the process has opened. A gradient may be there: that
            of x in x + 1 is the gradient of the output itself.
    """

    def __init__(self, pid: int, device: torch.device, pool: Pool) -> None:
        self._pid = pid
        self._device = device
        self._pool = pool
        self._address_of: dict[str, int] = {}  # where a GPU's allocations are open, by handle
        self._buffer = torch.empty(0, dtype=torch.uint8)  # a CPU's results are copied here
        self._thread = ThreadPoolExecutor(1)  # runs copies so that they can have a time limit
        self._waits_for_ever = False  # a copy has exceeded the limit, and the thread still waits

    def read_whole(self, description: dict) -> torch.Tensor:
        """Return the tensor that a description describes.

        On a CPU the tensor is a copy, which the next call overwrites. On a GPU it is the process's
        own memory.

        Raises:
            BadDescriptionError: the description fits no tensor.
            UnreadableError: the memory cannot be read.
        """
        layout = layout_of(description)
        is_gpu = self._device.type == "cuda"
        data = self._map_gpu_bytes(layout) if is_gpu else self._copy_bytes(layout)
        empty = torch.empty(0, dtype=layout.dtype, device=data.device)
        return empty.set_(data.untyped_storage(), 0, layout.shape, layout.strides)

    def read_elements(self, wanted: dict[Key, SomeElements]) -> dict[Key, torch.Tensor]:
        """Return the bytes of some elements of several tensors.

        All elements come in one copy, because hundreds of small ones would take long.

        Args:
            wanted: the tensors and the elements, by any keys.

        Returns:
            By the same keys, the bytes of each tensor's elements, one after the other. A tensor is
            left out if there is none such as described, or if its memory cannot be read.
        """
        if self._device.type == "cuda":
            return self._read_gpu_elements(wanted)
        places_of = {}
        for key, elements in wanted.items():
            with suppress(BadDescriptionError):
                places_of[key] = _find_places(elements)
        try:
            return self._copy_places(places_of)
        except UnreadableError:  # one after the other, to find those that can be read
            bytes_of = {}
            for key, places in places_of.items():
                with suppress(UnreadableError):
                    bytes_of |= self._copy_places({key: places})
            return bytes_of

    def _read_gpu_elements(self, wanted: dict[Key, SomeElements]) -> dict[Key, torch.Tensor]:
        """Do for a GPU what `read_elements` does."""
        pieces_of = {}
        for key, elements in wanted.items():
            with suppress(BadDescriptionError, UnreadableError):
                pieces_of[key] = self._map_gpu_elements(elements)
        pieces = [piece for its_pieces in pieces_of.values() for piece in its_pieces]
        if not pieces:
            return {}
        sizes = {key: sum(map(len, its_pieces)) for key, its_pieces in pieces_of.items()}
        return _split(torch.cat(pieces).cpu(), sizes)

    def _map_gpu_elements(self, elements: SomeElements) -> list[torch.Tensor]:
        """Return the bytes of each element without a copy.

        Raises:
            BadDescriptionError, UnreadableError: as `read_whole` does.
        """
        layout = layout_of(elements.description)
        data = self._map_gpu_bytes(layout)
        return bytes_of_elements(data, layout.offsets(elements.indices), layout.dtype.itemsize)

    def _copy_places(self, places_of: dict[Key, "_Places"]) -> dict[Key, torch.Tensor]:
        """Return copies of the bytes at several tensors' places.

        Raises:
            UnreadableError: some of the bytes cannot be read.
        """
        remote = [
            _IoVector(address, places.item_bytes)
            for places in places_of.values()
            for address in places.addresses
        ]
        sizes = {key: places.size for key, places in places_of.items()}
        values = torch.empty(sum(sizes.values()), dtype=torch.uint8)
        if _are_present(self._pid, remote):  # no page can be waited for, so no thread is needed
            copy_scattered(self._pid, remote, values.data_ptr())
        else:
            self._within_limit(lambda: copy_scattered(self._pid, remote, values.data_ptr()))
        return _split(values, sizes)

    def can_read(self, description: dict) -> bool:
        """Return whether the tensor that a description describes can be read; forget it."""
        try:
            self.read_whole(description)
        except (BadDescriptionError, UnreadableError):
            return False
        finally:
            self.forget()
        return True

    def forget(self) -> None:
        """Close all GPU allocations of the process so that it can free them; free the CPU copy."""
        for address in self._address_of.values():
            cuda_ipc.close_handle(address)
        self._address_of = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Free everything; the process has ended, or the caller ends it now."""
        self.forget()
        self._thread.shutdown(wait=False)

    def _copy_bytes(self, layout: Layout) -> torch.Tensor:
        """Return a copy of a tensor's memory in the process."""
        size = layout.span
        if self._buffer.numel() < size:
            self._make_buffer(size, layout.numel * layout.dtype.itemsize)
        # The copy keeps this buffer alive. It may still write after the time limit, and after
        # `self._buffer` was freed.
        buffer = self._buffer
        self._within_limit(lambda: copy_memory(self._pid, layout.address, size, buffer.data_ptr()))
        return buffer[:size]

    def _within_limit(self, copy: Callable[[], None]) -> None:
        """Copy memory of the process; raise UnreadableError if it takes MAX_READ_SECONDS."""
        if self._waits_for_ever:
            raise UnreadableError(NO_PAGE)
        try:
            self._thread.submit(copy).result(timeout=MAX_READ_SECONDS)
        except ReadTimeoutError:
            self._waits_for_ever = True
            raise UnreadableError(NO_PAGE) from None

    def _make_buffer(self, size: int, element_bytes: int) -> None:
        """Replace the buffer for copies by a larger one.

        False strides may span far more bytes than the elements have. Such a copy may not take all
        free memory.

        Args:
            size: how many bytes.
            element_bytes: how many bytes the elements have, without the gaps between them.
        """
        self._buffer = torch.empty(0, dtype=torch.uint8)  # frees the old one first
        free = free_bytes(CPU)
        most_bytes = min(free, max(2 * element_bytes, SHARE_FOR_GAPS * free))
        if size > most_bytes:
            raise UnreadableError(f"it spans {size:,} bytes, more than there is memory")
        self._buffer = torch.empty(size, dtype=torch.uint8)

    def _map_gpu_bytes(self, layout: Layout) -> torch.Tensor:
        """Return a tensor's memory on the GPU, without a copy.

        The address must be a multiple of an element's size: a kernel that reads a misaligned one
        fails, and CUDA then refuses all further work of this process.
        """
        size = layout.span
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        handle, byte_offset = layout.handle, layout.byte_offset
        if handle is None:
            raise BadDescriptionError(CANNOT_SHARE)
        if not isinstance(handle, str) or type(byte_offset) is not int:
            raise BadDescriptionError("its memory has no handle")
        if byte_offset % layout.dtype.itemsize:
            raise BadDescriptionError("its address is no multiple of an element's size")
        pool_allocation = self._pool.allocation(handle)
        if pool_allocation is not None:  # the referee cannot open a handle of its own
            _check_reach(byte_offset, size, pool_allocation.size)
            return pool_allocation.bytes(byte_offset, size)
        start, allocation_size = self._open(handle)
        _check_reach(byte_offset, size, allocation_size)
        return cuda_ipc.bytes_at(start + byte_offset, size, self._device)

    def _open(self, handle: str) -> tuple[int, int]:
        """Open a GPU allocation of the process if it is not open; return its address and size.

        Raises:
            UnreadableError: the handle cannot be opened.
        """
        try:
            if handle not in self._address_of:
                self._address_of[handle] = cuda_ipc.open_handle(handle)
            address = self._address_of[handle]
            return address, cuda_ipc.size_of(address)
        except (cuda_ipc.CudaError, ValueError) as error:
            raise UnreadableError(str(error)) from None


def _find_places(elements: SomeElements) -> _Places:
    """Return where elements are; raise BadDescriptionError if no tensor is as described."""
    layout = layout_of(elements.description)
    item_bytes = layout.dtype.itemsize
    offsets = layout.offsets(elements.indices)
    return _Places([layout.address + item_bytes * offset for offset in offsets], item_bytes)


def _split(values: torch.Tensor, sizes: dict[Key, int]) -> dict[Key, torch.Tensor]:
    """Split bytes into consecutive parts of these sizes."""
    return dict(zip(sizes, values.split(list(sizes.values())), strict=True))


def _check_reach(byte_offset: int, size: int, allocation_size: int) -> None:
    """Raise BadDescriptionError unless `size` bytes from `byte_offset` on are in an allocation."""
    if byte_offset < 0 or byte_offset + size > allocation_size:
        raise BadDescriptionError("it reaches beyond its allocation")


def as_indexable(x: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bits in a dtype that every torch can index."""
    return x.view(INDEXABLE_DTYPES[x.itemsize])


def bytes_of_elements(
    data: torch.Tensor, offsets: list[int], item_bytes: int
) -> list[torch.Tensor]:
    """Return views of the bytes of some elements.

    Args:
        data: the bytes of a tensor's memory, from its first element on.
        offsets: the elements' distances from the first one, see `memory_offset`.
        item_bytes: the bytes of an element.
    """
    return [data[offset * item_bytes : (offset + 1) * item_bytes] for offset in offsets]


def memory_offset(index: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return an element's distance from the first element in memory, counted in elements.

    Example: a tensor of shape [2, 3] with strides [1, 2], as a transposed [3, 2] has. The element
    with index 4 is in row 4 // 3 = 1 and column 4 % 3 = 1. Its offset is 1 * 1 + 1 * 2 = 3.

    Args:
        index: the element's index in the flattened tensor.
        shape: the tensor's shape.
        strides: the tensor's strides, in elements.
    """
    offset = 0
    rest = index
    for side, stride in zip(reversed(shape), reversed(strides), strict=True):
        position = rest % side  # in this dimension
        offset += position * stride
        rest //= side
    return offset
