"""Inputs that `get_inputs` would not draw: of both signs or altered in part.

An honest file may rely on what `get_inputs` draws and compute another function of other inputs:
a note says so. A file that then returns a copy of its input, zeros or an earlier result is wrong.
"""

from referee.checks.forward import check_case
from referee.checks.turn_memory import write_state_for_all
from referee.comparison.case import Case
from referee.grading import Grading
from referee.reference.trivial_results import describe_trivial_results
from referee.reference.unusual_inputs import ALTERED, BOTH_SIGNS, unusual_inputs
from referee.verdict import NotCorrectError

REPEATS_INPUTS = "get_inputs draws the same inputs every time"


def check_other_inputs(grading: Grading) -> None:
    """Compare results for inputs of both signs, and for those that are altered in part.

    Notes say where the comparisons tell little: the reference's results are trivial, or have no
    float64 result beside them, or all inputs that `get_inputs` draws are equal.
    """
    problem = grading.problem
    if problem.file.has_own_cases:
        return
    compared_kinds = _compare_unusual_inputs(grading) if problem.input_source.float_indices else []
    if not compared_kinds:
        grading.findings.may_rely_on_inputs = True
    grading.verdict.notes += describe_trivial_results(problem, compared_kinds)
    repeating_indices = problem.input_source.repeating_indices
    if problem.input_source.repeats:
        grading.verdict.notes.append(REPEATS_INPUTS)
    elif repeating_indices:
        numbers = ", ".join(map(str, repeating_indices))
        grading.verdict.notes.append(f"get_inputs draws the same input {numbers} every time")
    if problem.float64_obstacle:
        grading.verdict.notes.append(problem.float64_obstacle)


def _compare_unusual_inputs(grading: Grading) -> list[str]:
    """Compare results for each kind of unusual inputs for which eager's results are finite.

    Returns:
        These kinds.
    """
    compared_kinds = []
    seen_inputs = grading.latest_inputs
    for kind in (ALTERED, BOTH_SIGNS):
        inputs = unusual_inputs(grading.problem, kind, seen_inputs)
        if _is_eager_finite(grading, inputs):
            checked = check_case(grading, Case(kind, inputs, required=False, may_differ=True))
            grading.resources.free_results(grading.solution)
            if kind == BOTH_SIGNS:
                grading.findings.is_right_for_both_signs = checked is not None
            compared_kinds.append(kind)
        del inputs  # the next ones may need the memory
    return compared_kinds


def _is_eager_finite(grading: Grading, inputs: list) -> bool:
    """Return whether eager gives finite results for inputs.

    Eager's process computes them, not the referee's: an assertion on the device may end it. Its
    parameters are written before, because on a CPU the solution may have changed them.
    """
    resources = grading.resources
    resources.eager.start()
    grading.write_inputs([inputs])
    write_state_for_all(grading)
    try:
        reply = resources.eager.members[0].ask(
            "is_finite", inputs=resources.memory.input_locations(1)
        )
        resources.free_results(resources.eager.members[0])
    except NotCorrectError:  # eager has ended and starts again when it is needed
        return False
    return reply["finite"] is True
