"""Tensors in memory that the referee owns and that the processes under it map.

Both sides use this module. The referee writes inputs, parameters, and gradients of outputs into a
`Region`, and sends the region's form, which says where they are; the process makes tensors of them
with `Mapping.tensors`. On a CPU all regions are parts of one file in memory (a memfd), which both
sides map. On a GPU each region is an allocation of its own, which the process opens by CUDA IPC.

A form is a dictionary that JSON can hold:

    {"memory": how to reach the region, see `Region.describe`,
     "storages": [[start, size], ...]                bytes within the region,
     "values": [{"storage": 0, "offset": 0, "shape": [2, 3], "strides": [3, 1], "dtype": "float32"},
                {"constant": "a pickled value that is no tensor, in base64"}, ...]}
"""

import base64
import fcntl
import mmap
import os
import pickle

import torch

from referee import cuda_ipc

# Bytes of the file. Only pages that were written take memory.
POOL_BYTES = 1 << 40
ALIGNMENT = 4096  # bytes, of the start of every storage
# A block that was given back is used again for a region of at least this part of its size.
LEAST_USED_PART = 0.25
LARGEST_COMPARED = 1 << 28  # bytes at a time
LEAST_REGION = 1 << 20  # bytes, so that small cases seldom need a new region


def pack(value: object) -> str:
    """Return any value as a text."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpack(text: str) -> object:
    """Return the value that `pack` made a text of."""
    return pickle.loads(base64.b64decode(text))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: "float32"."""
    return str(dtype).removeprefix("torch.")


def flat_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return all the memory under x as bytes, with what a view skips."""
    storage = x.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=x.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def with_form(storage: torch.Tensor, form: dict) -> torch.Tensor:
    """Return a tensor of this form over the bytes of a storage.

    Args:
        storage: bytes, a tensor that begins where its storage begins.
        form: an entry of "values", see the head of this file.
    """
    dtype = getattr(torch, form["dtype"])
    made = torch.empty(0, dtype=dtype, device=storage.device)
    return made.set_(storage.untyped_storage(), form["offset"], form["shape"], form["strides"])


def without_repeats(x: torch.Tensor) -> torch.Tensor:
    """Return a view of x with one of the elements that a stride of 0 repeats: the others follow."""
    for dimension, (side, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if side > 1 and stride == 0:
            x = x.narrow(dimension, 0, 1)
    return x


def _aligned(size: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def forms_of(values: list) -> tuple[list[int], list[dict]]:
    """Return the sizes in bytes of the storages under some values, and the form of each value.

    Tensors that share a storage share it in the form, too. Values that are no tensors are pickled.
    """
    sizes: list[int] = []
    known: dict[int, int] = {}
    forms = []
    for x in values:
        if not isinstance(x, torch.Tensor):
            forms.append({"constant": pack(x)})
            continue
        storage = x.untyped_storage()
        key = storage.data_ptr() or -id(x)  # storages without bytes are all at address 0
        if key not in known:
            known[key] = len(sizes)
            sizes.append(storage.nbytes())
        forms.append(
            {
                "storage": known[key],
                "offset": x.storage_offset(),
                "shape": list(x.shape),
                "strides": list(x.stride()),
                "dtype": dtype_name(x.dtype),
            }
        )
    return sizes, forms


class Region:
    """A part of the shared memory that holds one list of values at a time.

    Attributes:
        form: where the values are, as a process needs it.
        tensors: the referee's own view of the values.
    """

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._block: _Block | None = None
        self._originals: list = []
        self.form: dict = {}
        self.tensors: list = []

    def place(self, values: list) -> None:
        """Make room for values of these forms. What is there is undefined until `write`."""
        sizes, forms = forms_of(values)
        self.arrange(sizes, forms)

    def arrange(self, sizes: list[int], forms: list[dict]) -> None:
        """Make room for values of these forms, which lie in storages of these sizes in bytes."""
        parts, end = [], 0
        for size in sizes:
            parts.append([end, size])
            end += _aligned(size)
        if self._block is None or self._block.size < end:
            self.close()
            self._block = self._pool.block(max(end, LEAST_REGION))
        storages = [self._block.bytes(*part) for part in parts]
        self.form = {"memory": self._block.describe(), "storages": parts, "values": forms}
        self.tensors = []
        for form in forms:
            if "constant" in form:
                self.tensors.append(unpack(form["constant"]))
            else:
                self.tensors.append(with_form(storages[form["storage"]], form))

    def write(self, values: list) -> None:
        """Copy values into their places, with the memory that views of them skip.

        The region remembers the values, without a copy, so that `is_unchanged` can compare.
        """
        self._originals = values
        for there, x in zip(self.tensors, values, strict=True):
            if not isinstance(x, torch.Tensor):
                continue
            if _is_laid_out_alike(there, x):
                flat_bytes(there).copy_(flat_bytes(x))
            else:
                distinct = without_repeats(there)
                distinct.copy_(_part(x, distinct.shape))

    @property
    def size(self) -> int:
        """The bytes of the storages under the values."""
        return sum(size for _, size in self.form.get("storages", []))

    def fill(self) -> None:
        """Fill the tensors with 0xff, a NaN in every float dtype."""
        for x in self.tensors:
            if isinstance(x, torch.Tensor):
                flat_bytes(x).fill_(0xFF)

    def rewrite(self) -> None:
        """Write the same values once more, unless they were forgotten."""
        if self._originals:
            self.write(self._originals)

    def forget(self) -> None:
        """Free the values that `is_unchanged` compares with; call `write` before it again."""
        self._originals = []

    def close(self) -> None:
        """Give the memory back to the pool."""
        if self._block is not None:
            self._pool.give_back(self._block)
        self._block = None
        self.tensors = []
        self.forget()

    def is_unchanged(self) -> bool:
        """Return whether the region still holds, to the last bit, what was written."""
        return not self.changed()

    def changed(self) -> list[int]:
        """Return the indices of the values that differ, by a bit or more, from those written."""
        found = []
        for i, (there, x) in enumerate(zip(self.tensors, self._originals, strict=True)):
            if isinstance(x, torch.Tensor) and not _same_bits(there, x):
                found.append(i)
        return found


def _part(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the first part of x that has this shape, of as many dimensions."""
    for dimension, side in enumerate(shape):
        x = x.narrow(dimension, 0, side)
    return x


def _is_laid_out_alike(there: torch.Tensor, x: torch.Tensor) -> bool:
    """Return whether two tensors have storages of the same size and the same form."""
    mine, theirs = flat_bytes(there).numel(), flat_bytes(x).numel()
    return mine == theirs and forms_of([there]) == forms_of([x])


def _same_bits(there: torch.Tensor, x: torch.Tensor) -> bool:
    if _is_laid_out_alike(there, x):
        return _are_equal_bytes(flat_bytes(there), flat_bytes(x))
    mine, theirs = (t.contiguous().view(-1).view(torch.uint8) for t in (there, x))
    return _are_equal_bytes(mine, theirs)


def _are_equal_bytes(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare bytes in pieces: `torch.equal` needs as much memory again as what it compares."""
    if mine.numel() != theirs.numel():
        return False
    for start in range(0, mine.numel(), LARGEST_COMPARED):
        end = start + LARGEST_COMPARED
        if not torch.equal(mine[start:end], theirs[start:end]):
            return False
    return True


class _Block:
    """Some consecutive bytes of shared memory: of the mapped file, or of an allocation on a GPU."""

    def __init__(self, start: int, size: int, mapping: "mmap.mmap | cuda_ipc.Allocation") -> None:
        self.start = start
        self.size = size
        self._mapping = mapping

    def bytes(self, start: int, size: int) -> torch.Tensor:
        """Return a part of the block as a tensor with a storage of its own."""
        if isinstance(self._mapping, cuda_ipc.Allocation):
            return self._mapping.bytes(start, size)
        return _mapped_bytes(self._mapping, self.start + start, size)

    def describe(self) -> dict:
        """Return how a process reaches the block."""
        if isinstance(self._mapping, cuda_ipc.Allocation):
            return {"handle": self._mapping.handle}
        return {"start": self.start}


def _mapped_bytes(mapping: mmap.mmap, start: int, size: int) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)


class Pool:
    """The referee's side: all memory that it shares with the processes of one grading.

    Attributes:
        descriptor: of the file in memory that processes map.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.descriptor = os.memfd_create("referee", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(self.descriptor, POOL_BYTES)
        # A process that could shrink the file would end the referee with SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        self._mapping = mmap.mmap(self.descriptor, POOL_BYTES)
        self._end = 0
        self._allocations: list[cuda_ipc.Allocation] = []
        self._unused: list[_Block] = []

    def block(self, size: int) -> _Block:
        """Return a block of at least so many bytes: one that was given back, or a new one.

        Blocks stay shared until `close`, for a process may still map them.
        """
        fitting = [b for b in self._unused if LEAST_USED_PART * b.size <= size <= b.size]
        if fitting:
            block = min(fitting, key=lambda b: b.size)
            self._unused.remove(block)
            return block
        if self._device.type == "cuda":
            allocation = cuda_ipc.Allocation(size, self._device)
            self._allocations.append(allocation)
            return _Block(0, size, allocation)
        start = self._end
        self._end += _aligned(size)
        return _Block(start, size, self._mapping)

    def give_back(self, block: _Block) -> None:
        """Take a block back, for other regions."""
        self._unused.append(block)

    def close(self) -> None:
        """Free the memory. The processes that mapped it must have ended."""
        for allocation in self._allocations:
            allocation.free()
        self._allocations = []
        os.close(self.descriptor)


class Mapping:
    """A process's side of a pool: makes tensors of forms.

    Attributes:
        span: the addresses, first and one beyond the last, at which this process maps the file.
    """

    def __init__(self, descriptor: int, device: torch.device) -> None:
        self._device = device
        self._mapping = mmap.mmap(descriptor, POOL_BYTES)
        first = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        self.span = first, first + POOL_BYTES
        self._opened: dict[str, int] = {}

    def tensors(self, form: dict) -> list:
        """Return the values of a form; tensors are the shared memory itself."""
        storages = [self._bytes(form["memory"], *part) for part in form["storages"]]
        values = []
        for value in form["values"]:
            if "constant" in value:
                values.append(unpack(value["constant"]))
            else:
                values.append(with_form(storages[value["storage"]], value))
        return values

    def _bytes(self, memory: dict, start: int, size: int) -> torch.Tensor:
        if "start" in memory:
            return _mapped_bytes(self._mapping, memory["start"] + start, size)
        handle = memory["handle"]
        if handle not in self._opened:
            self._opened[handle] = cuda_ipc.open_handle(handle)
        return cuda_ipc.bytes_at(self._opened[handle] + start, size, self._device)

    def opened_spans(self) -> dict[str, int]:
        """Return the address at which this process sees each region of a GPU, by its handle."""
        return dict(self._opened)
