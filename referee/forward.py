"""One forward of the solution beside the reference's: form, values, inputs left intact."""

from contextlib import suppress
from typing import NamedTuple

import torch

from referee.budget import WORST, Found, Output, accuracy_class, count_true
from referee.contestant import RaisedError
from referee.grading import Grading
from referee.names import MODULE
from referee.problem import Case, difference
from referee.reading import BadDescriptionError, UnreadableError
from referee.reference_file import LONGEST_LINE, NoRoomError
from referee.shared import dtype_name, forms_of
from referee.verdict import WRONG, FoundError, of_exception

LARGEST_KEPT = 1 << 26  # bytes of a result that is compared with later ones
MOST_KEPT = 32  # such results
LARGEST_BEFORE = 1 << 30  # bytes: larger inputs are not kept for the next call's diagnosis
NEAR = 1e-5  # relative: two results this near are the same but for roundings
DIFFERS = "differs from the reference"
REPLAYS = "replays the result of an earlier call"


class Result(NamedTuple):
    """A result of the solution's beside the reference's.

    Attributes:
        index: which of the forward's results.
        output: the reference's.
        got: the solution's, flat.
        found: their comparison.
    """

    index: int
    output: Output
    got: torch.Tensor
    found: Found


def check(grading: Grading, case: Case) -> list[Found]:
    """Compare one forward with the reference's.

    Args:
        grading: the file under grading.
        case: the inputs, on the device, and what the solution has to do with them.

    Returns:
        The comparison of each result; an empty list if the solution refuses the inputs.
    """
    grading.progress("checking", case.name)
    grading.verdict.count += 1
    is_small = grading.problem.input_bytes <= LARGEST_BEFORE
    grading.before = grading.inputs if is_small else []
    grading.inputs = case.inputs
    expected = grading.expected(case.inputs)
    grading.write_inputs([case.inputs])
    grading.write_state()
    size = sum(x.numel * x.dtype.itemsize for x in expected)
    try:
        reply = _ask(grading, expected, size, case.fill)
    except RaisedError as raised:
        refuse(grading, case.name, raised, case.required)
        return []
    check_intact(grading, case.name)
    descriptions = check_results(grading, case.name, reply["calls"][0], expected)
    found = []
    for result_index, (output, description) in enumerate(zip(expected, descriptions, strict=True)):
        got = read(grading, description, case.name, (0, result_index)).reshape(-1)
        result = Result(result_index, output, got, output.compare([(0, got)]))
        found.append(result.found)
        if not result.found.problem:
            continue
        if case.may_differ and result.found.gross and not _resemblance(grading, result):
            grading.verdict.notes.append(f"{DIFFERS} for {case.name}")
            return found
        raise FoundError(WRONG, _diagnose(grading, case.name, result)[:LONGEST_LINE])
    _remember(grading, expected[0], size)
    if not case.may_differ:  # the timed inputs are like these
        grading.budgets = expected
    for output in expected:
        output.forget()
    grading.bench.release(grading.solution)
    return found


def _ask(grading: Grading, expected: list[Output], size: int, fill: bool) -> dict:
    """Call the solution; if its results cannot be read in place, call it again, with copies."""
    bench = grading.bench
    about = {"name": MODULE, "inputs": bench.forms(1), "fill": fill, "poison": size}
    if not bench.copies:
        reply = grading.solution.ask("call", **about)
        descriptions = reply["calls"][0]["results"]
        if all(description.get("handle", "") is not None for description in descriptions):
            return reply
        bench.copies = True
        note = "results are copied within the clock, eager's too: their memory cannot be shared"
        grading.verdict.notes.append(note)
    room = bench.room_for([_blank(x) for x in expected], 1)
    return grading.solution.ask("call", outputs=room, **about)


def _blank(output: Output) -> torch.Tensor:
    return torch.empty(output.shape, dtype=output.dtype, device=output.eager.device)


def check_intact(grading: Grading, name: str, count: int = 1, with_gradients: bool = False) -> None:
    """Check that inputs, parameters and gradients of outputs have every bit that was written.

    Args:
        grading: the file under grading.
        name: of the case, in messages.
        count: how many calls the request had.
        with_gradients: there were gradients of outputs.
    """
    if not grading.are_inputs_intact(count):
        raise FoundError(WRONG, f"changes its input: {name}")
    if with_gradients and not grading.are_output_gradients_intact(count):
        raise FoundError(WRONG, f"changes the gradient of its output: {name}")
    if changed := grading.changed_parameters():
        raise FoundError(WRONG, f"changes its parameter {changed[0]}: {name}")


def check_eager_intact(grading: Grading) -> None:
    """Check that eager's parameters, which lie in the same file, are what was written."""
    if grading.is_eager_touched():
        raise FoundError(WRONG, "writes into eager's parameters")


def check_results(
    grading: Grading, name: str, call: dict, expected: list[Output] | list[torch.Tensor]
) -> list[dict]:
    """Return the descriptions of a call's results, once nesting, shapes and dtypes are right."""
    structure, descriptions = call.get("structure"), call["results"]
    right = grading.problem.structure
    if structure != right or len(descriptions) != len(expected):
        got = str(structure)[:50]
        raise FoundError(WRONG, f"{name}: returns {got}, expected {right}, * being a tensor")
    for result_index, (description, output) in enumerate(zip(descriptions, expected, strict=True)):
        prefix = f"{name}, output {result_index}: " if len(expected) > 1 else f"{name}: "
        check_description(grading, description, output, prefix)
        if not grading.problem.shares and _lies_in(description, grading.solution.span):
            raise FoundError(WRONG, f"returns its input, not new memory: {name}")
    return descriptions


def check_description(
    grading: Grading, description: dict, expected: Output | torch.Tensor, prefix: str
) -> None:
    """Check the type, dtype, device and shape in a description; strides are free."""
    kind = str(description.get("type"))[:100]
    if kind != "Tensor":
        raise FoundError(WRONG, f"{prefix}returns a {kind}, not a plain tensor")
    right = {
        "dtype": dtype_name(expected.dtype),
        "device": str(grading.device),
        "shape": list(expected.shape),
    }
    for name, value in right.items():
        if description.get(name) != value:
            got = str(description.get(name))[:LONGEST_LINE]
            raise FoundError(WRONG, f"{prefix}the output's {name} is {got}, expected {value}")


def _lies_in(description: dict, span: tuple[int, int]) -> bool:
    """Return whether a result lies in the memory that the referee shares, where its input is."""
    address = description.get("address")
    return isinstance(address, int) and span[0] <= address < span[1]


def read(grading: Grading, description: dict, name: str, indices: tuple[int, int]) -> torch.Tensor:
    """Return a result of the solution's.

    Args:
        grading: the file under grading.
        description: describes the result.
        name: of the case, in messages.
        indices: of the call in the request, and of the result in the call.
    """
    if grading.bench.copies:
        call_index, result_index = indices
        return grading.bench.outputs[call_index].tensors[result_index]
    try:
        return grading.solution.reader.whole(description)
    except UnreadableError as error:
        reason = f"its result is not in memory when the call has returned ({error}): {name}"
        raise FoundError(WRONG, reason[:LONGEST_LINE]) from None
    except BadDescriptionError as error:
        raise FoundError(WRONG, f"{name}: {error}") from None


def refuse(grading: Grading, name: str, raised: RaisedError, required: bool) -> None:
    """Note that the solution refuses inputs that it may refuse; else raise the verdict."""
    is_crash = "CUDA error" in str(raised.args[0].get("text"))
    has_worked = grading.verdict.count > 1 and grading.problem.file.covers_all_values
    if is_crash or (required and not has_worked):
        raise raised
    if required:
        _, line = of_exception(raised, name)
        raise FoundError(WRONG, f"does not take {name}: {line}")
    kind = name.partition(",")[0]
    if kind not in grading.verdict.refused:
        grading.verdict.refused.append(kind)


def _remember(grading: Grading, first: Output, size: int) -> None:
    """Keep the reference's result, so that a later result that replays it is recognized."""
    if size <= LARGEST_KEPT and first.numel > 1:
        grading.earlier.append(first.eager.cpu())
        del grading.earlier[:-MOST_KEPT]


def _diagnose(grading: Grading, name: str, result: Result) -> str:
    """Return what is wrong with a result, and what it is instead, where the values tell."""
    output, found = result.output, result.found
    if output.dtype.is_floating_point and _is_unwritten(output, result.got):
        return f"returns memory that it has not written: {name}"
    with suppress(torch.OutOfMemoryError, NoRoomError):  # it is wrong, whatever it resembles
        if resemblance := _resemblance(grading, result):
            return f"{resemblance}: {name}"
    reached = accuracy_class(found.relative)
    if output.dtype == torch.float32 and not found.gross and reached != WORST:
        return f"lower precision than eager's ({reached}): {name}: {found.problem}"
    return f"{name}: {found.problem}"


def _is_unwritten(output: Output, got: torch.Tensor) -> bool:
    """Return whether most of a result is the NaN that free memory was filled with."""
    unwritten = got.isnan() & ~output.eager.isnan()
    return count_true(unwritten) > len(got) / 2


def _resemblance(grading: Grading, result: Result) -> str:
    """Return what a wrong result is instead, in words; "" if that is not known."""
    got = result.got
    for words, guess in _guesses(grading, result).items():
        flat = guess.reshape(-1)
        is_alike = flat.shape == got.shape and flat.dtype == got.dtype and len(got) > 1
        if is_alike and not _is_near(flat, result.output.eager) and _is_near(got, flat):
            return words
    for old in grading.earlier:
        if result.index == 0 and old.shape == got.shape and torch.equal(got.cpu(), old):
            return REPLAYS
    return ""


def _guesses(grading: Grading, result: Result) -> dict[str, torch.Tensor]:
    """Return what a wrong result may be, by words for the message."""
    problem, inputs = grading.problem, grading.inputs
    guesses = {"returns zeros": torch.zeros_like(result.output.eager)}
    for i in problem.tensors:
        guesses[f"returns a copy of its input {i}"] = inputs[i]
    if result.index == 0:
        guesses |= problem.guesses(grading.module, inputs)
    if grading.stale is not None:
        old = problem.run(grading.stale, inputs)[result.index]
        guesses["answers with old parameters"] = old
    if result.index == 0 and forms_of(grading.before) == forms_of(inputs):
        guesses[REPLAYS] = grading.run_reference(grading.before)[0]
    return guesses


def _is_near(got: torch.Tensor, guess: torch.Tensor) -> bool:
    """Return whether two results are the same but for roundings; only zeros are near zeros."""
    if torch.equal(got, guess):
        return True
    if not got.dtype.is_floating_point or not guess.any():
        return False
    return difference(got, guess) <= NEAR
