"""Whole results at the timed size, for several sets of inputs and parameters."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from referee.call_names import MODULE
from referee.checks.forward import check_case
from referee.checks.intact import check_intact
from referee.checks.returned_results import check_results, read_result
from referee.comparison.accuracy import ErrorSizes, accuracy_class
from referee.comparison.case import Case
from referee.comparison.reference_tensor import Comparison
from referee.contestants.descriptions import ResultIndex
from referee.contestants.free_memory import free_bytes
from referee.grading import Grading
from referee.reference.problem import Problem
from referee.reference.unusual_inputs import ALTERED, unusual_inputs
from referee.verdict import NotCorrectError
from referee.verdict_words import WRONG

FORWARDS = 3  # each with new inputs or parameters
FORWARDS_AFTER_OWN_CASES = 2  # with has_own_cases: small cases were compared before
# This many results are held while later calls run, to see whether a call overwrites one of them.
# So a module that returns up to this number of buffers in turn is found.
MAX_HELD_RESULTS = 4
# Bytes that all held results may take in the solution's process, and their inputs in the referee's.
# Fewer results are held if they are large, and none if a single one takes more.
MAX_HELD_BYTES = {"cpu": 1 << 30, "cuda": 1 << 33}
# Held results take at most this part of the free memory. A result that takes more is held alone.
SHARE_FOR_HELD = 1 / 8


@dataclass
class ComparedForwards:
    """The comparisons of several forwards, with different inputs and parameters.

    Attributes:
        last_errors: how far off the first result of the last forward is.
        largest_relative_error: the largest relative error of a result.
        have_eagers_bits: whether all results equal eager's.
    """

    last_errors: ErrorSizes = field(default_factory=ErrorSizes)
    largest_relative_error: float = 0.0
    have_eagers_bits: bool = True

    def add(self, comparisons: list[Comparison]) -> None:
        """Add the comparisons of a forward's results."""
        self.last_errors = comparisons[0].errors
        for comparison in comparisons:
            relative_error = comparison.errors.relative
            self.largest_relative_error = max(self.largest_relative_error, relative_error)
            self.have_eagers_bits = self.have_eagers_bits and comparison.has_eagers_bits


class HeldCall(NamedTuple):
    """A call whose results are held while later calls run.

    Attributes:
        name: the call in messages: "call 2 of 5".
        inputs: its inputs.
        returned: the description of what it has returned.
    """

    name: str
    inputs: list
    returned: dict


def check_values(grading: Grading) -> None:
    """Compare results at the timed size: as constructed and with other parameters and inputs."""
    compared = _compare_forwards(grading)
    _check_accuracy(grading, compared)
    reference_errors = grading.findings.result_specs[0].reference_errors
    has_errors = reference_errors.largest != 0  # ReLU rounds nothing
    if grading.problem.file.has_own_cases and has_errors:
        grading.verdict.note_errors(
            _label(grading),
            grading.problem.setting,
            "output",
            solution=compared.last_errors,
            reference=reference_errors,
        )
    _check_results_stay(grading)


def _compare_forwards(grading: Grading) -> ComparedForwards:
    """Compare the results of forwards with several inputs and parameters."""
    _construct_or_redraw(grading)
    count = FORWARDS
    if grading.problem.file.has_own_cases:
        count = FORWARDS_AFTER_OWN_CASES
    compared = ComparedForwards()
    for index in range(count):
        inputs = _inputs_of_forward(grading, index)
        if index > 0:
            grading.reference.redraw_values()
        is_last = index == count - 1
        case = Case(_forward_name(grading, index), inputs, fill_new_tensors=is_last)
        checked = check_case(grading, case)
        grading.resources.free_results(grading.solution)
        compared.add(checked.comparisons)
        grading.findings.result_specs = checked.specs
    return compared


def _construct_or_redraw(grading: Grading) -> None:
    """Construct the module, or give it new values if an earlier setting has constructed it."""
    if grading.reference.has_timed_arguments:
        grading.reference.redraw_values()
    else:
        grading.progress("constructing", "the module")
        grading.construct(check_first_values=True)


def _inputs_of_forward(grading: Grading, index: int) -> list:
    """Return the inputs of a forward; the first has index 0.

    If there are parameters, the second forward has the inputs of the first one and other
    parameters. A solution that looks up a result by its input only is wrong there.
    """
    if index == 1 and grading.reference.parameter_names():
        return grading.latest_inputs
    return grading.draw_inputs()


def _label(grading: Grading) -> str:
    """Return the shape and the precision setting for messages, each where it is needed.

    A problem with small cases of its own needs the shape, which tells this size from theirs.
    """
    problem = grading.problem
    shape = f"{list(problem.shape)}" if problem.file.has_own_cases else ""
    return ", ".join(filter(None, [shape, problem.setting]))


def _forward_name(grading: Grading, index: int) -> str:
    """Return the name of a forward for messages; the first has index 0.

    Under a later precision setting, the module is "as constructed" but for its values.
    """
    if index == 0:
        name = "as constructed"
    elif grading.problem.parameter_bytes:  # they change from forward to forward
        name = "other parameters"
    else:
        name = f"draw {index + 1}"
    return ", ".join(filter(None, [_label(grading), name]))


def _check_accuracy(grading: Grading, compared: ComparedForwards) -> None:
    """Set the verdict's accuracy class; check that it is good enough for the problem."""
    problem = grading.problem
    relative_error = compared.largest_relative_error
    class_by_error = accuracy_class(relative_error)
    reached = problem.accuracy(relative_error, compared.have_eagers_bits, class_by_error)
    if not grading.verdict.accuracy:  # the first precision setting's class is kept
        grading.verdict.accuracy = reached
    required = problem.required_accuracy()
    if required and reached != required:
        precision = required.partition("-")[0]  # "float32" of "float32-grade"
        # `Problem.accuracy` returns no better class than the required one.
        reason = f"lower precision than {precision}: {reached}, relative error {relative_error:.2g}"
        raise NotCorrectError(WRONG, reason)


def _check_results_stay(grading: Grading) -> None:
    """Check that results stay the same when the module is called again for other inputs.

    A module that returns the same memory each time, or a few buffers in turn, saves the cost of new
    memory and overwrites what its caller has.
    """
    problem, resources = grading.problem, grading.resources
    bytes_of_call = max(problem.output_bytes, problem.input_bytes)
    held_count = count_of_held(grading.device, problem.output_bytes, bytes_of_call)
    if held_count == 0:
        return
    count = held_count + 1  # after the last held result, one more call follows
    calls = []
    for number, inputs in enumerate(_draw_different_inputs(problem, count), 1):
        returned = _call(grading, inputs)
        calls.append(HeldCall(f"call {number} of {count}", inputs, returned))
    held_calls = calls[:-1]
    _copy_held_results(grading, held_calls)
    compared_calls = held_calls
    if problem.input_source.repeats:
        # All inputs but the first are altered. A solution may compute another function of these.
        compared_calls = held_calls[:1]
    for index, call in enumerate(compared_calls):
        _check_held_result(grading, call, index, later_calls=calls[index + 1 :])
    resources.free_results(grading.solution)


def _draw_different_inputs(problem: Problem, count: int) -> list[list]:
    """Return the inputs of some calls, which must have different results.

    If equal inputs are drawn every time, all but the first are altered: equal results would not
    show that one has overwritten another.
    """
    first_inputs = problem.draw()
    inputs_of_calls = [first_inputs]
    while len(inputs_of_calls) < count:
        if problem.input_source.repeats:
            inputs_of_calls.append(unusual_inputs(problem, ALTERED, first_inputs))
        else:
            inputs_of_calls.append(problem.draw())
    return inputs_of_calls


def count_of_held(device: torch.device, held_bytes: int, bytes_of_call: int) -> int:
    """Return how many calls' results are held while a later one runs; 0 if one is too large.

    Args:
        device: where they are.
        held_bytes: the bytes of one call's results.
        bytes_of_call: the bytes of one call's inputs or results, whichever take more.
    """
    largest = MAX_HELD_BYTES[device.type]
    if held_bytes > largest:
        return 0
    room = min(largest, int(SHARE_FOR_HELD * free_bytes(device)))
    return max(1, min(MAX_HELD_RESULTS, room // max(bytes_of_call, 1)))


def _copy_held_results(grading: Grading, calls: list[HeldCall]) -> None:
    """Have the held results copied after all calls, if the referee cannot read them in place."""
    memory = grading.resources.memory
    if memory.are_results_copied:
        room = memory.room_for([grading.reference.eager_results(call.inputs) for call in calls])
        grading.solution.ask("copy_results", outputs=room)


def _check_held_result(
    grading: Grading, call: HeldCall, call_index: int, later_calls: list[HeldCall]
) -> None:
    """Check the results of a call after later calls, which may have overwritten them.

    Args:
        grading: the file under grading.
        call: the call.
        call_index: its index among the calls.
        later_calls: those after it.
    """
    reference = grading.reference
    eager_results = reference.eager_results(call.inputs)
    descriptions = check_results(grading, call.name, call.returned, eager_results)
    for i, description in enumerate(descriptions):
        if i in grading.problem.sharing_results:  # the reference's overwrite each other, too
            continue
        spec = grading.findings.result_specs[i]
        got = read_result(grading, description, call.name, ResultIndex(call_index, i))
        rounded_otherwise = reference.rounded_otherwise(call.inputs, i)
        mistake = spec.find_mistake(got, eager_results[i], rounded_otherwise)
        if not mistake:
            continue
        if any(spec.allows(got, reference.eager_results(c.inputs)[i]) for c in later_calls):
            mistake = "a later call overwrites an earlier call's result; return new memory"
            raise NotCorrectError(WRONG, mistake)
        raise NotCorrectError(WRONG, f"{call.name}: {mistake}")


def _call(grading: Grading, inputs: list) -> dict:
    """Call the solution once; return the description of what it has returned."""
    grading.latest_inputs = inputs
    grading.write_inputs([inputs])
    grading.write_state()
    locations = grading.resources.memory.input_locations(1)
    reply = grading.solution.ask("run_forwards", call_name=MODULE, inputs=locations)
    check_intact(grading, "several calls")
    return reply["returned"][0]
