"""Copies of results, where the system does not let the referee read results in place.

The process itself copies its results into the referee's memory, at the end of a request. Such a
copy stays right even if the result changes later because its memory is not new: it may be an
input's, or that of a later call's result. So the referee overwrites the inputs, or calls the module
again, and then has the results copied once more.
"""

from collections.abc import Sequence

import torch

from referee.comparison.result_spec import ResultSpec
from referee.grading import Grading
from referee.verdict import NotCorrectError
from referee.verdict_words import WRONG


def room_for_copies(grading: Grading, specs: Sequence[ResultSpec | None]) -> list[dict] | None:
    """Make room for copies of the results of one call; return a list of their location.

    Args:
        grading: the file under grading.
        specs: the reference's demands on each result; None where the reference has no result.

    Returns:
        None if results are read in place.
    """
    memory = grading.resources.memory
    if not memory.are_results_copied:
        return None
    return memory.room_for([[_blank(spec, grading.device) for spec in specs]])


def _blank(spec: ResultSpec | None, device: torch.device) -> torch.Tensor | None:
    """Return a tensor of a result's shape and dtype, with any values; None if there is none."""
    if spec is None:
        return None
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)


def check_copies_stay(grading: Grading, case_name: str, call_count: int) -> None:
    """Check that results of a request do not change with inputs and parameters.

    `turn_memory.reading_results` has changed these since the first copies were made.

    Args:
        grading: the file under grading.
        case_name: the case in messages.
        call_count: the number of calls of the request.
    """
    memory = grading.resources.memory
    if not memory.are_results_copied:
        return
    regions = memory.outputs[:call_count]
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
