"""Forms of values: shape, strides and dtype, as dictionaries that JSON can hold.

A form says how a tensor is made from storages, whose bytes are elsewhere:

    {"storage": 0,              index of the tensor's storage
     "offset": 0,               first element within the storage, in elements, as are the strides
     "shape": [2, 3], "strides": [3, 1], "dtype": "float32"}

The form of a value that is no tensor contains the value, see `pack`: {"constant": "gASVBw..."}

The referee's process and a contestant's both use this module.
"""

import base64
import pickle

import torch


def pack(value: object) -> str:
    """Return a value as text: pickled, in base64."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpack(text: str) -> object:
    """Return the value that `pack` turned into this text."""
    return pickle.loads(base64.b64decode(text))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def is_float8(x: torch.Tensor) -> bool:
    """Return whether a tensor holds floats of 8 bits, which torch cannot draw at random."""
    return x.is_floating_point() and x.itemsize == 1


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


def values_of(storages: list[torch.Tensor], forms: list[dict]) -> list:
    """Return values of these forms: tensors over the storages, without a copy, and constants.

    Args:
        storages: the bytes of each storage, a tensor that begins where its own storage begins.
        forms: the forms of the values.
    """
    values = []
    for form in forms:
        if "constant" in form:
            values.append(unpack(form["constant"]))
        else:
            values.append(_with_form(storages[form["storage"]], form))
    return values


def _with_form(storage: torch.Tensor, form: dict) -> torch.Tensor:
    """Return a tensor of this form over the bytes of a storage, without a copy."""
    dtype = getattr(torch, form["dtype"])
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage.untyped_storage(), form["offset"], form["shape"], form["strides"])


def have_same_form(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same form, over storages of the same size."""
    return forms_of([a]) == forms_of([b])


def flat_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return x's whole storage as bytes, without a copy.

    If x is a view, the bytes include the parts of the storage that the view skips.
    """
    storage = x.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=x.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def without_repeats(x: torch.Tensor) -> torch.Tensor:
    """Return a view of x in which each dimension of stride 0 is narrowed to size 1.

    All elements along such a dimension share memory, so whoever writes the view writes all of x.
    Example: for x = column.expand(4, 3), of strides [1, 0], the view has the shape [4, 1].
    """
    for dimension, (side, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if side > 1 and stride == 0:
            x = x.narrow(dimension, 0, 1)
    return x
