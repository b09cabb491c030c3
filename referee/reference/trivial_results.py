"""Finds results of the reference that a solution would get right without computing them."""

from typing import NamedTuple

import torch
from torch import nn

from referee.comparison.compare import first_mismatch, flat_reals
from referee.comparison.reference_tensor import ReferenceTensor
from referee.reference.problem import Problem
from referee.reference.random_values import new_seed, vary_module
from referee.reference.unusual_inputs import unusual_inputs

USUAL_DRAWS = 2  # after the first draw, with whose results theirs are compared


class TrivialResults(NamedTuple):
    """Which results were trivial for all inputs that were tried.

    Attributes:
        constant: the indices of the results that the error budget could not tell from the first.
        equal: those of the results that were always equal.
        copied: for each result, the indices of the inputs that it always was a copy of.
    """

    constant: set[int]
    equal: set[int]
    copied: list[set[int]]


def describe_trivial_results(problem: Problem, kinds: list[str]) -> list[str]:
    """Return a line for each result for which a constant or a copy of an input is right.

    Only a few inputs are tried. So a result that the lines do not mention is certainly not trivial,
    but one that they mention may be different for other inputs.

    Args:
        problem: its reference is run.
        kinds: the kinds of unusual inputs that are tried besides usual ones; see `unusual_inputs`.
    """
    module = problem.construct(new_seed())
    expected = problem.expected(module, problem.draw())
    first_results = [tensor.eager for tensor in expected]
    for tensor in expected:
        tensor.forget()  # only the budgets are needed
    trivial = _find_trivial_results(problem, module, kinds, expected, first_results)
    if not trivial.constant and not any(trivial.copied):
        return []
    depends_on_parameters = _which_depend_on_parameters(problem, module, expected, first_results)
    lines = []
    for i, tensor in enumerate(expected):
        number = f" {i}" if len(expected) > 1 else ""
        subject = f"the reference's result{number} is"
        if i in trivial.constant and tensor.numel:
            ignored = "inputs" if depends_on_parameters[i] else "inputs and parameters"
            if i in trivial.equal:
                lines.append(f"{subject} the same for all {ignored} that were tried")
            else:
                result = f"the reference's result{number}"
                lines.append(f"the error budget cannot tell {result} for other {ignored} apart")
        elif trivial.copied[i] and tensor.numel:
            lines.append(f"{subject} its input {min(trivial.copied[i])}")
    return lines


def _find_trivial_results(
    problem: Problem,
    module: nn.Module,
    kinds: list[str],
    expected: list[ReferenceTensor],
    first_results: list[torch.Tensor],
) -> TrivialResults:
    """Run the reference for some inputs, and return which results are trivial for all of them.

    Args:
        problem: its reference is run.
        module: the reference's module.
        kinds: the kinds of unusual inputs.
        expected: the error budgets of the results.
        first_results: the results for the first inputs.
    """
    constant = set(range(len(expected)))
    equal = set(range(len(expected)))
    copied = [set(problem.input_source.tensor_indices) for _ in expected]
    usual_kinds = [""] * USUAL_DRAWS
    for kind in (*usual_kinds, *kinds):
        inputs = unusual_inputs(problem, kind, problem.draw()) if kind else problem.draw()
        results = problem.run(module, inputs)
        for i, (tensor, result) in enumerate(zip(expected, results, strict=True)):
            if i in constant and not tensor.other_draws.allows(result, first_results[i]):
                constant.discard(i)
            if i in equal and not _are_equal(result, first_results[i]):
                equal.discard(i)
            copied[i] = {j for j in copied[i] if tensor.other_draws.allows(inputs[j], result)}
        if not constant and not any(copied):
            break
    return TrivialResults(constant, equal, copied)


def _are_equal(result: torch.Tensor, first: torch.Tensor) -> bool:
    """Return whether two results are equal; the first is flat."""
    flat = flat_reals(result)
    return len(flat) == len(first) and first_mismatch(flat, first) is None


def _which_depend_on_parameters(
    problem: Problem,
    module: nn.Module,
    expected: list[ReferenceTensor],
    first_results: list[torch.Tensor],
) -> list[bool]:
    """Return whether each result changes with the module's parameters, which are overwritten."""
    vary_module(module)
    results = problem.run(module, problem.draw())
    triples = zip(expected, results, first_results, strict=True)
    return [not tensor.other_draws.allows(result, first) for tensor, result, first in triples]
