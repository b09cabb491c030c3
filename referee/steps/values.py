"""Whole results at the timed size, for several sets of inputs and parameters."""

from referee.budget import Found, accuracy_class
from referee.forward import check, check_results, read
from referee.grading import Grading
from referee.names import MODULE
from referee.problem import Case
from referee.verdict import WRONG, FoundError

DRAWS = 3
OWN_DRAWS = 2  # of a problem that has cases of its own
METRICS = ("max", "mean", "relative")
# Bytes of outputs of which the solution holds two.
LARGEST_KEPT_TWICE = {"cpu": 1 << 30, "cuda": 1 << 33}


def check_values(grading: Grading) -> None:
    """Compare results at the timed size: as constructed, and with other parameters and inputs."""
    problem = grading.problem
    label = f"{list(problem.shape)}" if problem.file.covers_all_values else ""
    what = ", ".join(filter(None, [label, problem.setting]))
    grading.relative, grading.is_equal = 0.0, True
    if grading.is_whole:  # under the setting before
        grading.new_state()
    else:
        grading.progress("constructing", "the module")
        grading.construct(compare=True)
    draws = OWN_DRAWS if problem.file.covers_all_values else DRAWS
    for index in range(draws):
        # First other parameters for the same inputs: a result that is kept by its input is wrong.
        is_state_alone = index == 1 and bool(grading.parameters())
        inputs = grading.inputs if is_state_alone else grading.draw()
        if index > 0:
            grading.new_state()
        name = _name(what, index, bool(problem.parameter_bytes))
        is_last = index == draws - 1
        found = check(grading, Case(name, inputs, fill=is_last))
        for one in found:
            grading.relative = max(grading.relative, one.relative)
            grading.is_equal = grading.is_equal and one.equal
    reached = problem.accuracy(grading.relative, grading.is_equal, accuracy_class(grading.relative))
    grading.verdict.accuracy = grading.verdict.accuracy or reached
    least = problem.least_accuracy()
    if least and reached != least:
        reason = f"lower precision than {least.partition('-')[0]}: {reached}, relative error "
        raise FoundError(WRONG, f"{reason}{grading.relative:.2g}")
    if problem.file.covers_all_values and any(grading.budgets[0].errors):
        note_errors(grading, what, found[0], grading.budgets[0].errors)
    _check_kept(grading)


def _name(what: str, index: int, has_parameters: bool) -> str:
    """Return the name of a draw for messages.

    Args:
        what: shape and precision setting, or "".
        index: of the draw.
        has_parameters: the problem has parameters, which change from draw to draw.
    """
    if index == 0:
        how = "as constructed"
    elif has_parameters:
        how = "other parameters"
    else:
        how = f"draw {index + 1}"
    return f"{what}, {how}" if what else how


def note_errors(grading: Grading, name: str, found: Found, eagers: tuple) -> None:
    """Add the solution's and eager's errors against float64 to the verdict's table."""
    errors = {"solution": (found.max, found.mean, found.relative), "reference": eagers}
    row: dict[str, object] = {"name": name}
    for whose, values in errors.items():
        row |= {f"{whose}_{metric}": x for metric, x in zip(METRICS, values, strict=True)}
    grading.verdict.errors.append(row)


def _check_kept(grading: Grading) -> None:
    """Check that a result stays what it is when the module is called again, at the same address.

    A module that hands out the same memory each time saves what new memory costs, and overwrites
    what its caller has.
    """
    problem, bench = grading.problem, grading.bench
    too_large = problem.output_bytes > LARGEST_KEPT_TWICE[grading.device.type]
    if too_large or problem.shares or bench.copies:
        return
    first, second = problem.draw(), problem.draw()
    replies = []
    grading.before = []
    for inputs in (first, second):
        grading.inputs = inputs
        grading.write_inputs([inputs])
        grading.write_state()
        replies.append(grading.solution.ask("call", name=MODULE, inputs=bench.forms(1)))
    expected = grading.run_reference(first)
    descriptions = check_results(grading, "two calls", replies[0]["calls"][0], expected)
    for result_index, (description, budget) in enumerate(
        zip(descriptions, grading.budgets, strict=True)
    ):
        got = read(grading, description, "two calls", (0, result_index)).reshape(-1)
        found = budget.compare_some(got, expected[result_index].reshape(-1))
        if not found:
            continue
        other = grading.run_reference(second)[result_index].reshape(-1)
        if len(other) == len(got) and budget.compare_some(got, other) is None:
            raise FoundError(WRONG, "a later call overwrites an earlier call's result")
        raise FoundError(WRONG, f"two calls, the first result: {found}")
    bench.release(grading.solution)
