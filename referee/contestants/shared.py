"""Tensors in memory that the referee owns and that contestants' processes map.

The referee's process and the contestant's process both use this module:

    referee                                       contestant's process
    region.make_room(values)
    region.write(values)
    sends region.form in a request           ->   Mapping.tensors(form): the same memory as tensors

The referee's `Pool` gives each `Region` a block of memory. On a CPU all blocks are parts of one
file in memory (a memfd), which both processes map. On a GPU each block is an allocation of its own,
which the contestant's process opens by CUDA IPC.

A form says where a region's values are. It is a dictionary that JSON can hold:

    {"memory": {"start": 8192}                      CPU: the region's first byte in the memfd, or
               {"handle": "00ff..."}                GPU: the allocation's IPC handle,
     "storages": [[0, 24], [4096, 12], ...]         start and size in bytes, within the region,
     "values": [{"storage": 0,                      index into "storages",
                 "offset": 0,                       in elements, as are the strides,
                 "shape": [2, 3], "strides": [3, 1], "dtype": "float32"},
                {"constant": "gASVBw..."},          a value that is no tensor, see `pack`
                ...]}
"""

import base64
import fcntl
import mmap
import os
import pickle

import torch

from referee.contestants import cuda_ipc

POOL_BYTES = 1 << 40  # of the memfd; only pages that were written take memory
ALIGNMENT = 4096  # bytes: every storage starts at a multiple of this
# A block has at least so many bytes, so that a region of small values seldom needs a larger one.
MIN_BLOCK_BYTES = 1 << 20
# A free block is reused only for a region that fills at least this part of it.
MIN_FILLED_PART = 0.25
COMPARED_AT_ONCE = 1 << 28  # bytes that one torch.equal compares


def pack(value: object) -> str:
    """Return a value as text: pickled, in base64."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpack(text: str) -> object:
    """Return the value that `pack` turned into this text."""
    return pickle.loads(base64.b64decode(text))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def flat_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return x's whole storage as bytes, without a copy.

    If x is a view, the bytes include the parts of the storage that the view skips.
    """
    storage = x.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=x.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def with_form(storage: torch.Tensor, form: dict) -> torch.Tensor:
    """Return a tensor with this form over the bytes of a storage, without a copy.

    Args:
        storage: a uint8 tensor that begins where its storage begins.
        form: an entry of "values", see the head of this file.
    """
    dtype = getattr(torch, form["dtype"])
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage.untyped_storage(), form["offset"], form["shape"], form["strides"])


def without_repeats(x: torch.Tensor) -> torch.Tensor:
    """Return a view of x in which each dimension of stride 0 is narrowed to size 1.

    All elements along such a dimension share memory, so whoever writes the view writes all of x.
    Example: for x = column.expand(4, 3), of strides [1, 0], the view has the shape [4, 1].
    """
    for dimension, (side, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if side > 1 and stride == 0:
            x = x.narrow(dimension, 0, 1)
    return x


def _aligned(size: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def forms_of(values: list) -> tuple[list[int], list[dict]]:
    """Return the size in bytes of each storage under some values and the form of each value.

    Tensors that share a storage get the same "storage". Values that are no tensors are packed.
    Example: for [base[:4], base[2:]] with base of 10 floats, the sizes are [40], and both forms
    have "storage": 0, with the offsets 0 and 2.
    """
    sizes: list[int] = []
    index_of: dict[int, int] = {}  # from a storage's address to its index in `sizes`
    forms = []
    for x in values:
        if not isinstance(x, torch.Tensor):
            forms.append({"constant": pack(x)})
            continue
        storage = x.untyped_storage()
        address = storage.data_ptr()
        if address == 0:  # all empty storages have it; the tensor's id tells them apart
            address = -id(x)
        if address not in index_of:
            index_of[address] = len(sizes)
            sizes.append(storage.nbytes())
        forms.append(
            {
                "storage": index_of[address],
                "offset": x.storage_offset(),
                "shape": list(x.shape),
                "strides": list(x.stride()),
                "dtype": dtype_name(x.dtype),
            }
        )
    return sizes, forms


class Region:
    """A part of the shared memory that holds one list of values at a time.

    Args:
        pool: where its memory comes from.

    Attributes:
        form: where the values are; a contestant's process makes tensors from it.
        tensors: the same values in the referee's process: tensors over the shared memory, and
            unpacked constants.
    """

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._block: _Block | None = None
        self._originals: list = []
        self.form: dict = {}
        self.tensors: list = []

    @property
    def size(self) -> int:
        """The size of all storages in bytes, without the gaps of the alignment."""
        return sum(size for _, size in self.form.get("storages", []))

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
            end += _aligned(size)
        if self._block is None or self._block.size < end:
            self.close()
            self._block = self._pool.block(max(end, MIN_BLOCK_BYTES))
        self.form = {
            "memory": self._block.describe(),
            "storages": starts_and_sizes,
            "values": forms,
        }
        storages = [self._block.bytes(start, size) for start, size in starts_and_sizes]
        self.tensors = []
        for form in forms:
            if "constant" in form:
                self.tensors.append(unpack(form["constant"]))
            else:
                self.tensors.append(with_form(storages[form["storage"]], form))

    def write(self, values: list) -> None:
        """Copy values into the shared memory.

        Values with the region's layout are copied as whole storages so that views of one storage
        agree. Values with another layout are copied element by element.

        The region keeps a reference to the values, the originals, for `changed_values`.
        """
        self._originals = values
        for copy, original in zip(self.tensors, values, strict=True):
            if not isinstance(original, torch.Tensor):
                continue
            if _have_same_layout(copy, original):
                flat_bytes(copy).copy_(flat_bytes(original))
            else:
                # Elements of the copy that share memory have equal originals: the first is copied.
                distinct = without_repeats(copy)
                distinct.copy_(_leading_part(original, distinct.shape))

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


def _have_same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same form, over storages of the same size."""
    return forms_of([a]) == forms_of([b])


def _have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bits.

    If they have the same layout, the parts of their storages that the views skip count, too.
    """
    if _have_same_layout(a, b):
        return _are_equal_bytes(flat_bytes(a), flat_bytes(b))
    return _are_equal_bytes(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _are_equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare two uint8 tensors part by part: `torch.equal` allocates as much as it compares."""
    if a.numel() != b.numel():
        return False
    for start in range(0, a.numel(), COMPARED_AT_ONCE):
        end = start + COMPARED_AT_ONCE
        if not torch.equal(a[start:end], b[start:end]):
            return False
    return True


class _Block:
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
        return _mapped_bytes(self._memory, self.start + start, size)

    def describe(self) -> dict:
        """Return the "memory" of a form: how a contestant's process reaches the block."""
        if isinstance(self._memory, cuda_ipc.Allocation):
            return {"handle": self._memory.handle}
        return {"start": self.start}


def _mapped_bytes(mapping: mmap.mmap, start: int, size: int) -> torch.Tensor:
    """Return bytes of a mapped file as a tensor, without a copy."""
    if size == 0:  # torch.frombuffer refuses it
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)


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
        self._free_blocks: list[_Block] = []

    def block(self, size: int) -> _Block:
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
            return _Block(0, size, allocation)
        start = self._end
        self._end += _aligned(size)
        return _Block(start, size, self._mapping)

    def allocation(self, handle: object) -> cuda_ipc.Allocation | None:
        """Return the GPU allocation that has this handle; None if it is not the pool's."""
        for allocation in self._allocations:
            if allocation.handle == handle:
                return allocation
        return None

    def give_back(self, block: _Block) -> None:
        """Take a block back so that another region can use it."""
        self._free_blocks.append(block)

    def close(self) -> None:
        """Free the memory. All processes that mapped it must have ended or have forgotten it.

        This process's own mapping of the memfd ends with the last tensor over it.
        """
        for allocation in self._allocations:
            allocation.free()
        self._allocations = []
        os.close(self.descriptor)


class Mapping:
    """A pool as a contestant's process sees it; makes tensors from forms.

    Args:
        descriptor: the memfd's descriptor.
        device: where the process computes.

    Attributes:
        span: the addresses at which this process maps the memfd: the first, and one past the last.
    """

    def __init__(self, descriptor: int, device: torch.device) -> None:
        self._device = device
        self._mapping = mmap.mmap(descriptor, POOL_BYTES)
        first = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        self.span = first, first + POOL_BYTES
        self._address_of: dict[str, int] = {}  # where a GPU's allocations are open, by handle

    def tensors(self, form: dict) -> list:
        """Return the values of a form; its tensors are the shared memory itself, not copies."""
        memory = form["memory"]
        storages = [self._bytes(memory, start, size) for start, size in form["storages"]]
        values = []
        for value in form["values"]:
            if "constant" in value:
                values.append(unpack(value["constant"]))
            else:
                values.append(with_form(storages[value["storage"]], value))
        return values

    def place_of(self, address: int) -> dict:
        """Return the "handle" and the "distance" of an address in one of the GPU's allocations.

        The dictionary is empty if the address is in none of them. See `cuda_ipc` for both words.
        """
        for handle, start in self._address_of.items():
            if start <= address < start + cuda_ipc.size_of(start):
                return {"handle": handle, "distance": address - start}
        return {}

    def forget(self) -> None:
        """Close all GPU allocations so that the referee can free them."""
        for address in self._address_of.values():
            cuda_ipc.close_handle(address)
        self._address_of = {}

    def _bytes(self, memory: dict, start: int, size: int) -> torch.Tensor:
        """Return bytes of a region, without a copy.

        Args:
            memory: how to reach the region, see the head of this file.
            start: the first of the bytes, counted from the region's start.
            size: how many bytes.
        """
        if "start" in memory:
            return _mapped_bytes(self._mapping, memory["start"] + start, size)
        handle = memory["handle"]
        if handle not in self._address_of:
            self._address_of[handle] = cuda_ipc.open_handle(handle)
        return cuda_ipc.bytes_at(self._address_of[handle] + start, size, self._device)
