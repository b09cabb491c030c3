"""One forward of the solution beside the reference's: form, values, inputs left intact."""

from contextlib import suppress
from typing import NamedTuple

import torch

from referee.budget import WORST, Comparison, ReferenceTensor, accuracy_class, count_true
from referee.case import Case
from referee.compare import relative_difference
from referee.contestant import RaisedError
from referee.grading import Grading
from referee.names import MODULE
from referee.reading import BadDescriptionError, UnreadableError
from referee.reference_file import LONGEST_LINE, NoRoomError
from referee.shared import dtype_name, forms_of
from referee.verdict import WRONG, FoundError, of_exception

# Some results and inputs are kept, to recognize a solution that returns an earlier call's result.
LARGEST_EARLIER_RESULT = 1 << 26  # bytes
MOST_EARLIER_RESULTS = 32
LARGEST_PREVIOUS_INPUTS = 1 << 30  # bytes
# Two results are the same but for roundings if their relative difference is smaller.
NEAR = 1e-5
DIFFERS = "differs from the reference"
REPLAYS = "replays the result of an earlier call"
LONGEST_TYPE = 100  # characters of a type's name in a message
LONGEST_STRUCTURE = 50  # characters of a nesting in a message


class Result(NamedTuple):
    """A result of the solution beside the reference's.

    Attributes:
        index: which of the forward's results it is.
        expected: the reference's result.
        got: the solution's, flat.
        comparison: their comparison.
    """

    index: int
    expected: ReferenceTensor
    got: torch.Tensor
    comparison: Comparison


def check_case(grading: Grading, case: Case) -> list[Comparison]:
    """Compare one forward with the reference's.

    Args:
        grading: the file under grading.
        case: the inputs, on the device, and what the solution has to do with them.

    Returns:
        The comparison of each result; an empty list if the solution refuses the inputs.

    Raises:
        FoundError: the solution is wrong.
        RaisedError: it refuses inputs that it has to take.
    """
    grading.progress("checking", case.name)
    grading.verdict.count += 1
    are_inputs_small = grading.problem.input_bytes <= LARGEST_PREVIOUS_INPUTS
    grading.previous_inputs = grading.inputs if are_inputs_small else []
    grading.inputs = case.inputs
    expected = grading.expected_results(case.inputs)
    grading.write_inputs([case.inputs])
    grading.write_state()
    try:
        reply = _ask(grading, expected, case.fill)
    except RaisedError as raised:
        note_refusal(grading, case.name, raised, case.required)
        return []
    check_intact(grading, case.name)
    descriptions = check_results(grading, case.name, reply["calls"][0], expected)
    comparisons = []
    for result_index, (tensor, description) in enumerate(zip(expected, descriptions, strict=True)):
        got = read_result(grading, description, case.name, (0, result_index)).reshape(-1)
        result = Result(result_index, tensor, got, tensor.compare([(0, got)]))
        comparisons.append(result.comparison)
        if not result.comparison.mistake:
            continue
        if _is_another_function(grading, case, result):
            grading.verdict.notes.append(f"{DIFFERS} for {case.name}")
            return comparisons
        raise FoundError(WRONG, _diagnose(grading, case.name, result)[:LONGEST_LINE])
    _keep_result(grading, expected)
    if not case.may_differ:  # the timed inputs are like these
        grading.budgets = expected
    for tensor in expected:
        tensor.forget()
    grading.bench.free_results(grading.solution)
    return comparisons


def _is_another_function(grading: Grading, case: Case, result: Result) -> bool:
    """Return whether a wrong result is that of another function, which the case allows."""
    if not case.may_differ or not result.comparison.is_gross:
        return False
    return not _resemblance(grading, result)


def _bytes_of(expected: list[ReferenceTensor]) -> int:
    return sum(tensor.numel * tensor.dtype.itemsize for tensor in expected)


def _ask(grading: Grading, expected: list[ReferenceTensor], fill: bool) -> dict:
    """Call the solution; if its results cannot be read in place, call it again, with copies.

    Args:
        grading: the file under grading.
        expected: the reference's results.
        fill: whether torch fills new memory with NaN meanwhile.
    """
    bench = grading.bench
    # `poison`: the process first fills so much memory, and frees it, for the call to find.
    arguments = {
        "name": MODULE,
        "inputs": bench.forms(1),
        "fill": fill,
        "poison": _bytes_of(expected),
    }
    if not bench.are_results_copied:
        reply = grading.solution.ask("call", **arguments)
        descriptions = reply["calls"][0]["results"]
        if all(description.get("handle", "") is not None for description in descriptions):
            return reply
        bench.are_results_copied = True
        note = "results are copied within the clock, eager's too: their memory cannot be shared"
        grading.verdict.notes.append(note)
    room = bench.room_for([_blank(tensor) for tensor in expected], 1)
    return grading.solution.ask("call", outputs=room, **arguments)


def _blank(tensor: ReferenceTensor) -> torch.Tensor:
    """Return a tensor of a result's form, with any values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.eager.device)


def check_intact(grading: Grading, name: str, count: int = 1, with_gradients: bool = False) -> None:
    """Check that inputs, parameters and gradients of outputs have every bit that was written.

    Args:
        grading: the file under grading.
        name: the case in messages.
        count: how many calls the request had.
        with_gradients: whether gradients of outputs were written.
    """
    if not grading.are_inputs_intact(count):
        raise FoundError(WRONG, f"changes its input: {name}")
    if with_gradients and not grading.are_output_gradients_intact(count):
        raise FoundError(WRONG, f"changes the gradient of its output: {name}")
    if changed := grading.changed_parameters():
        raise FoundError(WRONG, f"changes its parameter {changed[0]}: {name}")


def check_eager_intact(grading: Grading) -> None:
    """Check that eager's parameters, which are in the same shared memory, are what was written."""
    if not grading.are_eager_parameters_intact():
        raise FoundError(WRONG, "writes into eager's parameters")


def check_results(
    grading: Grading, name: str, call: dict, expected: list[ReferenceTensor] | list[torch.Tensor]
) -> list[dict]:
    """Return the descriptions of a call's results, once nesting, shapes and dtypes are right."""
    structure, descriptions = call.get("structure"), call["results"]
    expected_structure = grading.problem.structure
    if structure != expected_structure or len(descriptions) != len(expected):
        returned = f"returns {str(structure)[:LONGEST_STRUCTURE]}, expected {expected_structure}"
        raise FoundError(WRONG, f"{name}: {returned}, * being a tensor")
    for result_index, (description, output) in enumerate(zip(descriptions, expected, strict=True)):
        prefix = f"{name}, output {result_index}: " if len(expected) > 1 else f"{name}: "
        check_description(grading, description, output, prefix)
        if not grading.problem.shares and _is_within(description, grading.solution.span):
            raise FoundError(WRONG, f"returns its input, not new memory: {name}")
    return descriptions


def check_description(
    grading: Grading, description: dict, expected: ReferenceTensor | torch.Tensor, prefix: str
) -> None:
    """Check the type, dtype, device and shape of a result; any strides are right.

    Args:
        grading: the file under grading.
        description: describes the result.
        expected: the reference's result.
        prefix: the beginning of a message.
    """
    kind = str(description.get("type"))[:LONGEST_TYPE]
    if kind != "Tensor":
        raise FoundError(WRONG, f"{prefix}returns a {kind}, not a plain tensor")
    expected_entries = {
        "dtype": dtype_name(expected.dtype),
        "device": str(grading.device),
        "shape": list(expected.shape),
    }
    for name, value in expected_entries.items():
        if description.get(name) != value:
            got = str(description.get(name))[:LONGEST_LINE]
            raise FoundError(WRONG, f"{prefix}the output's {name} is {got}, expected {value}")


def _is_within(description: dict, span: tuple[int, int]) -> bool:
    """Return whether a result is in the shared memory, where its input is.

    Args:
        description: describes the result.
        span: the first address of the shared memory, and the one beyond the last.
    """
    address = description.get("address")
    return isinstance(address, int) and span[0] <= address < span[1]


def read_result(
    grading: Grading, description: dict, name: str, indices: tuple[int, int]
) -> torch.Tensor:
    """Return a result of the solution.

    Args:
        grading: the file under grading.
        description: describes the result.
        name: the case in messages.
        indices: the index of the call in the request, and of the result in the call.
    """
    if grading.bench.are_results_copied:
        call_index, result_index = indices
        return grading.bench.outputs[call_index].tensors[result_index]
    try:
        return grading.solution.reader.whole(description)
    except UnreadableError as error:
        reason = f"its result is not in memory when the call has returned ({error}): {name}"
        raise FoundError(WRONG, reason[:LONGEST_LINE]) from None
    except BadDescriptionError as error:
        raise FoundError(WRONG, f"{name}: {error}") from None


def note_refusal(grading: Grading, name: str, raised: RaisedError, required: bool) -> None:
    """Note that the solution refuses inputs, if it may refuse them; else raise the verdict.

    Args:
        grading: the file under grading.
        name: the case in messages; the part before the first comma is the kind of the inputs.
        raised: what the solution raised.
        required: whether it must take the inputs.
    """
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


def _keep_result(grading: Grading, expected: list[ReferenceTensor]) -> None:
    """Keep the reference's first result, so that a later result that replays it is recognized."""
    if _bytes_of(expected) <= LARGEST_EARLIER_RESULT and expected[0].numel > 1:
        grading.earlier_results.append(expected[0].eager.cpu())
        del grading.earlier_results[:-MOST_EARLIER_RESULTS]


def _diagnose(grading: Grading, name: str, result: Result) -> str:
    """Return what is wrong with a result, and what it is instead, where the values tell.

    Args:
        grading: the file under grading.
        name: the case.
        result: a result with a mistake.
    """
    expected, comparison = result.expected, result.comparison
    if expected.dtype.is_floating_point and _is_unwritten(expected, result.got):
        return f"returns memory that it has not written: {name}"
    with suppress(torch.OutOfMemoryError, NoRoomError):  # the verdict stays without a resemblance
        if resemblance := _resemblance(grading, result):
            return f"{resemblance}: {name}"
    reached = accuracy_class(comparison.relative_error)
    is_less_accurate = not comparison.is_gross and reached != WORST
    if expected.dtype == torch.float32 and is_less_accurate:
        return f"lower precision than eager's ({reached}): {name}: {comparison.mistake}"
    return f"{name}: {comparison.mistake}"


def _is_unwritten(expected: ReferenceTensor, got: torch.Tensor) -> bool:
    """Return whether most of a result is the NaN that free memory was filled with."""
    unwritten = got.isnan() & ~expected.eager.isnan()
    return count_true(unwritten) > len(got) / 2


def _resemblance(grading: Grading, result: Result) -> str:
    """Return what a wrong result is instead, in words; "" if that is not known."""
    got = result.got
    for words, guess in _guesses(grading, result).items():
        flat = guess.reshape(-1)
        is_alike = flat.shape == got.shape and flat.dtype == got.dtype and len(got) > 1
        if is_alike and not _is_near(flat, result.expected.eager) and _is_near(got, flat):
            return words
    for earlier in grading.earlier_results:
        if result.index == 0 and earlier.shape == got.shape and torch.equal(got.cpu(), earlier):
            return REPLAYS
    return ""


def _guesses(grading: Grading, result: Result) -> dict[str, torch.Tensor]:
    """Return tensors that a wrong result may be, by words for the message."""
    problem, inputs = grading.problem, grading.inputs
    guesses = {"returns zeros": torch.zeros_like(result.expected.eager)}
    for i in problem.tensors:
        guesses[f"returns a copy of its input {i}"] = inputs[i]
    if result.index == 0:
        guesses |= problem.guesses(grading.module, inputs)
    if grading.previous_module is not None:
        previous_results = problem.run(grading.previous_module, inputs)
        guesses["answers with old parameters"] = previous_results[result.index]
    if result.index == 0 and forms_of(grading.previous_inputs) == forms_of(inputs):
        guesses[REPLAYS] = grading.run_reference(grading.previous_inputs)[0]
    return guesses


def _is_near(got: torch.Tensor, guess: torch.Tensor) -> bool:
    """Return whether two results are the same but for roundings; only zeros are near zeros."""
    if torch.equal(got, guess):
        return True
    if not got.dtype.is_floating_point or not guess.any():
        return False
    return relative_difference(got, guess) <= NEAR
