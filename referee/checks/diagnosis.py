"""Recognizes what a wrong result is: zeros, a copy of an input, an earlier result, ..."""

from contextlib import suppress
from typing import NamedTuple

import torch

from referee.comparison.accuracy import WORST, accuracy_class, count_true
from referee.comparison.compare import flat_reals, relative_difference
from referee.comparison.reference_tensor import Comparison, ReferenceTensor
from referee.contestants.forms import forms_of
from referee.grading import Grading
from referee.reference.file import NoRoomError

# Two results are the same except for roundings if their relative difference is not larger.
NEAR = 1e-5
REPLAYS = "replays the result of an earlier call"


class ComparedResult(NamedTuple):
    """A result of the solution beside the reference's.

    Attributes:
        index: which of the forward's results it is.
        inputs: the forward's inputs.
        previous_inputs: the inputs of the call before; empty if they were not kept.
        reference_tensor: the reference's result.
        got: the solution's, as `flat_reals` returns it.
        comparison: their comparison.
    """

    index: int
    inputs: list
    previous_inputs: list
    reference_tensor: ReferenceTensor
    got: torch.Tensor
    comparison: Comparison


def diagnose(grading: Grading, case_name: str, result: ComparedResult) -> str:
    """Return what is wrong with a result, and what it is instead, where the values tell.

    Args:
        grading: the file under grading.
        case_name: the case.
        result: a result with a mistake.
    """
    reference_tensor, comparison = result.reference_tensor, result.comparison
    if result.got.is_floating_point() and _is_unwritten(reference_tensor, result.got):
        return f"returns memory that it has not written: {case_name}"
    # Without memory for the guesses, the message names no resemblance.
    with suppress(torch.OutOfMemoryError, NoRoomError):
        if words := resemblance(grading, result):
            return f"{words}: {case_name}"
    reached = accuracy_class(comparison.errors.relative)
    is_less_accurate = not comparison.is_gross and reached != WORST
    if result.got.dtype == torch.float32 and is_less_accurate:
        return f"lower precision than eager's ({reached}): {case_name}: {comparison.mistake}"
    return f"{case_name}: {comparison.mistake}"


def _is_unwritten(reference_tensor: ReferenceTensor, got: torch.Tensor) -> bool:
    """Return whether most of a result is the NaN that free memory was filled with."""
    unwritten = got.isnan() & ~reference_tensor.eager.isnan()
    return count_true(unwritten) > len(got) / 2


def resemblance(grading: Grading, result: ComparedResult) -> str:
    """Return what a wrong result is instead, in words; "" if that is not known."""
    got = result.got
    if may_agree_by_chance(len(got), got.dtype):
        return ""
    for words, unflattened in _guesses(grading, result).items():
        guess = flat_reals(unflattened)
        if guess.shape != got.shape or guess.dtype != got.dtype:
            continue
        # A mistake that gives the right result for these inputs is not the reason.
        is_right_here = _is_near(guess, result.reference_tensor.eager)
        if not is_right_here and _is_near(got, guess):
            return words
    for earlier in grading.earlier_results:
        if result.index == 0 and earlier.shape == got.shape and torch.equal(got.cpu(), earlier):
            return REPLAYS
    return ""


def may_agree_by_chance(numel: int, dtype: torch.dtype) -> bool:
    """Return whether a result of this size is too small to be recognized.

    Only one element of a float32 or float64 tells enough: an index, for example, may well be 0.
    """
    return numel == 0 or (numel == 1 and dtype not in (torch.float32, torch.float64))


def _guesses(grading: Grading, result: ComparedResult) -> dict[str, torch.Tensor]:
    """Return tensors that a wrong result may be, by words for the message."""
    problem, reference, inputs = grading.problem, grading.reference, result.inputs
    guesses = {"returns zeros": torch.zeros_like(result.reference_tensor.eager)}
    for i in problem.input_source.tensor_indices:
        guesses[f"returns a copy of its input {i}"] = inputs[i]
    if result.index == 0:
        guesses |= problem.guesses(reference.module, inputs)
    if reference.previous is not None:
        previous_results = problem.run(reference.previous, inputs)
        guesses["answers with old parameters"] = previous_results[result.index]
    if result.index == 0 and forms_of(result.previous_inputs) == forms_of(inputs):
        guesses[REPLAYS] = reference.eager_results(result.previous_inputs)[0]
    return guesses


def _is_near(got: torch.Tensor, guess: torch.Tensor) -> bool:
    """Return whether two results are the same except for roundings; only zeros are near zeros."""
    if torch.equal(got, guess):
        return True
    if not got.dtype.is_floating_point or not guess.any():
        return False
    return relative_difference(got, guess) <= NEAR
