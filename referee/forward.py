"""One forward of the solution beside the reference's: form, values, inputs left intact."""

import torch

from referee.budget import WORST, Found, Output, grade
from referee.contestant import RaisedError
from referee.grading import Grading
from referee.problem import difference
from referee.reading import BadDescriptionError, UnreadableError
from referee.reference_file import LONGEST_LINE
from referee.shared import dtype_name, forms_of
from referee.verdict import WRONG, FoundError, of_exception

LARGEST_KEPT = 1 << 26  # bytes of a result that is compared with later ones
MOST_KEPT = 32  # such results
LARGEST_BEFORE = 1 << 30  # bytes of the inputs of the call before that are kept
NEAR = 1e-5  # relative, within which a wrong result is told to be another known one
DIFFERS = "differs from the reference"


def check(
    grading: Grading,
    name: str,
    inputs: list,
    required: bool = True,
    fill: bool = False,
    may_differ: bool = False,
) -> list[Found]:
    """Compare one forward with the reference's.

    Args:
        grading: the file under grading.
        name: of the case, in messages.
        inputs: of the forward, on the device.
        required: the solution must take them.
        fill: torch fills new memory with NaN meanwhile.
        may_differ: the solution may be another function here, if it relies on what is drawn.

    Returns:
        What is found of each result; nothing of inputs that are refused.
    """
    grading.progress("checking", name)
    grading.verdict.count += 1
    is_small = grading.problem.input_bytes <= LARGEST_BEFORE
    grading.before = grading.inputs if is_small else []
    grading.inputs = inputs
    expected = grading.expected(inputs)
    grading.write_inputs([inputs])
    grading.write_state()
    size = sum(x.numel * x.dtype.itemsize for x in expected)
    try:
        reply = _ask(grading, expected, size, fill)
    except RaisedError as raised:
        refuse(grading, name, raised, required)
        return []
    check_intact(grading, name)
    [call] = reply["calls"]
    facts = check_forms(grading, name, call, expected)
    found = []
    for turn, (output, fact) in enumerate(zip(expected, facts, strict=True)):
        got = read(grading, fact, name, (0, turn))
        found.append(output.compare([(0, got.reshape(-1))]))
        if not found[-1].problem:
            continue
        if may_differ and found[-1].gross and not _told(grading, turn, output, got):
            grading.verdict.notes.append(f"{DIFFERS} for {name}")
            return found
        raise FoundError(
            WRONG, _diagnose(grading, name, turn, output, found[-1], got)[:LONGEST_LINE]
        )
    _remember(grading, expected[0], size)
    if not may_differ:  # the timed inputs are like these
        grading.budgets = expected
    for output in expected:
        output.forget()
    grading.solution.ask("release")
    return found


def _ask(grading: Grading, expected: list[Output], size: int, fill: bool) -> dict:
    """Have the solution called; once more, with copies of its results, if these cannot be read."""
    bench = grading.bench
    about = {"name": "module", "inputs": bench.forms(1), "fill": fill, "poison": size}
    if not bench.copies:
        reply = grading.solution.ask("call", **about)
        facts = reply["calls"][0].get("results", [])
        if all(fact.get("handle", "") is not None for fact in facts):
            return reply
        bench.copies = True
        note = "results are copied within the clock, eager's too: their memory cannot be shared"
        grading.verdict.notes.append(note)
    room = bench.room([_blank(x) for x in expected], 1)
    return grading.solution.ask("call", outputs=room, **about)


def _blank(output: Output) -> torch.Tensor:
    return torch.empty(output.shape, dtype=output.dtype, device=output.eager.device)


def check_intact(grading: Grading, name: str, count: int = 1, with_gradients: bool = False) -> None:
    """Check that inputs, parameters and the gradients of outputs are, to the last bit, what was
    written.
    """
    if not grading.is_input_intact(count):
        raise FoundError(WRONG, f"changes its input: {name}")
    if with_gradients and not grading.is_given_intact(count):
        raise FoundError(WRONG, f"changes the gradient of its output: {name}")
    if changed := grading.changed_parameters():
        raise FoundError(WRONG, f"changes its parameter {changed[0]}: {name}")


def check_eager_intact(grading: Grading) -> None:
    """Check that eager's parameters, which lie in the same file, are what was written."""
    if grading.is_eager_touched():
        raise FoundError(WRONG, "writes into eager's parameters")


def check_forms(
    grading: Grading, name: str, call: dict, expected: list[Output] | list[torch.Tensor]
) -> list[dict]:
    """Return the descriptions of a call's results, once nesting, shapes and dtypes are right."""
    structure, facts = call.get("structure"), call.get("results")
    right = grading.problem.structure
    if structure != right or not isinstance(facts, list) or len(facts) != len(expected):
        got = str(structure)[:50]
        raise FoundError(WRONG, f"{name}: returns {got}, expected {right}, * being a tensor")
    for turn, (fact, output) in enumerate(zip(facts, expected, strict=True)):
        what = f"{name}, output {turn}: " if len(expected) > 1 else f"{name}: "
        check_form(grading, fact, output, what)
        if not grading.problem.shares and _lies_in(fact, grading.solution.span):
            raise FoundError(WRONG, f"returns its input, not new memory: {name}")
    return facts


def check_form(grading: Grading, fact: dict, want: Output | torch.Tensor, prefix: str) -> None:
    """Check what a result says of itself; the order of its dimensions in memory is free."""
    kind = str(fact.get("type"))[:100]
    if kind != "Tensor":
        raise FoundError(WRONG, f"{prefix}returns a {kind}, not a plain tensor")
    form = {
        "dtype": dtype_name(want.dtype),
        "device": str(grading.device),
        "shape": list(want.shape),
    }
    for name, right in form.items():
        if fact.get(name) != right:
            got = str(fact.get(name))[:LONGEST_LINE]
            raise FoundError(WRONG, f"{prefix}the output's {name} is {got}, expected {right}")


def _lies_in(fact: dict, span: tuple[int, int]) -> bool:
    """Return whether a result lies in the memory that the referee shares, where its input is."""
    address = fact.get("address")
    return isinstance(address, int) and span[0] <= address < span[1]


def read(grading: Grading, fact: dict, name: str, place: tuple[int, int]) -> torch.Tensor:
    """Return a result of the solution's.

    Args:
        grading: the file under grading.
        fact: describes the result.
        name: of the case, in messages.
        place: which call of the request, and which of its results.
    """
    if grading.bench.copies:
        call, turn = place
        return grading.bench.outputs[call].tensors[turn]
    try:
        return grading.solution.reader.whole(fact)
    except UnreadableError as error:
        reason = f"its result is not in memory when the call has returned ({error}): {name}"
        raise FoundError(WRONG, reason[:LONGEST_LINE]) from None
    except BadDescriptionError as error:
        raise FoundError(WRONG, f"{name}: {error}") from None


def refuse(grading: Grading, name: str, raised: RaisedError, required: bool) -> None:
    """Take note of inputs that need not be taken; else raise what the verdict is."""
    is_crash = "CUDA error" in str(raised.args[0].get("text"))
    is_first = grading.verdict.count == 1
    if is_crash or (required and is_first) or (required and not grading.problem.file.any_values):
        raise raised
    if required:
        _, line = of_exception(raised, name)
        raise FoundError(WRONG, f"does not take {name}: {line}")
    kind = name.partition(",")[0]
    if kind not in grading.verdict.refused:
        grading.verdict.refused.append(kind)


def _remember(grading: Grading, first: Output, size: int) -> None:
    """Keep the reference's result, to tell a later one that replays it."""
    if size <= LARGEST_KEPT and first.numel > 1:
        grading.earlier.append(first.eager.cpu())
        del grading.earlier[:-MOST_KEPT]


def _diagnose(
    grading: Grading, name: str, turn: int, output: Output, found: Found, got: torch.Tensor
) -> str:
    """Return what is wrong with a result, and what it is instead, where the values tell."""
    got = got.reshape(-1)
    if output.dtype.is_floating_point and _is_unwritten(output, got):
        return f"returns memory that it has not written: {name}"
    if told := _told(grading, turn, output, got):
        return f"{told}: {name}"
    reached = grade(found.relative)
    if output.dtype == torch.float32 and not found.gross and reached != WORST:
        return f"lower precision than eager's ({reached}): {name}: {found.problem}"
    return f"{name}: {found.problem}"


def _is_unwritten(output: Output, got: torch.Tensor) -> bool:
    """Return whether most of a result is the NaN that free memory was filled with."""
    unwritten = got.isnan() & ~output.eager.isnan()
    return unwritten.double().mean().item() > 0.5


def _told(grading: Grading, turn: int, output: Output, got: torch.Tensor) -> str:
    """Return what a wrong result is, in words; "" if that is not known."""
    got, guesses = got.reshape(-1), {"returns zeros": torch.zeros_like(output.eager)}
    for i in grading.problem.tensors:
        guesses[f"returns a copy of its input {i}"] = grading.inputs[i]
    if not turn:
        guesses |= grading.problem.guesses(grading.module, grading.inputs)
    if grading.stale is not None:
        old = grading.problem.run(grading.stale, grading.inputs)[turn]
        guesses["answers with old parameters"] = old
    if not turn and forms_of(grading.before) == forms_of(grading.inputs):
        before = grading.run_reference(grading.before)[0]
        guesses["replays the result of an earlier call"] = before
    for what, guess in guesses.items():
        guess = guess.reshape(-1)
        is_alike = guess.shape == got.shape and guess.dtype == got.dtype and len(got) > 1
        if is_alike and not _is_near(guess, output.eager) and _is_near(got, guess):
            return what
    for old in grading.earlier:
        if not turn and old.shape == got.shape and torch.equal(got.cpu(), old):
            return "replays the result of an earlier call"
    return ""


def _is_near(got: torch.Tensor, guess: torch.Tensor) -> bool:
    """Return whether one is the other with other roundings; zeros are near to zeros alone."""
    if torch.equal(got, guess):
        return True
    if not got.dtype.is_floating_point or not guess.any():
        return False
    return difference(got, guess) <= NEAR
