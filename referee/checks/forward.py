"""One forward of the solution beside the reference's: `check_case`.

`comparison/__init__` has a picture of the classes that judge the result.
"""

from typing import NamedTuple

from referee.checks.copied_results import room_for_copies
from referee.checks.diagnosis import ComparedResult, diagnose, may_agree_by_chance, resemblance
from referee.checks.intact import check_intact
from referee.checks.returned_results import check_complete, check_results, read_result
from referee.comparison.case import Case
from referee.comparison.compare import flat_reals
from referee.comparison.reference_tensor import Comparison, ReferenceTensor
from referee.comparison.result_spec import ResultSpec
from referee.contestants.descriptions import ResultIndex
from referee.contestants.errors import RaisedError
from referee.grading import Grading
from referee.message_lines import MAX_LINE_LENGTH
from referee.verdict import NotCorrectError, outcome_of_exception
from referee.verdict_words import WRONG

# Some results and inputs are kept, to recognize a solution that returns an earlier call's result.
MAX_EARLIER_RESULT_BYTES = 1 << 26
MAX_EARLIER_RESULTS = 32
MAX_PREVIOUS_INPUT_BYTES = 1 << 30


class CheckedCase(NamedTuple):
    """The outcome of a case. Both lists have an entry for each result.

    Attributes:
        comparisons: the comparisons with the reference's results.
        specs: the reference's demands on the results.
    """

    comparisons: list[Comparison]
    specs: list[ResultSpec]


def check_case(grading: Grading, case: Case) -> CheckedCase | None:
    """Compare one forward with the reference's.

    The solution's process keeps its results until the next case, or `Resources.free_results`.

    Args:
        grading: the file under grading.
        case: the inputs, on the device, and what the solution has to do with them.

    Returns:
        None if the solution refuses the inputs, or computes another function of them, where the
        case allows that.

    Raises:
        NotCorrectError: the solution is wrong, or refuses inputs although it has taken others.
        RaisedError: it refuses inputs that it has to take, or a GPU's work has crashed.
    """
    grading.progress("checking the forward:", case.name)
    previous_inputs = _previous_inputs(grading)
    grading.latest_inputs = case.inputs
    reference_tensors = grading.reference.reference_tensors(case.inputs)
    specs = [tensor.spec for tensor in reference_tensors]
    grading.write_inputs([case.inputs])
    grading.write_state()
    try:
        reply = _ask(grading, case, specs)
    except RaisedError as raised:
        _note_refusal(grading, case, raised)
        return None
    grading.verdict.case_count += 1
    check_intact(grading, case.name)
    descriptions = check_results(grading, case.name, reply["returned"][0], specs)
    comparisons = []
    for i, (tensor, description) in enumerate(zip(reference_tensors, descriptions, strict=True)):
        result = read_result(grading, description, case.name, ResultIndex(0, i))
        check_complete(reply["elements"], i, result, case.name)
        got = flat_reals(result)
        comparison = tensor.compare(got, grading.reference.rounded_otherwise(case.inputs, i))
        if comparison.mistake:
            compared = ComparedResult(i, case.inputs, previous_inputs, tensor, got, comparison)
            _raise_or_note_another_function(grading, case, compared)
            return None  # the other results say nothing
        comparisons.append(comparison)
    _keep_result(grading, reference_tensors)
    return CheckedCase(comparisons, specs)


def _previous_inputs(grading: Grading) -> list:
    """Return the inputs of the call before; [] if they are too large to be kept beside new ones."""
    if grading.problem.input_bytes > MAX_PREVIOUS_INPUT_BYTES:
        return []
    return grading.latest_inputs


def _raise_or_note_another_function(grading: Grading, case: Case, result: ComparedResult) -> None:
    """Raise NotCorrectError for a wrong result, unless the case allows another function's result.

    Such a result gets a note. A result counts as another function's if it is far off (a small error
    is a lack of precision), and if it does not resemble a cheat, such as a copy.
    """
    is_allowed = case.may_differ and result.comparison.is_gross
    if not is_allowed or resemblance(grading, result):
        raise NotCorrectError(WRONG, diagnose(grading, case.name, result)[:MAX_LINE_LENGTH])
    grading.findings.may_rely_on_inputs = True
    grading.verdict.notes.append(f"differs from the reference for {case.name}")


def _ask(grading: Grading, case: Case, specs: list[ResultSpec]) -> dict:
    """Call the solution as a case says; return its reply."""
    return grading.solution.ask(
        "run_checked_forward",
        inputs=grading.resources.memory.input_locations(1),
        fill_new_tensors=case.fill_new_tensors,
        is_recorded=case.is_recorded,
        result_bytes=_bytes_of(specs),
        outputs=room_for_copies(grading, specs),
    )


def _bytes_of(specs: list[ResultSpec]) -> int:
    """Return the bytes of all results of the reference."""
    return sum(spec.numel * spec.dtype.itemsize for spec in specs)


def _note_refusal(grading: Grading, case: Case, raised: RaisedError) -> None:
    """Note that the solution refuses inputs, if it may; else raise, as `check_case` does."""
    is_crash = "CUDA error" in str(raised.args[0].get("text"))
    # If a problem has cases of its own, a module that has taken some, but not this one, is wrong.
    # Otherwise the module does not work: the verdict is an error.
    has_taken_others = grading.verdict.case_count > 0 and grading.problem.file.has_own_cases
    if is_crash or (case.required and not has_taken_others):
        raise raised
    if case.required:
        _, line = outcome_of_exception(raised, case.name)
        raise NotCorrectError(WRONG, f"does not take {case.name}: {line}")
    kind = case.name.partition(",")[0]
    if kind not in grading.verdict.refused:
        grading.verdict.refused.append(kind)


def _keep_result(grading: Grading, reference_tensors: list[ReferenceTensor]) -> None:
    """Keep the reference's first result, so that a later result that replays it is recognized."""
    first = reference_tensors[0]
    tells_enough = not may_agree_by_chance(first.spec.numel, first.spec.dtype)
    is_small = _bytes_of([first.spec]) <= MAX_EARLIER_RESULT_BYTES
    if tells_enough and is_small:
        grading.earlier_results.append(first.eager.cpu())
        del grading.earlier_results[:-MAX_EARLIER_RESULTS]
