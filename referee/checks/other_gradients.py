"""Gradients for inputs of both signs, which `get_inputs` may never draw.

Where all drawn inputs are positive, ReLU may pass on the gradient of its output: no other check
would find that. `other_inputs` does the same for results.
"""

import torch

from referee.checks.gradients import (
    BackwardRaisesError,
    ForwardOnlyError,
    NothingToCompareError,
    begin_step,
    compare_step,
)
from referee.checks.solution_step import prepare_step
from referee.grading import Grading
from referee.message_lines import MAX_LINE_LENGTH
from referee.reference.file import NoRoomError
from referee.reference.unusual_inputs import BOTH_SIGNS, unusual_inputs
from referee.verdict import NotCorrectError
from referee.verdict_words import WRONG

NO_ROOM = f"no memory to compare gradients for {BOTH_SIGNS}"


def check_other_gradients(grading: Grading) -> None:
    """Compare gradients for inputs of both signs, if the results for such inputs were right.

    A solution whose results were those of another function may have the gradients of that one.
    """
    findings = grading.findings
    if not findings.quantities or not findings.is_right_for_both_signs:
        return
    grading.progress("checking", f"the backward: {BOTH_SIGNS}")
    try:
        _compare_step(grading)
    except NothingToCompareError:
        pass
    except BackwardRaisesError:
        grading.verdict.refused.append(BOTH_SIGNS)
    except ForwardOnlyError:
        raise NotCorrectError(WRONG, f"lacks a gradient for {BOTH_SIGNS}") from None
    except (NoRoomError, torch.OutOfMemoryError):
        grading.verdict.notes.append(NO_ROOM)
    grading.resources.free_results(grading.solution)


def _compare_step(grading: Grading) -> None:
    """Compare results and gradients of one step, if the reference's are finite.

    A gradient is wrong only if it is far off: `gradient_rules` says why one step tells no more.

    Raises:
        NotCorrectError, or what `compare_step` raises.
    """
    inputs = unusual_inputs(grading.problem, BOTH_SIGNS, grading.draw_inputs())
    step = prepare_step(grading, inputs)
    quantities = [quantity.without_steps() for quantity in grading.findings.quantities]
    begin_step(grading, step, quantities)
    if not all(quantity.is_reference_finite for quantity in quantities):
        return
    compare_step(grading, step, quantities)
    for quantity in quantities:
        if quantity.is_wrong_in_one_step:
            reason = f"training step for {BOTH_SIGNS}, {quantity.find_mistake()}"
            raise NotCorrectError(WRONG, reason[:MAX_LINE_LENGTH])
