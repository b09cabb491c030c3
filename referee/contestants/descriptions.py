"""Descriptions of a call's results: their nesting, and where each tensor is in memory.

Both sides use this module. A process describes its results, and the referee takes the reference's
results apart by the same function. For example, a module returns `(y, [z])`. The reply then has, in
"returned", this description of what the call has returned:

    {"nesting": "[*, [*]]",               see `flatten`
     "results": [{"type": "Tensor", "shape": [2, 3], ...}, {...}]}        y and z, see `describe`
"""

from typing import NamedTuple

import torch

from referee.contestants import cuda_ipc
from referee.contestants.forms import dtype_name

MAX_LEAVES = 1000  # values in an output that are no tuples or lists


class ResultIndex(NamedTuple):
    """Which of a reply's results one is.

    Attributes:
        call_index: the index of the call in the request.
        result_index: the index of the result among the leaves of what the call has returned.
    """

    call_index: int
    result_index: int


def flatten(value: object) -> tuple[str, list]:
    """Return the nesting of an output as text, and its leaves in order.

    Tuples and lists are the same: `(a, [b])` gives `"[*, [*]]"` and `[a, b]`.

    Raises:
        RecursionError: a list contains itself.
        ValueError: there are more than MAX_LEAVES leaves.
    """
    if not isinstance(value, (list, tuple)):
        return "*", [value]
    nestings, leaves = [], []
    for part in value:
        nesting, part_leaves = flatten(part)
        nestings.append(nesting)
        leaves += part_leaves
        if len(leaves) > MAX_LEAVES:
            raise ValueError(f"more than {MAX_LEAVES} outputs, which is the most to compare")
    return f"[{', '.join(nestings)}]", leaves


def as_plain_tensor(x: object) -> torch.Tensor | None:
    """Return a tensor without autograd's record, and without a pending conjugation or negation.

    The memory of the tensor returned holds its values. For anything but a dense tensor the result
    is None. A subclass counts as the plain tensor in its memory, so its `__torch_function__`, which
    could compute other values, is not called.
    """
    if not isinstance(x, torch.Tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if x.layout != torch.strided:
            return None
        return x.detach().resolve_conj().resolve_neg()


def span_of(shape: list[int], strides: list[int], item_bytes: int) -> int:
    """Return the number of bytes from a tensor's first element to its last, both included."""
    if 0 in shape:
        return 0
    steps = sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))
    return (steps + 1) * item_bytes


def elements_share_memory(shape: list[int], strides: list[int]) -> bool:
    """Return whether two elements of a tensor may be the same memory.

    Some examples are

        shape     strides    elements share memory
        [3, 4]    [4, 1]     no
        [3, 4]    [1, 3]     no
        [3, 4]    [1, 0]     yes: all elements of a row are one
        [3, 4]    [2, 1]     yes: rows overlap
        [3, 2]    [2, 3]     no, but the answer is True, because the strides interleave dimensions;
                             hardly any operator of torch makes such a tensor
    """
    if 0 in shape:
        return False
    reach = 0  # from the first to the last element that the dimensions so far contain
    for stride, side in sorted(zip(strides, shape, strict=True)):
        if side > 1 and stride <= reach:
            return True
        reach += (side - 1) * stride
    return False


def describe(x: object) -> dict:
    """Return what a process tells of a result: its form, and where it is in memory.

    A result that is no dense tensor has only the name of its type, for the message.
    """
    if not isinstance(x, torch.Tensor):
        return {"type": type(x).__name__}
    if x.layout != torch.strided:
        return {"type": "sparse tensor"}
    description = {
        "type": "Tensor",
        "shape": list(x.shape),
        "strides": list(x.stride()),
        "dtype": dtype_name(x.dtype),
        "device": str(x.device),
        "address": x.data_ptr(),
    }
    if x.device.type == "cuda" and x.numel():
        try:
            description["handle"], description["byte_offset"] = cuda_ipc.export(x.data_ptr())
        except cuda_ipc.CudaError:
            description["handle"] = None  # the referee cannot read it
    return description
