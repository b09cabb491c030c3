"""Whole results at the timed size, for several sets of inputs and parameters."""

from referee.budget import Found, grade
from referee.forward import check, check_forms, check_intact, read
from referee.grading import Grading
from referee.verdict import WRONG, FoundError

DRAWS = 3
OWN_DRAWS = 2  # of a problem that has cases of its own
METRICS = ("max", "mean", "relative")
# Bytes of inputs and outputs up to which two calls share a request, and both results are held.
LARGEST_PAIR = 1 << 30


def check_values(grading: Grading) -> None:
    """Compare results at the timed size: as constructed, and with other parameters and inputs."""
    problem = grading.problem
    label = f"{list(problem.shape)}" if problem.file.any_values else ""
    what = ", ".join(filter(None, [label, problem.setting]))
    grading.relative, grading.is_equal = 0.0, True
    grading.progress("constructing", "the module")
    grading.construct(compare=True)
    draws = OWN_DRAWS if problem.file.any_values else DRAWS
    for turn in range(draws):
        # First other parameters for the same inputs: a result that is kept by its input is wrong.
        is_state_alone = turn == 1 and bool(grading.parameters())
        inputs = grading.inputs if is_state_alone else problem.draw()
        if turn:
            grading.new_state()
        name = _name(what, turn, bool(problem.parameter_bytes))
        found = check(grading, name, inputs, fill=turn == draws - 1)
        for one in found:
            grading.relative = max(grading.relative, one.relative)
            grading.is_equal = grading.is_equal and one.equal
    reached = problem.accuracy(grading.relative, grading.is_equal, grade(grading.relative))
    grading.verdict.accuracy = grading.verdict.accuracy or reached
    least = problem.least_accuracy()
    if least and reached != least:
        reason = f"lower precision than {least.partition('-')[0]}: {reached}, relative error "
        raise FoundError(WRONG, f"{reason}{grading.relative:.2g}")
    if problem.file.any_values and any(grading.budgets[0].errors):
        note_errors(grading, what, found[0], grading.budgets[0].errors)
    if not problem.file.any_values:
        _check_pair(grading)


def _name(what: str, turn: int, has_parameters: bool) -> str:
    """Return a draw's name in messages."""
    if turn == 0:
        how = "as constructed"
    elif has_parameters:
        how = "other parameters"
    else:
        how = f"draw {turn + 1}"
    return f"{what}, {how}" if what else how


def note_errors(grading: Grading, name: str, found: Found, eagers: tuple) -> None:
    """Add a row to the table of errors against float64."""
    values = found.max, found.mean, found.relative, *eagers
    keys = (f"{who}_{what}" for who in ("solution", "reference") for what in METRICS)
    row = {"name": name, **dict(zip(keys, values, strict=True))}
    grading.verdict.errors.append(row)


def _check_pair(grading: Grading) -> None:
    """Compare two calls of one request, whose results are both there when they are read.

    A result that a later call overwrites is told by its values.
    """
    problem = grading.problem
    if problem.input_bytes + problem.output_bytes > LARGEST_PAIR or problem.shares:
        return
    calls = [problem.draw(), problem.draw()]
    grading.inputs = calls[0]
    wanted = [grading.expected(inputs) for inputs in calls]
    grading.write_inputs(calls)
    grading.write_state()
    results = [x.eager.view(x.shape) for x in wanted[0]]
    reply = grading.solution.ask(
        "call",
        name="module",
        inputs=grading.bench.forms(2),
        outputs=grading.bench.room(results, 2),
    )
    check_intact(grading, "two calls", 2)
    for turn, (call, expected) in enumerate(zip(reply["calls"], wanted, strict=True)):
        facts = check_forms(grading, "two calls", call, expected)
        for place, (fact, output) in enumerate(zip(facts, expected, strict=True)):
            got = read(grading, fact, "two calls", (turn, place)).reshape(-1)
            problem_found = output.compare([(0, got)]).problem
            if problem_found and turn == 0 and wanted[1][place].allows(got):
                raise FoundError(WRONG, "a later call overwrites an earlier call's result")
            if problem_found:
                raise FoundError(WRONG, f"two calls, the {turn + 1}. result: {problem_found}")
    grading.solution.ask("release")
