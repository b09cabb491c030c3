"""One forward of the solution beside the reference's: form, values, inputs left intact."""

import torch

from referee.checks.diagnosis import ComparedResult, diagnose, resemblance
from referee.comparison.case import Case
from referee.comparison.compare import flat_reals
from referee.comparison.reference_tensor import Comparison, ReferenceTensor
from referee.contestants.contestant import RaisedError
from referee.contestants.reading import BadDescriptionError, UnreadableError, as_indexable, checked
from referee.contestants.results import elements_share_memory
from referee.contestants.shared import dtype_name
from referee.grading import Grading
from referee.messages import LONGEST_LINE
from referee.names import MODULE
from referee.verdict import NotCorrectError, outcome_of_exception
from referee.words import WRONG

# Some results and inputs are kept, to recognize a solution that returns an earlier call's result.
LARGEST_EARLIER_RESULT = 1 << 26  # bytes
MOST_EARLIER_RESULTS = 32
LARGEST_PREVIOUS_INPUTS = 1 << 30  # bytes
LONGEST_TYPE = 100  # characters of a type's name in a message
LONGEST_STRUCTURE = 50  # characters of a nesting in a message
MOST_READ_AT_ONCE = 32  # elements that a reply may report


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
        whole = read_result(grading, description, case.name, (0, result_index))
        check_complete(reply["elements"], result_index, whole, case.name)
        got = flat_reals(whole)
        second_look = grading.second_look(case.inputs, result_index)
        result = ComparedResult(result_index, tensor, got, tensor.compare(got, second_look))
        comparisons.append(result.comparison)
        if not result.comparison.mistake:
            continue
        if _is_another_function(grading, case, result):
            grading.has_differed = True
            grading.verdict.notes.append(f"differs from the reference for {case.name}")
            grading.bench.free_results(grading.solution)
            return comparisons
        raise NotCorrectError(WRONG, diagnose(grading, case.name, result)[:LONGEST_LINE])
    _keep_result(grading, expected)
    if for_timed_calls:
        grading.reference_tensors = expected
    for tensor in expected:
        tensor.forget()
    grading.bench.free_results(grading.solution)
    return comparisons


def _is_another_function(grading: Grading, case: Case, result: ComparedResult) -> bool:
    """Return whether a wrong result is that of another function, which the case allows."""
    if not case.may_differ or not result.comparison.is_gross:
        return False
    return not resemblance(grading, result)


def _bytes_of(expected: list[ReferenceTensor]) -> int:
    """Return the bytes of all results of the reference."""
    return sum(tensor.numel * tensor.dtype.itemsize for tensor in expected)


def _ask(grading: Grading, expected: list[ReferenceTensor], fill: bool) -> dict:
    """Call the solution; if its results cannot be read in place, call it again, with copies.

    Args:
        grading: the file under grading.
        expected: the reference's results.
        fill: whether torch fills new memory with NaN meanwhile.
    """
    bench = grading.bench
    # `poison`: before the call, the process fills this many free bytes with NaN. The result may get
    # this memory; a result that is not written is then NaN.
    arguments = {
        "name": MODULE,
        "inputs": bench.forms(1),
        "fill": fill,
        "poison": _bytes_of(expected),
    }
    if not bench.are_results_copied:
        reply = grading.solution.ask("call", **arguments)
        if _are_readable(reply["calls"][0]["results"]):
            return reply
        bench.are_results_copied = True
        note = "results are copied within the clock, eager's too: their memory cannot be shared"
        grading.verdict.notes.append(note)
    room = bench.room_for([_blank(tensor) for tensor in expected], 1)
    return grading.solution.ask("call", outputs=room, **arguments)


def _are_readable(descriptions: list[dict]) -> bool:
    """Return whether the referee can read these results in place.

    On a GPU, a result that CUDA IPC cannot share has the handle None; see `results.describe`.
    """
    return all(description.get("handle", "") is not None for description in descriptions)


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
        raise NotCorrectError(WRONG, f"changes its input, which must stay intact: {name}")
    if with_gradients and not grading.are_output_gradients_intact(count):
        reason = f"changes the gradient of its output, which must stay intact: {name}"
        raise NotCorrectError(WRONG, reason)
    if changed := grading.changed_parameters():
        reason = f"changes its parameter {changed[0]}, which must stay intact: {name}"
        raise NotCorrectError(WRONG, reason)


def check_eager_intact(grading: Grading) -> None:
    """Check that eager's parameters, which are in the same shared memory, are what was written."""
    if not grading.are_eager_parameters_intact():
        raise NotCorrectError(
            WRONG, "writes into eager's parameters, which are in the same memory as its inputs"
        )


def check_results(
    grading: Grading, name: str, call: dict, expected: list[ReferenceTensor] | list[torch.Tensor]
) -> list[dict]:
    """Check nesting, types, shapes and dtypes of a call's results, and that their memory is new.

    Args:
        grading: the file under grading.
        name: the case in messages.
        call: the reply's entry for the call.
        expected: the reference's results.

    Returns:
        The descriptions of the results.
    """
    structure, descriptions = call.get("structure"), call["results"]
    expected_structure = grading.problem.structure
    if structure != expected_structure or len(descriptions) != len(expected):
        returned = f"returns {str(structure)[:LONGEST_STRUCTURE]}, expected {expected_structure}"
        raise NotCorrectError(WRONG, f"{name}: {returned}, where * is a tensor")
    for result_index, (description, tensor) in enumerate(zip(descriptions, expected, strict=True)):
        prefix = f"{name}, output {result_index}: " if len(expected) > 1 else f"{name}: "
        check_description(grading, description, tensor, prefix)
        check_elements_apart(description, tensor, prefix)
        if not grading.problem.may_share_memory and _is_in_shared_memory(grading, description):
            reason = f"returns its input or a parameter, not new memory; return a copy: {name}"
            raise NotCorrectError(WRONG, reason)
    return descriptions


def check_description(
    grading: Grading, description: dict, expected: ReferenceTensor | torch.Tensor, prefix: str
) -> None:
    """Check the type, dtype, device and shape of a result.

    Args:
        grading: the file under grading.
        description: describes the result.
        expected: the reference's result.
        prefix: the beginning of a message.
    """
    kind = str(description.get("type"))[:LONGEST_TYPE]
    if kind != "Tensor":
        raise NotCorrectError(WRONG, f"{prefix}returns a {kind}, not a plain tensor")
    expected_entries = {
        "dtype": dtype_name(expected.dtype),
        "device": str(grading.device),
        "shape": list(expected.shape),
    }
    for name, value in expected_entries.items():
        if description.get(name) != value:
            got = str(description.get(name))[:LONGEST_LINE]
            raise NotCorrectError(WRONG, f"{prefix}the output's {name} is {got}, expected {value}")


def check_elements_apart(
    description: dict, expected: ReferenceTensor | torch.Tensor, prefix: str
) -> None:
    """Check that no elements of a result share memory, unless some of the reference's do.

    All other strides are right. Gradients are not checked: autograd itself expands some of them.

    Args:
        description: describes the result.
        expected: the reference's result.
        prefix: the beginning of a message.
    """
    is_tensor = isinstance(expected, torch.Tensor)
    expected_strides = expected.stride() if is_tensor else expected.strides
    if elements_share_memory(expected.shape, expected_strides):
        return
    try:
        strides = checked(description)["strides"]
    except BadDescriptionError:  # the result cannot be read either, and the reading says why
        return
    if elements_share_memory(description["shape"], strides):
        reason = (
            f"elements of its result share memory (strides {strides}), the reference's do not; "
            "contiguous() separates them"
        )
        raise NotCorrectError(WRONG, f"{prefix}{reason}"[:LONGEST_LINE])


def _is_in_shared_memory(grading: Grading, description: dict) -> bool:
    """Return whether a result is in the referee's memory, where inputs and parameters are."""
    if grading.device.type == "cuda":
        return grading.bench.pool.allocation(description.get("handle")) is not None
    start, end = grading.solution.span
    address = description.get("address")
    return isinstance(address, int) and start <= address < end


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
        raise NotCorrectError(WRONG, reason[:LONGEST_LINE]) from None
    except BadDescriptionError as error:
        raise NotCorrectError(WRONG, f"{name}: {error}") from None


def check_complete(elements: dict, result_index: int, whole: torch.Tensor, name: str) -> None:
    """Check that the process has read the same elements at once when the call had returned.

    They differ if the call leaves work on another stream for which the current one does not wait.
    A cheat may report false elements, so this check finds mistakes alone. `rounds.early_elements`
    finds late results of cheats.

    Args:
        elements: what the process has read, see `Worker._read_at_once`.
        result_index: the index of the result.
        whole: the result, read later.
        name: the case in messages.
    """
    if elements.get("result") != result_index:
        return
    indices = elements.get("indices")
    is_valid = isinstance(indices, list) and len(indices) <= MOST_READ_AT_ONCE
    if is_valid and all(type(index) is int and 0 <= index < whole.numel() for index in indices):
        late = as_indexable(whole).reshape(-1)[torch.tensor(indices, device=whole.device)].cpu()
        if bytes(late.view(torch.uint8).tolist()).hex() == elements.get("bytes"):
            return
    reason = (
        f"{name}: its result is not complete on the current stream when the call has returned; "
        "let this stream wait for the others"
    )
    raise NotCorrectError(WRONG, reason[:LONGEST_LINE])


def note_refusal(grading: Grading, name: str, raised: RaisedError, required: bool) -> None:
    """Note that the solution refuses inputs, if it may refuse them; else raise the verdict.

    Args:
        grading: the file under grading.
        name: the case in messages; the part before the first comma is the kind of the inputs.
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
        _, line = outcome_of_exception(raised, name)
        raise NotCorrectError(WRONG, f"does not take {name}: {line}")
    kind = name.partition(",")[0]
    if kind not in grading.verdict.refused:
        grading.verdict.refused.append(kind)


def _keep_result(grading: Grading, expected: list[ReferenceTensor]) -> None:
    """Keep the reference's first result, so that a later result that replays it is recognized."""
    if _bytes_of(expected) <= LARGEST_EARLIER_RESULT and expected[0].numel > 1:
        grading.earlier_results.append(expected[0].eager.cpu())
        del grading.earlier_results[:-MOST_EARLIER_RESULTS]
