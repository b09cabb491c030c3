"""Inputs that `get_inputs` would not draw: of both signs, or altered in part.

An honest file may rely on what `get_inputs` draws, and compute another function of other inputs:
the line says so. A file that then returns a copy of its input, zeros or an earlier result is wrong.
"""

from contextlib import suppress

from referee.forward import DIFFERS, check
from referee.grading import Grading
from referee.problem import PARTS, SIGNS, Case
from referee.verdict import FoundError


def check_other_inputs(grading: Grading) -> None:
    """Compare results for inputs of both signs, and for those that are altered in part."""
    problem = grading.problem
    taken, seen = [], grading.inputs
    if not problem.file.covers_all_values and problem.floats:
        for name in (PARTS, SIGNS):
            inputs = problem.unusual_inputs(name, seen)
            if _is_finite(grading, inputs):
                check(grading, Case(name, inputs, required=False, may_differ=True))
                taken.append(name)
            del inputs  # they may be large
    differs = any(note.startswith(DIFFERS) for note in grading.verdict.notes)
    grading.relies_on_inputs = differs or not (problem.file.covers_all_values or taken)
    if not problem.file.covers_all_values:
        trivial = problem.find_trivial(taken)
        grading.verdict.notes += [*trivial, *filter(None, [problem.note])]


def _is_finite(grading: Grading, inputs: list) -> bool:
    """Return whether eager gives finite results for inputs.

    Its process is asked, which an assertion on the device may end.
    """
    bench = grading.bench
    bench.start_eager()
    grading.write_inputs([inputs])
    with suppress(FoundError):  # eager starts again when it is needed
        is_finite = bench.eager[0].ask("is_finite", inputs=bench.forms(1))["finite"] is True
        bench.release(bench.eager[0].contestant)
        return is_finite
    return False
