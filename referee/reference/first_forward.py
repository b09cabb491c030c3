"""The reference's first forwards: whether it can be graded, and what a forward is like."""

import random
import sys
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import nn

from referee.comparison.compare import INTEGERS, first_mismatch, relative_difference, share_memory
from referee.contestants.descriptions import as_plain_tensor, flatten
from referee.contestants.forms import dtype_name, is_float8
from referee.reference.file import ReferenceFile
from referee.reference.float64 import MAX_ROUNDING
from referee.reference.operators import Operators

NOT_DRAWN = "for which torch cannot draw random values"


@dataclass(frozen=True)
class FirstForward:
    """Findings from the first forwards of the reference.

    Attributes:
        nesting: the nesting of the results, as `descriptions.flatten` says it.
        output_bytes: the size of all results.
        operators: the names of the operators that are called.
        terms: the number of terms of the longest sum that gives one element of a result.
        sharing_results: the indices of the results that share memory with inputs or with earlier
            results.
        sharing_pairs: the pairs of indices of results that share memory with each other, the
            smaller index first.
        changed_buffers: the names of the buffers that a forward changes, in training mode.
    """

    nesting: str
    output_bytes: int
    operators: set[str]
    terms: int
    sharing_results: set[int]
    sharing_pairs: set[tuple[int, int]]
    changed_buffers: list[str]


def run_first_forward(
    file: ReferenceFile, device: torch.device, module: nn.Module, inputs: list
) -> FirstForward:
    """Run the forward twice, and return what it is like.

    Args:
        file: the reference.
        device: the device on which it computes.
        module: its module.
        inputs: the arguments of both forwards.

    Raises:
        BadReferenceError: the forward or its results cannot be graded.
    """
    generators_before = _generator_states(device)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.numel()]
    copies = [x.clone() for x in tensors]
    buffers_before = {name: x.clone() for name, x in _buffers(module).items()}
    with torch.no_grad(), Operators() as observed:
        nesting, returned = file.call_or_refuse("forward", lambda: flatten(module(*inputs)))
    if _generator_states(device) != generators_before:
        raise file.bad("Model draws random numbers in forward, so no two results agree")
    changed_buffers = _names_of_changed(buffers_before, _buffers(module))
    _check_types(file, returned)
    outputs = [as_plain_tensor(x) for x in returned]
    for x, copy in zip(tensors, copies, strict=True):
        if first_mismatch(x, copy, bitwise=True):
            raise file.bad("Model changes its inputs; they must stay intact for other calls")
    second_outputs = file.run(module, inputs)
    for second, output in zip(second_outputs, outputs, strict=True):
        if relative_difference(second, output) > MAX_ROUNDING:
            reason = (
                "Model gives another result for the same inputs each time; it must not keep state"
            )
            raise file.bad(reason)
    return FirstForward(
        nesting=nesting,
        output_bytes=sum(x.nbytes for x in outputs),
        operators=observed.names,
        terms=observed.most_terms,
        sharing_results=_indices_of_sharing(outputs, tensors, second_outputs),
        sharing_pairs=_sharing_pairs(outputs),
        changed_buffers=changed_buffers,
    )


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module's `state_dict()` by name."""
    names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name: x for name, x in module.state_dict().items() if name in names}


def _names_of_changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that have other bits than before."""
    return [
        name
        for name, x in after.items()
        if name in before and first_mismatch(x, before[name], bitwise=True)
    ]


def _indices_of_sharing(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], second_outputs: list[torch.Tensor]
) -> set[int]:
    """Return the indices of results that share memory with an input or the second outputs."""
    others = [*inputs, *second_outputs]
    return {i for i, output in enumerate(outputs) if any(share_memory(output, x) for x in others)}


def _sharing_pairs(outputs: list[torch.Tensor]) -> set[tuple[int, int]]:
    """Return the pairs of indices of results that share memory with each other."""
    pairs = combinations(enumerate(outputs), 2)
    return {(i, j) for (i, one), (j, other) in pairs if share_memory(one, other)}


def _generator_states(device: torch.device) -> list:
    """Return the states of torch's, Python's and NumPy's generators, for comparison."""
    states: list = [torch.get_rng_state().tolist(), random.getstate()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).tolist())
    numpy = sys.modules.get("numpy")
    if numpy:
        states.append(str(numpy.random.get_state()))
    return states


def _check_types(file: ReferenceFile, returned: list) -> None:
    """Raise BadReferenceError unless the forward returned dense tensors of gradable dtypes."""
    if not returned:
        raise file.bad("Model returns no tensor; there must be one to compare")
    for x in returned:
        if not isinstance(x, torch.Tensor):
            raise file.bad(f"Model returns a {type(x).__name__}, not a tensor")
        if x.layout != torch.strided:
            raise file.bad("Model returns a sparse tensor; only dense ones can be compared")
        if x.itemsize not in INTEGERS:
            raise file.bad(
                f"Model returns a tensor of {dtype_name(x.dtype)}, which cannot be compared"
            )
        if is_float8(x):
            raise file.bad(f"Model returns a tensor of {dtype_name(x.dtype)}, {NOT_DRAWN}")


def check_state(file: ReferenceFile, module: nn.Module) -> None:
    """Raise BadReferenceError unless all parameters and buffers are tensors that can be drawn."""
    for name, x in module.state_dict().items():
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
            raise file.bad(f"Model's state has {name}, which is no dense tensor")
        if is_float8(x):
            raise file.bad(f"Model's state has {name} of {dtype_name(x.dtype)}, {NOT_DRAWN}")
