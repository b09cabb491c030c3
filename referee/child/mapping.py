"""The shared memory in a contestant's process, which makes tensors of the locations in requests."""

import mmap
from contextlib import suppress

import torch

from referee.contestants import cuda_ipc
from referee.contestants.forms import values_of
from referee.contestants.pool import POOL_BYTES, mapped_bytes

MADV_POPULATE_READ = 22  # Python's mmap has no name for it


class Mapping:
    """A pool as a contestant's process sees it.

    Args:
        descriptor: the memfd's descriptor.
        device: where the process computes.

    Attributes:
        addresses: where this process maps the memfd: the first address, and one past the last.
    """

    def __init__(self, descriptor: int, device: torch.device) -> None:
        self._device = device
        self._mapping = mmap.mmap(descriptor, POOL_BYTES)
        first = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        self.addresses = first, first + POOL_BYTES
        self._address_of: dict[str, int] = {}  # where a GPU's allocations are open, by handle

    def tensors(self, location: dict) -> list:
        """Return the values at a location; tensors are the shared memory itself, not copies."""
        memory = location["memory"]
        storages = [self._bytes(memory, start, size) for start, size in location["storages"]]
        return values_of(storages, location["values"])

    def map_pages(self, locations: list[dict]) -> None:
        """Map all pages of a CPU's memory at some locations, so that no call takes a page fault.

        Another process may have removed the pages (MADV_REMOVE in madvise(2)), and new ones are
        there. Linux before 5.14 cannot do this, and maps each page when it is touched.
        """
        for location in locations:
            first = location["memory"]["start"]
            for start, size in location["storages"]:
                with suppress(OSError):
                    self._mapping.madvise(MADV_POPULATE_READ, first + start, size)

    def export(self, address: int) -> dict:
        """Return the "handle" and the "byte_offset" of an address in the referee's GPU memory.

        The dictionary is empty if the address is not there. See `cuda_ipc` for both words.
        """
        for handle, start in self._address_of.items():
            if start <= address < start + cuda_ipc.size_of(start):
                return {"handle": handle, "byte_offset": address - start}
        return {}

    def forget(self) -> None:
        """Close all GPU allocations so that the referee can free them."""
        for address in self._address_of.values():
            cuda_ipc.close_handle(address)
        self._address_of = {}

    def _bytes(self, memory: dict, start: int, size: int) -> torch.Tensor:
        """Return bytes of a region, without a copy.

        Args:
            memory: the "memory" of the region's location.
            start: the first of the bytes, counted from the region's start.
            size: how many bytes.
        """
        if "start" in memory:
            return mapped_bytes(self._mapping, memory["start"] + start, size)
        handle = memory["handle"]
        if handle not in self._address_of:
            self._address_of[handle] = cuda_ipc.open_handle(handle)
        return cuda_ipc.bytes_at(self._address_of[handle] + start, size, self._device)
