"""Results and gradients of training steps stay the same while later steps run.

A module that returns the same memory in each step, or a few buffers in turn, saves the cost of new
memory and overwrites what its caller has. `values` checks the results of forwards in the same way.
"""

from typing import NamedTuple

import torch

from referee.checks.gradients import BackwardRaisesError, ask_for_step, missing_indices
from referee.checks.intact import check_intact
from referee.checks.returned_results import check_complete, is_in_shared_memory, read_result
from referee.checks.solution_step import prepare_step
from referee.checks.values import count_of_held
from referee.comparison.compare import first_mismatch
from referee.contestants.descriptions import ResultIndex
from referee.grading import Grading
from referee.reference.file import NoRoomError
from referee.reference.problem import StepArguments
from referee.verdict import NotCorrectError
from referee.verdict_words import WRONG

NO_ROOM = "no memory to see whether later training steps change a gradient"


class HeldTensor(NamedTuple):
    """A result or gradient that the solution's process holds while later steps run.

    Attributes:
        name: its name in messages.
        description: the reply's, which says where it is.
        values: a copy of its values, made as soon as its step had returned.
    """

    name: str
    description: dict
    values: torch.Tensor


def check_step_memory(grading: Grading) -> None:
    """Check that the results and gradients of some steps survive one more step.

    Nothing is checked if there are no gradients to compare, in a project's quick check, or where
    results are copied: then the referee sees copies alone.
    """
    resources = grading.resources
    is_left_out = grading.options.is_quick or resources.memory.are_results_copied
    if not grading.findings.quantities or is_left_out:
        return
    step_bytes = grading.problem.all_bytes  # gradients have the sizes of inputs and parameters
    held_count = count_of_held(grading.device, step_bytes, step_bytes)
    if held_count == 0:
        return
    grading.progress("checking", "later training steps")
    try:
        held_steps = [_run_step(grading) for _ in range(held_count)]
        _run_step(grading)
    except BackwardRaisesError as error:
        grading.verdict.notes.append(str(error))
        grading.findings.quantities = []
        return
    except (NoRoomError, torch.OutOfMemoryError):
        grading.verdict.notes.append(NO_ROOM)
        resources.free_results(grading.solution)
        return
    for held_tensors in held_steps:
        for held in held_tensors:
            _check_unchanged(grading, held)
    resources.free_results(grading.solution)


def _run_step(grading: Grading) -> list[HeldTensor]:
    """Have the solution run a step for new inputs; return what it gives in memory of its own.

    A gradient may be in the referee's memory, which the next step overwrites. For example, autograd
    returns the gradient of a sum as that of its terms.
    """
    quantities = grading.findings.quantities
    inputs = grading.problem.draw()
    grading.latest_inputs = inputs
    step = prepare_step(grading, inputs)
    reply = ask_for_step(grading, step, quantities)
    check_intact(grading, "a training step", with_gradients=True)
    held_tensors = []
    descriptions = reply["returned"][0]["results"]
    _check_no_gradient_vanishes(grading, step, descriptions)
    for i, (quantity, description) in enumerate(zip(quantities, descriptions, strict=True)):
        may_change = quantity.is_result and i in grading.problem.sharing_results
        is_tensor = quantity.spec and description.get("type") == "Tensor"
        if is_tensor and not may_change and not is_in_shared_memory(grading, description):
            values = read_result(grading, description, quantity.name, ResultIndex(0, i))
            check_complete(reply["elements"], i, values, quantity.name)
            held_tensors.append(HeldTensor(quantity.name, description, values.clone()))
    return held_tensors


def _check_no_gradient_vanishes(grading: Grading, step: StepArguments, descriptions: list) -> None:
    """Raise NotCorrectError if the solution lacks a gradient that the reference has in this step.

    Earlier steps had it. The reference's may depend on the inputs, so it is asked again.
    """
    quantities = grading.findings.quantities
    if len(descriptions) != len(quantities):
        raise NotCorrectError(WRONG, "a later step gives another kind of result than before")
    missing = missing_indices(descriptions, quantities)
    if not missing:
        return
    eager_results = grading.reference.eager_results_of_step(step)
    for i in missing:
        if eager_results[i] is not None:
            reason = f"a later step has no {quantities[i].name}, which earlier steps had"
            raise NotCorrectError(WRONG, reason)


def _check_unchanged(grading: Grading, held: HeldTensor) -> None:
    """Raise NotCorrectError if a held result or gradient has other bits than after its step."""
    values = read_result(grading, held.description, held.name, ResultIndex(0, 0))
    if first_mismatch(values, held.values, bitwise=True):
        reason = f"a later step overwrites an earlier step's {held.name}; return new memory"
        raise NotCorrectError(WRONG, reason)
