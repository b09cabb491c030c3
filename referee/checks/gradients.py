"""Gradients of inputs and parameters, at small sizes of the problem's own and at the timed one.

A training step has results and gradients; each of them is a `Quantity`, which records how far off
the solution's tensors are over several steps.

In the two checks of this file, a solution is not wrong if gradients are missing or if its training
step raises: a note says "forward only", and no training step is timed. So it is if only gradients
of inputs are wrong, and the solution may rely on what `get_inputs` draws. But if such a solution
runs a forward that autograd records, the results must be right. The later checks of training steps
are stricter: a missing gradient is wrong there.
"""

from collections.abc import Iterator

import torch

from referee.checks.buffers import compare_buffers, prepare_buffers
from referee.checks.copied_results import room_for_copies
from referee.checks.forward import check_case
from referee.checks.intact import check_intact
from referee.checks.returned_results import check_complete
from referee.checks.solution_step import (
    check_results_of_step_apart,
    prepare_step,
    read_quantity,
)
from referee.comparison.case import Case
from referee.comparison.quantity import Kind, Quantity, make_quantities
from referee.contestants.descriptions import ResultIndex
from referee.contestants.errors import RaisedError
from referee.grading import Grading
from referee.message_lines import MAX_LINE_LENGTH
from referee.reference.file import NoRoomError
from referee.reference.problem import StepArguments
from referee.rounds.turns import only_compiled
from referee.verdict import NotCorrectError, outcome_of_exception
from referee.verdict_words import WRONG

COMPARED_STEPS = 2  # training steps, each with new inputs
COMPARED_AFTER_OWN_INPUTS = 1  # with has_own_cases: small inputs were compared before
LEFT_TO_FULL = "gradients were compared at small sizes; --full compares and times them at this one"
NO_ROOM = "no memory to compare gradients"
RECORDED_FORWARD = "a forward that autograd records"
OUT_OF_MEMORY = "forward only: its training step runs out of memory"


class ForwardOnlyError(Exception):
    """The solution's gradients are not those of the reference; the message is a note."""


class BackwardRaisesError(ForwardOnlyError):
    """The solution's training step raises."""


class NothingToCompareError(Exception):
    """The reference has no gradients, or some that cannot be compared."""


def check_own_gradients(grading: Grading) -> None:
    """Compare gradients for the problem's own small inputs, under each precision setting."""
    problem = grading.problem
    if not problem.backward_inputs():
        return
    grading.construct(problem.backward_arguments())
    for setting in problem.settings:
        grading.set_precision(setting)
        for group in problem.backward_inputs():
            if not _compare_steps(grading, iter(group)):
                grading.findings.is_forward_only = True
                return


def check_gradients(grading: Grading) -> None:
    """Compare gradients at the timed size; keep the quantities if they are right."""
    problem = grading.problem
    grading.findings.quantities = []
    if grading.findings.is_forward_only:
        _check_recorded_forward(grading)
        return
    if problem.parameter_bytes > grading.options.largest_gradients:
        grading.verdict.notes.append(LEFT_TO_FULL)
        return
    _make_room(grading)
    count = COMPARED_AFTER_OWN_INPUTS if problem.file.has_own_cases else COMPARED_STEPS
    try:
        quantities = _compare_steps(grading, (grading.draw_inputs() for _ in range(count)))
    except (NoRoomError, torch.OutOfMemoryError):
        grading.verdict.notes.append(NO_ROOM)
        return
    if obstacle := grading.reference.float64_obstacle_in_steps:
        grading.verdict.notes.append(f"training step: {obstacle}")
    grading.findings.quantities = quantities
    if not quantities:
        _check_recorded_forward(grading)
    # A project's table shows how far off gradients are, if they need not equal eager's.
    elif problem.needs_float64 and problem.file.has_own_cases:
        _note_errors_of_gradients(grading)


def _check_recorded_forward(grading: Grading) -> None:
    """Compare the results of a forward that autograd records, if no gradients were compared.

    A module can see whether autograd records it, by `torch.is_grad_enabled()`, and the other checks
    have compared only forwards that are not recorded.
    """
    grading.resources.free_results(grading.solution)  # of a step without gradients
    case = Case(RECORDED_FORWARD, grading.draw_inputs(), required=False, is_recorded=True)
    check_case(grading, case)
    grading.resources.free_results(grading.solution)


def _note_errors_of_gradients(grading: Grading) -> None:
    """Add the errors of all gradients to the verdict's table."""
    for quantity in grading.findings.quantities:
        if quantity.comparison and not quantity.is_result:
            name = ", ".join(filter(None, [grading.problem.setting, quantity.name]))
            grading.verdict.note_errors(
                name,
                grading.problem.setting,
                quantity.name,
                solution=quantity.comparison.errors,
                reference=quantity.spec.reference_errors,
            )


def _make_room(grading: Grading) -> None:
    """Free the memory that forwards needed, for training steps."""
    resources = grading.resources
    grading.forget_round()
    resources.eager.keep_yardsticks(tuple(only_compiled(resources.eager.yardsticks)))
    for contestant in (grading.solution, *resources.eager.members):
        resources.free_all_unused(contestant)
    if grading.device.type == "cuda":
        torch.cuda.empty_cache()


def _compare_steps(grading: Grading, inputs_of_steps: Iterator[list]) -> list[Quantity]:
    """Compare training steps, one for each draw of inputs, until one has no gradients.

    Returns:
        The results and gradients. The list is empty if gradients are not right or cannot be
        compared; if the solution is the cause, a note says so.

    Raises:
        NotCorrectError: a result or gradient is wrong.
    """
    grading.progress("checking", "the backward")
    quantities: list[Quantity] = []
    try:
        for inputs in inputs_of_steps:
            grading.reference.redraw_values()
            quantities = _compare_drawn_step(grading, inputs, quantities)
            del inputs  # `draw_inputs` frees the only other reference, `grading.latest_inputs`
        _judge_quantities(grading, quantities)
    except ForwardOnlyError as error:
        grading.verdict.notes.append(str(error))
        return []
    except NothingToCompareError:
        return []
    return quantities


def _compare_drawn_step(
    grading: Grading, inputs: list, quantities: list[Quantity]
) -> list[Quantity]:
    """Compare one training step; return its results and gradients.

    Args:
        grading: the file under grading.
        inputs: the arguments of the forward.
        quantities: results and gradients of the steps before; empty before the first step.
    """
    step = prepare_step(grading, inputs)
    if not quantities:
        quantities = make_quantities(inputs, step.parameters, step.output_count)
    begin_step(grading, step, quantities)
    compare_step(grading, step, quantities)
    return quantities


def _judge_quantities(grading: Grading, quantities: list[Quantity]) -> None:
    """Judge the results and gradients of all steps.

    Raises:
        ForwardOnlyError: some are wrong, but only gradients that may be wrong.
        NotCorrectError: a result or another gradient is wrong.
    """
    wrong = [quantity for quantity in quantities if quantity.find_mistake()]
    if not wrong:
        return
    # If the solution equals the reference only for the inputs that get_inputs draws, it is another
    # function of the inputs, and may have other gradients of them.
    are_all_of_inputs = all(quantity.kind is Kind.INPUT_GRADIENT for quantity in wrong)
    if grading.findings.may_rely_on_inputs and are_all_of_inputs:
        names = ", wrong ".join(quantity.name for quantity in wrong)
        raise ForwardOnlyError(f"forward only: wrong {names}")
    mistakes = "; ".join(str(quantity.find_mistake()) for quantity in wrong)
    raise NotCorrectError(WRONG, mistakes[:MAX_LINE_LENGTH])


def begin_step(grading: Grading, step: StepArguments, quantities: list[Quantity]) -> None:
    """Run the reference's step; give each quantity the reference's tensor of this step.

    Raises:
        NothingToCompareError: the reference has no gradients that can be compared.
    """
    grading.latest_inputs = step.inputs
    tensors = grading.reference.step_with_budgets(step)
    if not tensors:
        raise NothingToCompareError
    for quantity, tensor in zip(quantities, tensors, strict=True):
        before = quantity.spec
        if before and tensor and before.shape != tensor.spec.shape:
            raise NothingToCompareError  # its shape depends on the inputs' values
        quantity.begin_step(tensor)


def compare_step(grading: Grading, step: StepArguments, quantities: list[Quantity]) -> None:
    """Have the solution run a step; compare results and gradients with the reference's.

    Args:
        grading: the file under grading.
        step: the step.
        quantities: its results and gradients, for which `begin_step` has run the reference.

    Raises:
        BackwardRaisesError: the solution's step raises.
        ForwardOnlyError: a gradient is missing.
        NotCorrectError: the step has changed its inputs, or a result or gradient is wrong.
    """
    has_changed_buffers = bool(grading.problem.changed_buffers)
    if has_changed_buffers:
        prepare_buffers(grading)
    reply = ask_for_step(grading, step, quantities)
    check_intact(grading, "the backward", with_gradients=True)
    _check_gradients_exist(reply["returned"][0]["results"], quantities, step.output_count)
    _compare_quantities(grading, quantities, reply, step.are_masked)
    if has_changed_buffers:
        inputs = step.inputs
        compare_buffers(grading, grading.reference.buffers_after(inputs), "a training step")
    grading.resources.free_results(grading.solution)
    grading.verdict.case_count += 1


def _compare_quantities(
    grading: Grading, quantities: list[Quantity], reply: dict, are_masked: bool
) -> None:
    """Compare each result and gradient of a step with its error budget.

    Args:
        grading: the file under grading.
        quantities: results and gradients.
        reply: has a description for each quantity.
        are_masked: whether the outputs' gradients are zero wherever rounding decides if a gradient
            passes (`StepArguments`). Then rounding excuses no wrong element.
    """
    descriptions = reply["returned"][0]["results"]
    check_results_of_step_apart(grading, quantities, descriptions, RECORDED_FORWARD)
    for result_index, (quantity, description) in enumerate(
        zip(quantities, descriptions, strict=True)
    ):
        if quantity.spec is None:
            continue
        case_name = f"{quantity.name}, recorded"
        index = ResultIndex(0, result_index)
        got = read_quantity(grading, quantity, description, case_name, index)
        check_complete(reply["elements"], result_index, got, quantity.name)
        rounded_otherwise = grading.reference.rounded_otherwise(grading.latest_inputs, result_index)
        quantity.judge_untimed(got, rounded_otherwise, are_masked=are_masked)


def ask_for_step(grading: Grading, step: StepArguments, quantities: list[Quantity]) -> dict:
    """Ask the solution for an untimed training step; return its reply.

    Raises:
        BackwardRaisesError: the step raises.
    """
    resources = grading.resources
    grading.write_inputs([step.inputs])
    grading.write_state()
    resources.memory.write_output_gradients([step.output_gradients])
    specs = [quantity.spec for quantity in quantities]
    try:
        return grading.solution.ask(
            "run_checked_step",
            inputs=resources.memory.input_locations(1),
            output_gradients=resources.memory.output_gradient_locations(1),
            parameters=[grading.state.own_name_of[name] for name in step.parameters],
            result_bytes=_largest_bytes(quantities),
            outputs=room_for_copies(grading, specs),
        )
    except RaisedError as raised:
        if "CUDA error" in str(raised.args[0].get("text")):
            raise
        if raised.is_lack_of_memory:
            raise BackwardRaisesError(OUT_OF_MEMORY) from None
        _, line = outcome_of_exception(raised, "checking the backward")
        raise BackwardRaisesError(f"forward only: its training step raises {line}") from None


def _largest_bytes(quantities: list[Quantity]) -> int:
    """Return the bytes of the largest result or gradient of the reference."""
    existing = [quantity.spec for quantity in quantities if quantity.spec]
    return max(spec.numel * spec.dtype.itemsize for spec in existing)


def _check_gradients_exist(
    descriptions: list, quantities: list[Quantity], output_count: int
) -> None:
    """Check that the solution's step has all gradients that the reference's has.

    Args:
        descriptions: the reply's descriptions, one for each quantity.
        quantities: results first, then gradients.
        output_count: how many of the quantities are results.

    Raises:
        ForwardOnlyError: some are missing; the message names them, unless all gradients are.
        NotCorrectError: the step has another number of results.
    """
    if len(descriptions) != len(quantities):
        raise NotCorrectError(
            WRONG, "a recorded forward returns another kind of result than before"
        )
    indices = missing_indices(descriptions, quantities)
    missing = [quantities[i].name for i in indices if not quantities[i].is_result]
    if not missing:
        return
    gradients = [quantity for quantity in quantities[output_count:] if quantity.spec]
    which = f": no {', no '.join(missing)}" if len(missing) < len(gradients) else ""
    raise ForwardOnlyError(f"forward only{which}"[:MAX_LINE_LENGTH])


def missing_indices(descriptions: list, quantities: list[Quantity]) -> list[int]:
    """Return the indices of the results and gradients that only the reference has.

    Args:
        descriptions: the reply's descriptions, one for each quantity.
        quantities: results and gradients.
    """
    return [
        i
        for i, (quantity, description) in enumerate(zip(quantities, descriptions, strict=True))
        if quantity.spec and description.get("type") == "NoneType"
    ]
