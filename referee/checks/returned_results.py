"""The results of a call: their form, their memory and their values.

A reply has a description of each result. The referee believes none of it: these functions compare
it with the reference's result, and read the values in the memory of the solution's process.
"""

import torch

from referee.checks.separate_results import check_results_apart
from referee.comparison.result_spec import ResultSpec
from referee.contestants.descriptions import ResultIndex, elements_share_memory
from referee.contestants.forms import dtype_name
from referee.contestants.reading import (
    BadDescriptionError,
    UnreadableError,
    as_indexable,
    layout_of,
)
from referee.grading import Grading
from referee.message_lines import MAX_LINE_LENGTH
from referee.verdict import NotCorrectError
from referee.verdict_words import WRONG

MAX_TYPE_LENGTH = 100  # characters of a type's name in a message
MAX_NESTING_LENGTH = 50  # its characters in a message
MAX_REPORTED = 32  # elements in a reply, see `check_complete`


def check_results(
    grading: Grading,
    case_name: str,
    returned: dict,
    reference_results: list[ResultSpec] | list[torch.Tensor],
) -> list[dict]:
    """Check nesting, types, shapes and dtypes of a call's results, and that their memory is new.

    Args:
        grading: the file under grading.
        case_name: the case in messages.
        returned: the reply's description of what the call has returned.
        reference_results: the reference's results, or its demands on them.

    Returns:
        The descriptions of the results.
    """
    nesting, descriptions = returned.get("nesting"), returned["results"]
    expected_nesting = grading.problem.nesting
    if nesting != expected_nesting or len(descriptions) != len(reference_results):
        reason = f"returns {str(nesting)[:MAX_NESTING_LENGTH]}, expected {expected_nesting}"
        raise NotCorrectError(WRONG, f"{case_name}: {reason}, where * is a tensor")
    has_several = len(reference_results) > 1
    for result_index, reference_result in enumerate(reference_results):
        description = descriptions[result_index]
        output_name = f"{case_name}, output {result_index}" if has_several else case_name
        check_description(grading, description, reference_result, output_name)
        check_elements_apart(description, reference_result, output_name)
        check_new_memory(grading, description, result_index, case_name)
    check_results_apart(grading, descriptions, case_name)
    return descriptions


def check_new_memory(
    grading: Grading, description: dict, result_index: int, case_name: str
) -> None:
    """Check that a result is not in the referee's memory, unless the reference's may be there.

    Args:
        grading: the file under grading.
        description: describes the result.
        result_index: which of the forward's results it is.
        case_name: the case in messages.
    """
    if result_index in grading.problem.sharing_results:
        return
    if is_in_shared_memory(grading, description):
        reason = f"returns its input or a parameter, not new memory; return a copy: {case_name}"
        raise NotCorrectError(WRONG, reason)


def check_description(
    grading: Grading,
    description: dict,
    reference_result: ResultSpec | torch.Tensor,
    case_name: str,
) -> None:
    """Check the type, dtype, device and shape of a result.

    Args:
        grading: the file under grading.
        description: describes the result.
        reference_result: the reference's result.
        case_name: the case in messages.
    """
    kind = str(description.get("type"))[:MAX_TYPE_LENGTH]
    if kind != "Tensor":
        raise NotCorrectError(WRONG, f"{case_name}: returns a {kind}, not a dense tensor")
    expected_entries = {
        "dtype": dtype_name(reference_result.dtype),
        "device": str(grading.device),
        "shape": list(reference_result.shape),
    }
    for name, value in expected_entries.items():
        if description.get(name) != value:
            got = str(description.get(name))[:MAX_LINE_LENGTH]
            reason = f"the output's {name} is {got}, expected {value}"
            raise NotCorrectError(WRONG, f"{case_name}: {reason}")


def check_elements_apart(
    description: dict, reference_result: ResultSpec | torch.Tensor, case_name: str
) -> None:
    """Check that no elements of a result share memory, unless some of the reference's do.

    Elements of two dimensions may not interleave, either. All other strides are accepted. Gradients
    are not checked: autograd itself expands some of them.

    Args:
        description: describes the result.
        reference_result: the reference's result.
        case_name: the case in messages.
    """
    is_tensor = isinstance(reference_result, torch.Tensor)
    reference_strides = reference_result.stride() if is_tensor else reference_result.strides
    if elements_share_memory(reference_result.shape, reference_strides):
        return
    try:
        strides = layout_of(description).strides
    except BadDescriptionError:  # the result cannot be read either, and the reading says why
        return
    if elements_share_memory(description["shape"], strides):
        reason = (
            f"elements of its result share memory or interleave (strides {strides}), the "
            "reference's do not; contiguous() separates them"
        )
        raise NotCorrectError(WRONG, f"{case_name}: {reason}"[:MAX_LINE_LENGTH])


def is_in_shared_memory(grading: Grading, description: dict) -> bool:
    """Return whether a result is in the referee's memory, where inputs and parameters are."""
    if grading.device.type == "cuda":
        return grading.resources.memory.pool.allocation(description.get("handle")) is not None
    start, end = grading.solution.addresses
    address = description.get("address")
    return isinstance(address, int) and start <= address < end


def read_result(
    grading: Grading, description: dict, case_name: str, index: ResultIndex
) -> torch.Tensor:
    """Return a result of the solution.

    Args:
        grading: the file under grading.
        description: describes the result.
        case_name: the case in messages.
        index: the result's index in the reply.
    """
    if grading.resources.memory.are_results_copied:
        return grading.resources.memory.outputs[index.call_index].tensors[index.result_index]
    try:
        return grading.solution.reader.read_whole(description)
    except (UnreadableError, BadDescriptionError) as error:
        reason = f"{case_name}: its result cannot be read when the call has returned: {error}"
        raise NotCorrectError(WRONG, reason[:MAX_LINE_LENGTH]) from None


def check_complete(elements: dict, result_index: int, result: torch.Tensor, case_name: str) -> None:
    """Check that a result was complete as soon as the call had returned.

    The process then read some elements itself. They must be the same now. They differ if the call
    leaves work on another stream for which the current one does not wait.

    A cheat may report false elements, so this check finds only honest mistakes. Late results of
    cheats are found by `rounds.early_elements`.

    Args:
        elements: what the process has read, see `kept_results.read_at_once`.
        result_index: the index of the result.
        result: the result, read later.
        case_name: the case in messages.
    """
    if elements.get("result") != result_index:
        return
    indices = elements.get("indices")
    is_valid = isinstance(indices, list) and 0 < len(indices) <= MAX_REPORTED
    if is_valid and all(type(index) is int and 0 <= index < result.numel() for index in indices):
        late = as_indexable(result).reshape(-1)[torch.tensor(indices, device=result.device)].cpu()
        if bytes(late.view(torch.uint8).tolist()).hex() == elements.get("bytes"):
            return
    reason = (
        "its result is not complete on the current stream when the call has returned; "
        "let this stream wait for the others"
    )
    raise NotCorrectError(WRONG, f"{case_name}: {reason}"[:MAX_LINE_LENGTH])
