"""Copies of results, where the system does not let the referee read results in place.

The process itself copies its results into the referee's memory, at the end of a request. Such a
copy stays right though the result itself changes later: because it is in the memory of an input,
for example, or because a later call reuses its memory. So the referee has results copied once more
after it has changed what they may share memory with.
"""

from collections.abc import Sequence

import torch

from referee.comparison.reference_tensor import ReferenceTensor
from referee.grading import Grading
from referee.verdict import NotCorrectError
from referee.words import WRONG


def room_for_copies(
    grading: Grading, reference_results: Sequence[ReferenceTensor | None], calls: int = 1
) -> list[dict] | None:
    """Make room for copies of the results of a request; return a location for each call.

    Args:
        grading: the file under grading.
        reference_results: the reference's results of a call; None where it has none.
        calls: how many calls the request has.

    Returns:
        None if results are read in place.
    """
    memory = grading.bench.memory
    if not memory.are_results_copied:
        return None
    templates = [_blank(result, grading.device) for result in reference_results]
    return memory.room_for(templates, calls)


def _blank(result: ReferenceTensor | None, device: torch.device) -> torch.Tensor:
    """Return a tensor of a result's shape and dtype, with any values; an empty one for None."""
    if result is None:
        return torch.empty(0, device=device)
    return torch.empty(result.shape, dtype=result.dtype, device=device)


def check_copies_stay(grading: Grading, case_name: str, calls: int) -> None:
    """Check that results of a request do not change with inputs and parameters.

    `fill_with_nan` has changed these since the first copies were made.

    Args:
        grading: the file under grading.
        case_name: the case in messages.
        calls: how many calls the request had.
    """
    memory = grading.bench.memory
    if not memory.are_results_copied:
        return
    regions = memory.outputs[:calls]
    for region in regions:
        region.keep_values()
        region.fill_with_nan()
    grading.solution.ask("copy_results", outputs=[region.location for region in regions])
    are_same = all(region.is_unchanged() for region in regions)
    for region in regions:
        region.forget()
    if not are_same:
        reason = "its result changes with its input or a parameter; return new memory"
        raise NotCorrectError(WRONG, f"{case_name}: {reason}")
