"""Gradients of inputs and parameters, at small sizes of the problem's own and at the timed one.

A file that gives no gradient, or not all, or whose backward raises, is not wrong: the line says
"forward only", and no training step is timed.
"""

import math
from collections.abc import Iterator

import torch

from referee.contestant import RaisedError
from referee.forward import check_description, check_intact, read
from referee.gradients import Quantity, draw_gradients, names_of, reference_gradients
from referee.grading import Grading, restored_buffers
from referee.names import MODULE
from referee.reference_file import LONGEST_LINE, NoRoomError
from referee.steps.times import compiled_alone
from referee.steps.values import note_errors
from referee.verdict import WRONG, FoundError, of_exception

DRAWS = 2
OWN_DRAWS = 1  # at the timed size, where smaller ones were compared before
LEFT_TO_FULL = "gradients were compared at small sizes; --full compares and times them at this one"
OUT_OF_MEMORY = "OutOfMemory"  # in the name of torch's exception
NO_ROOM = "no memory to compare gradients"


def check_own_gradients(grading: Grading) -> None:
    """Compare gradients for the problem's own small inputs, under each precision setting."""
    problem = grading.problem
    if not problem.backward_inputs():
        return
    grading.construct(problem.backward_arguments())
    for setting in problem.settings:
        grading.set_precision(setting)
        for group in problem.backward_inputs():
            if not _compare(grading, iter(group)):
                grading.is_forward_only = True
                return


def check_gradients(grading: Grading) -> None:
    """Compare gradients at the timed size; set `grading.quantities` where they are right."""
    problem = grading.problem
    grading.quantities = []
    if grading.is_forward_only:
        return
    if problem.parameter_bytes > grading.options.largest_gradients:
        grading.verdict.notes.append(LEFT_TO_FULL)
        return
    _make_room(grading)
    draws = OWN_DRAWS if problem.file.covers_all_values else DRAWS
    try:
        quantities = _compare(grading, (grading.draw() for _ in range(draws)))
    except (NoRoomError, torch.OutOfMemoryError):
        grading.verdict.notes.append(NO_ROOM)
        return
    if problem.step_note:
        grading.verdict.notes.append(f"training step: {problem.step_note}")
    if not quantities:
        return
    grading.quantities = quantities
    if not (problem.needs_float64 and problem.file.covers_all_values):
        return
    for quantity in quantities:
        if quantity.what.startswith("gradient") and quantity.found:
            name = ", ".join(filter(None, [problem.setting, quantity.what]))
            note_errors(grading, name, quantity.found, quantity.expected.errors)


def _make_room(grading: Grading) -> None:
    """Free the memory that forwards needed, for training steps."""
    bench = grading.bench
    grading.forget_round()
    bench.prepare_yardsticks(tuple(compiled_alone(bench.yardsticks)))
    for process in [grading.solution, *(eager.contestant for eager in bench.eager)]:
        bench.give_back(process)
    if grading.device.type == "cuda":
        torch.cuda.empty_cache()


def _compare(grading: Grading, draws: Iterator[list]) -> list[Quantity]:
    """Return the quantities of a training step, nothing if the file is forward only.

    Raises:
        FoundError: a gradient is wrong.
    """
    grading.progress("checking", "the backward")
    quantities: list[Quantity] = []
    for inputs in draws:
        grading.new_state()
        if not _compare_one(grading, inputs, quantities):
            return []
        grading.verdict.count += 1
        del inputs  # the next ones may need the memory
    wrong = {q.what: mistake for q in quantities if (mistake := q.mistake())}
    of_inputs = {q.what for q in quantities if _is_of_an_input(q.what)}
    if not wrong:
        return quantities
    if wrong.keys() <= of_inputs and grading.relies_on_inputs:
        grading.verdict.notes.append(f"forward only: another {', another '.join(wrong)}")
        return []
    raise FoundError(WRONG, "; ".join(wrong.values())[:LONGEST_LINE])


def _is_of_an_input(what: str) -> bool:
    return what == "gradient of x" or what.startswith("gradient of input ")


def _compare_one(grading: Grading, inputs: list, quantities: list[Quantity]) -> bool:
    """Compare one step; return whether the reference and the solution have gradients.

    Args:
        grading: the file under grading.
        inputs: of the forward.
        quantities: results and gradients, which take in what is found; made in the first draw.
    """
    problem, module = grading.problem, grading.module
    grading.inputs = inputs
    outputs, output_gradients, passes = draw_output_gradients(grading, inputs)
    results = len(outputs)
    del outputs  # they may be large
    parameters = grading.parameters()
    with restored_buffers(module):
        budgets = reference_gradients(problem, module, inputs, output_gradients, parameters)
    if budgets is None:
        return False
    if not quantities:
        quantities += map(Quantity, names_of(inputs, parameters, results))
    for quantity, budget in zip(quantities, budgets, strict=True):
        if quantity.expected and budget and quantity.expected.shape != budget.shape:
            return False  # of a size that depends on values
        quantity.expected = budget
    reply = _ask(grading, inputs, output_gradients, parameters, quantities)
    if reply is None:
        return False
    check_intact(grading, "the backward", with_gradients=True)
    descriptions = reply["calls"][0]["results"]
    if not _has_all(grading, descriptions, quantities, results):
        return False
    _compare_all(grading, quantities, descriptions, is_strict=passes is not None)
    grading.bench.release(grading.solution)
    return True


def draw_output_gradients(
    grading: Grading, inputs: list
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
    """Return the reference's outputs, new gradients for them, and the mask of where these pass.

    With a mask, the gradients are zero elsewhere: see `Problem.where_gradients_pass`.
    """
    problem, module = grading.problem, grading.module
    with restored_buffers(module):
        outputs = problem.run(module, inputs)
    output_gradients = draw_gradients(outputs)
    passes = problem.where_gradients_pass(module, inputs)
    if passes is not None:
        for g in output_gradients:
            g.mul_(passes)
    return outputs, output_gradients, passes


def _compare_all(
    grading: Grading, quantities: list[Quantity], descriptions: list, is_strict: bool
) -> None:
    """Compare each result and gradient of a step with its error budget."""
    for result_index, (quantity, description) in enumerate(
        zip(quantities, descriptions, strict=True)
    ):
        if quantity.expected:
            check_description(
                grading, description, quantity.expected, f"{quantity.what}, recorded: "
            )
            got = read(grading, description, quantity.what, (0, result_index))
            quantity.compare(got, is_strict)


def _ask(
    grading: Grading,
    inputs: list,
    output_gradients: list,
    parameters: list[str],
    quantities: list[Quantity],
) -> dict | None:
    """Ask the solution for a training step; if its backward raises, add a note and return None."""
    bench = grading.bench
    grading.write_inputs([inputs])
    grading.write_state()
    bench.output_gradients[0].place(output_gradients)
    bench.output_gradients[0].write(output_gradients)
    budgets = [q.expected for q in quantities if q.expected]
    try:
        return grading.solution.ask(
            "step",
            name=MODULE,
            inputs=bench.forms(1),
            output_gradients=[bench.output_gradients[0].form],
            parameters=[grading.state.names[name] for name in parameters],
            poison=max(math.prod(budget.shape) * budget.dtype.itemsize for budget in budgets),
            outputs=bench.room_for(_blanks(quantities, grading), 1) if bench.copies else None,
        )
    except RaisedError as raised:
        if "CUDA error" in str(raised.args[0].get("text")):
            raise
        if OUT_OF_MEMORY in str(raised.args[0].get("type")):
            grading.verdict.notes.append(NO_ROOM)
            return None
        _, line = of_exception(raised, "checking the backward")
        grading.verdict.notes.append(f"forward only: its backward raises {line}")
        return None


def _blanks(quantities: list[Quantity], grading: Grading) -> list[torch.Tensor]:
    """Return uninitialized tensors like a step's results; without elements for a missing one."""
    blanks = []
    for quantity in quantities:
        if quantity.expected is None:
            blanks.append(torch.empty(0, device=grading.device))
            continue
        shape, dtype = quantity.expected.shape, quantity.expected.dtype
        blanks.append(torch.empty(shape, dtype=dtype, device=grading.device))
    return blanks


def _has_all(
    grading: Grading, descriptions: list, quantities: list[Quantity], results: int
) -> bool:
    """Return whether all gradients are there; note which are missing."""
    if len(descriptions) != len(quantities):
        raise FoundError(WRONG, "a recorded forward returns another kind of result than before")
    pairs = list(zip(quantities, descriptions, strict=True))
    missing = [q.what for q, one in pairs if q.expected and one.get("type") == "NoneType"]
    if not missing:
        return True
    gradients = [q for q in quantities[results:] if q.expected]
    which = f": no {', no '.join(missing)}" if len(missing) < len(gradients) else ""
    grading.verdict.notes.append(f"forward only{which}"[:LONGEST_LINE])
    return False
