"""One forward of the solution beside the reference's: `check_case`."""

from collections.abc import Iterator
from functools import partial

import torch

from referee.checks.diagnosis import ComparedResult, diagnose, resemblance
from referee.checks.intact import check_intact
from referee.checks.returned_results import check_complete, check_results, read_result
from referee.comparison.case import Case
from referee.comparison.compare import flat_reals
from referee.comparison.reference_tensor import Comparison, ReferenceTensor
from referee.contestants.described_results import ResultPlace
from referee.contestants.errors import RaisedError
from referee.grading import Grading
from referee.messages import LONGEST_LINE
from referee.names import MODULE
from referee.verdict import NotCorrectError, outcome_of_exception
from referee.words import WRONG

# Some results and inputs are kept, to recognize a solution that returns an earlier call's result.
LARGEST_EARLIER_RESULT = 1 << 26  # bytes
MOST_EARLIER_RESULTS = 32
LARGEST_PREVIOUS_INPUTS = 1 << 30  # bytes


def check_case(grading: Grading, case: Case, for_timed_calls: bool = False) -> list[Comparison]:
    """Compare one forward with the reference's.

    Args:
        grading: the file under grading.
        case: the inputs, on the device, and what the solution has to do with them.
        for_timed_calls: whether the error budgets of these results are kept for timed calls. The
            inputs must then be like theirs, and as large.

    Returns:
        The comparison of each result; an empty list if the solution refuses the inputs.

    Raises:
        NotCorrectError: the solution is wrong.
        RaisedError: it refuses inputs that it has to take.
    """
    grading.progress("checking", case.name)
    grading.verdict.count += 1
    are_inputs_small = grading.problem.input_bytes <= LARGEST_PREVIOUS_INPUTS
    previous_inputs = grading.latest_inputs if are_inputs_small else []
    grading.latest_inputs = case.inputs
    expected = grading.reference.expected(case.inputs)
    grading.write_inputs([case.inputs])
    grading.write_state()
    try:
        reply = _ask(grading, expected, case.fill_new_tensors)
    except RaisedError as raised:
        _note_refusal(grading, case.name, raised, case.required)
        return []
    check_intact(grading, case.name)
    comparisons = []
    for result in _compare_results(grading, case, previous_inputs, expected, reply):
        comparisons.append(result.comparison)
        if not result.comparison.mistake:
            continue
        if not _is_another_function(grading, case, result):
            raise NotCorrectError(WRONG, diagnose(grading, case.name, result)[:LONGEST_LINE])
        grading.findings.relies_on_inputs = True
        grading.verdict.notes.append(f"differs from the reference for {case.name}")
        grading.bench.free_results(grading.solution)
        return comparisons  # the other results say nothing
    _keep_result(grading, expected)
    if for_timed_calls:
        grading.findings.reference_tensors = expected
    for tensor in expected:
        tensor.forget()
    grading.bench.free_results(grading.solution)
    return comparisons


def _compare_results(
    grading: Grading,
    case: Case,
    previous_inputs: list,
    expected: list[ReferenceTensor],
    reply: dict,
) -> Iterator[ComparedResult]:
    """Check the form of the solution's results; compare each with the reference's and yield it.

    Args:
        grading: the file under grading.
        case: the inputs, and how the solution may treat them.
        previous_inputs: the inputs of the call before, or [].
        expected: the reference's results.
        reply: describes the solution's.
    """
    descriptions = check_results(grading, case.name, reply["returned"][0], expected)
    for result_index, (tensor, description) in enumerate(zip(expected, descriptions, strict=True)):
        whole = read_result(grading, description, case.name, ResultPlace(0, result_index))
        check_complete(reply["elements"], result_index, whole, case.name)
        got = flat_reals(whole)
        second_look = grading.reference.second_look(case.inputs, result_index)
        comparison = tensor.compare(got, second_look)
        yield ComparedResult(result_index, case.inputs, previous_inputs, tensor, got, comparison)


def _is_another_function(grading: Grading, case: Case, result: ComparedResult) -> bool:
    """Return whether a wrong result is that of another function, which the case allows."""
    if not case.may_differ or not result.comparison.is_gross:
        return False
    return not resemblance(grading, result)


def _bytes_of(expected: list[ReferenceTensor]) -> int:
    """Return the bytes of all results of the reference."""
    return sum(tensor.numel * tensor.dtype.itemsize for tensor in expected)


def _ask(grading: Grading, expected: list[ReferenceTensor], fill_new_tensors: bool) -> dict:
    """Call the solution; if its results cannot be read in place, call it again, with copies.

    Args:
        grading: the file under grading.
        expected: the reference's results.
        fill_new_tensors: whether torch fills new tensors with NaN meanwhile.
    """
    memory = grading.bench.memory
    ask = partial(
        grading.solution.ask,
        "run_forwards",
        call_name=MODULE,
        inputs=memory.input_locations(1),
        fill_new_tensors=fill_new_tensors,
        # Before the call, the process fills this many free bytes with NaN. The result may get this
        # memory; a result that is not written is then NaN.
        nan_bytes=_bytes_of(expected),
    )
    if not memory.are_results_copied:
        reply = ask()
        if _are_readable(reply["returned"][0]["results"]):
            return reply
        _copy_results_from_now_on(grading)
    return ask(outputs=memory.room_for([_blank(tensor) for tensor in expected], 1))


def _copy_results_from_now_on(grading: Grading) -> None:
    """Have all processes copy their results into shared memory; a note says so."""
    grading.bench.memory.are_results_copied = True
    note = "results are copied within the clock, eager's too: their memory cannot be shared"
    grading.verdict.notes.append(note)


def _are_readable(descriptions: list[dict]) -> bool:
    """Return whether the referee can read these results in place.

    On a CPU all can be read here: their descriptions have no handle. On a GPU, a result that CUDA
    IPC cannot share has the handle None, see `describe` in `contestants.described_results`.
    """
    return all(description.get("handle", "") is not None for description in descriptions)


def _blank(tensor: ReferenceTensor) -> torch.Tensor:
    """Return a tensor of a result's form, with any values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.eager.device)


def _note_refusal(grading: Grading, case_name: str, raised: RaisedError, required: bool) -> None:
    """Note that the solution refuses inputs, if it may refuse them; else raise the verdict.

    Args:
        grading: the file under grading.
        case_name: the case in messages; the part before the first comma is the kind of the inputs.
        raised: what the solution raised.
        required: whether it must take the inputs.
    """
    is_crash = "CUDA error" in str(raised.args[0].get("text"))
    # A module that has taken other small cases, but not this one, is wrong. One that has taken
    # none does not work: the verdict is an error.
    has_taken_others = grading.verdict.count > 1 and grading.problem.file.covers_all_values
    if is_crash or (required and not has_taken_others):
        raise raised
    if required:
        _, line = outcome_of_exception(raised, case_name)
        raise NotCorrectError(WRONG, f"does not take {case_name}: {line}")
    kind = case_name.partition(",")[0]
    if kind not in grading.verdict.refused:
        grading.verdict.refused.append(kind)


def _keep_result(grading: Grading, expected: list[ReferenceTensor]) -> None:
    """Keep the reference's first result, so that a later result that replays it is recognized."""
    if _bytes_of(expected) <= LARGEST_EARLIER_RESULT and expected[0].numel > 1:
        grading.earlier_results.append(expected[0].eager.cpu())
        del grading.earlier_results[:-MOST_EARLIER_RESULTS]
