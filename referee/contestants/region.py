"""Regions: lists of values in memory that the referee owns and that contestants' processes map.

    the referee                                      the contestant
    region.make_room(values)
    region.write(values)
    sends region.location in a request          ->   Mapping.tensors(location): the same memory

A location says where a region's values are. It is a dictionary that JSON can hold:

    {"memory": {"start": 8192}                      CPU: the region's first byte in the memfd, or
               {"handle": "00ff..."}                GPU: the allocation's IPC handle
     "storages": [[0, 24], [4096, 12], ...]         start and size in bytes, within the region
     "values": [{"storage": 0, ...}, ...]}          the form of each value, see `forms`
"""

import torch

from referee.contestants.forms import (
    flat_bytes,
    forms_of,
    have_same_form,
    values_of,
    without_repeats,
)
from referee.contestants.pool import Block, Pool, aligned

# A block has at least so many bytes, so that a region of small values seldom needs a larger one.
MIN_BLOCK_BYTES = 1 << 20
COMPARED_AT_ONCE = 1 << 28  # bytes that one torch.equal compares


class Region:
    """A part of the shared memory that holds one list of values at a time.

    Args:
        pool: where its memory comes from.

    Attributes:
        location: where the values are, see the head of this file.
        tensors: the same values in the referee's process: tensors over the shared memory, and
            unpacked constants.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._block: Block | None = None
        self._originals: list = []
        self.location: dict = {}
        self.tensors: list = []

    @property
    def size(self) -> int:
        """The size of all storages in bytes, without the gaps of the alignment."""
        return sum(size for _, size in self.location.get("storages", []))

    def make_room(self, values: list) -> None:
        """Make room for values of the same forms as these. `write` copies values into it."""
        sizes, forms = forms_of(values)
        self.make_room_for(sizes, forms)

    def make_room_for(self, sizes: list[int], forms: list[dict]) -> None:
        """Make room for values of these forms.

        Storages follow each other, each at a multiple of ALIGNMENT. For the sizes [24, 5000, 12]:

            byte     0      4096       12288
                     |24 .. |5000 .... |12 ..

        Args:
            sizes: the size of each storage in bytes, as `forms_of` returns them.
            forms: the forms of the values, likewise.
        """
        starts_and_sizes = []
        end = 0
        for size in sizes:
            starts_and_sizes.append([end, size])
            end += aligned(size)
        if self._block is None or self._block.size < end:
            self.close()
            self._block = self._pool.block(max(end, MIN_BLOCK_BYTES))
        self.location = {
            "memory": self._block.describe(),
            "storages": starts_and_sizes,
            "values": forms,
        }
        storages = [self._block.bytes(start, size) for start, size in starts_and_sizes]
        self.tensors = values_of(storages, forms)

    def write(self, values: list) -> None:
        """Copy values into the shared memory.

        Values of the region's forms are copied as whole storages so that views of one storage
        agree. Values of other strides are copied element by element.

        The region keeps a reference to the values, the originals, for `changed_values`.
        """
        self._originals = values
        for copy, original in zip(self.tensors, values, strict=True):
            if not isinstance(original, torch.Tensor):
                continue
            if have_same_form(copy, original):
                flat_bytes(copy).copy_(flat_bytes(original))
            else:
                # Elements of the copy that share memory have equal originals: the first is copied.
                distinct = without_repeats(copy)
                distinct.copy_(_leading_part(original, distinct.shape))

    def keep_values(self) -> None:
        """Keep copies of the present values as the originals, for `changed_values`."""
        self._originals = [x.clone() if isinstance(x, torch.Tensor) else x for x in self.tensors]

    def fill_with_nan(self) -> None:
        """Fill the tensors with bytes 0xff, a NaN in every float dtype."""
        for tensor in self.tensors:
            if isinstance(tensor, torch.Tensor):
                flat_bytes(tensor).fill_(0xFF)

    def rewrite(self) -> None:
        """Write the originals again; do nothing after `forget`."""
        if self._originals:
            self.write(self._originals)

    def forget(self) -> None:
        """Drop the originals so that their memory is freed.

        `changed_values` and `is_unchanged` need another `write` first.
        """
        self._originals = []

    def close(self) -> None:
        """Give the memory back to the pool."""
        if self._block is not None:
            self._pool.give_back(self._block)
        self._block = None
        self.tensors = []
        self.forget()

    def is_unchanged(self) -> bool:
        """Return whether every value still has the bits of its original."""
        return not self.changed_values()

    def changed_values(self) -> list[int]:
        """Return the indices of the values that differ from their originals in any bit."""
        indices = []
        for i, (copy, original) in enumerate(zip(self.tensors, self._originals, strict=True)):
            if isinstance(original, torch.Tensor) and not _have_same_bits(copy, original):
                indices.append(i)
        return indices


def _leading_part(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return x[:shape[0], :shape[1], ...]; x has as many dimensions as the shape."""
    for dimension, side in enumerate(shape):
        x = x.narrow(dimension, 0, side)
    return x


def _have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bits.

    If they have the same form, the parts of their storages that the views skip count, too.
    """
    if have_same_form(a, b):
        return _are_equal_bytes(flat_bytes(a), flat_bytes(b))
    return _are_equal_bytes(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _are_equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare two uint8 tensors part by part: `torch.equal` allocates as much as it compares."""
    if a.numel() != b.numel():
        return False
    if all(x.numel() % 8 == 0 and x.storage_offset() % 8 == 0 for x in (a, b)):
        # torch compares words five times as fast as bytes.
        a, b = a.view(torch.int64), b.view(torch.int64)
    at_once = COMPARED_AT_ONCE // a.itemsize
    for start in range(0, a.numel(), at_once):
        end = start + at_once
        if not torch.equal(a[start:end], b[start:end]):
            return False
    return True
