"""Checks that inputs, parameters and gradients of outputs still have every bit that was written."""

from referee.contestants.region import Region
from referee.grading import Grading
from referee.verdict import NotCorrectError
from referee.verdict_words import WRONG


def check_intact(
    grading: Grading, case_name: str, call_count: int = 1, with_gradients: bool = False
) -> None:
    """Check that inputs, parameters and gradients of outputs have every bit that was written.

    Args:
        grading: the file under grading.
        case_name: the case in messages.
        call_count: how many calls the request had.
        with_gradients: whether gradients of outputs were written.
    """
    resources = grading.resources
    if not _are_unchanged(resources.memory.inputs[:call_count]):
        raise NotCorrectError(WRONG, f"changes its input, which must stay intact: {case_name}")
    if with_gradients and not _are_unchanged(resources.memory.output_gradients[:call_count]):
        reason = f"changes the gradient of its output, which must stay intact: {case_name}"
        raise NotCorrectError(WRONG, reason)
    if changed := grading.state.changed_parameters(grading.reference.buffer_names()):
        reason = f"changes its parameter {changed[0]}, which must stay intact: {case_name}"
        raise NotCorrectError(WRONG, reason)


def check_eager_intact(grading: Grading) -> None:
    """Check that eager's parameters, which are in the same shared memory, are what was written."""
    buffers = grading.reference.buffer_names()
    processes = grading.resources.eager.members
    if any(process.state.changed_parameters(buffers) for process in processes):
        raise NotCorrectError(
            WRONG, "writes into eager's parameters, which are in the same memory as its inputs"
        )


def _are_unchanged(regions: list[Region]) -> bool:
    """Return whether regions of shared memory still have every bit that was written."""
    return all(region.is_unchanged() for region in regions)
