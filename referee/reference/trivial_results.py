"""Finds results of the reference that a solution would get right without computing them."""

from dataclasses import dataclass

import torch
from torch import nn

from referee.comparison.compare import first_mismatch, flat_reals
from referee.comparison.reference_tensor import ReferenceTensor
from referee.reference.problem import Problem
from referee.reference.random_values import new_seed, vary_module
from referee.reference.unusual_inputs import unusual_inputs

USUAL_DRAWS = 2  # whose results are compared with those of a first draw


@dataclass
class _Findings:
    """How one of the reference's results depends on the inputs, as far as they were tried.

    Attributes:
        copied_inputs: the indices of those inputs of which the result was a copy each time.
        is_constant: the error budget cannot tell any result from the first one.
        is_equal: all results are equal to the first one.
    """

    copied_inputs: set[int]
    is_constant: bool = True
    is_equal: bool = True

    @property
    def is_trivial(self) -> bool:
        """True if a constant or a copy of an input is right."""
        return self.is_constant or bool(self.copied_inputs)


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
    findings = _try_inputs(problem, module, kinds, expected, first_results)
    if not any(found.is_trivial for found in findings):
        return []
    depends_on_parameters = _which_depend_on_parameters(problem, module, expected, first_results)
    lines = []
    for i, (tensor, found) in enumerate(zip(expected, findings, strict=True)):
        if found.is_trivial and tensor.numel:
            number = f" {i}" if len(expected) > 1 else ""
            result = f"the reference's result{number}"
            lines.append(_describe(result, found, depends_on_parameters[i]))
    return lines


def _describe(result: str, found: _Findings, depends_on_parameters: bool) -> str:
    """Return the line about a trivial result.

    Args:
        result: the result in words.
        found: how it depends on the inputs.
        depends_on_parameters: whether it changes with the module's parameters.
    """
    if not found.is_constant:
        return f"{result} is its input {min(found.copied_inputs)}"
    ignored = "inputs" if depends_on_parameters else "inputs and parameters"
    if found.is_equal:
        return f"{result} is the same for all {ignored} that were tried"
    return f"the error budget cannot tell {result} for other {ignored} apart"


def _try_inputs(
    problem: Problem,
    module: nn.Module,
    kinds: list[str],
    expected: list[ReferenceTensor],
    first_results: list[torch.Tensor],
) -> list[_Findings]:
    """Run the reference for some inputs; return the findings about each of its results.

    It ends early if no result is trivial.

    Args:
        problem: its reference is run.
        module: the reference's module.
        kinds: the kinds of unusual inputs.
        expected: the error budgets of the results.
        first_results: the results for the first inputs.
    """
    findings = [_Findings(set(problem.input_source.tensor_indices)) for _ in expected]
    usual_kinds = [""] * USUAL_DRAWS
    for kind in (*usual_kinds, *kinds):
        inputs = unusual_inputs(problem, kind, problem.draw()) if kind else problem.draw()
        results = problem.run(module, inputs)
        for i, (tensor, result) in enumerate(zip(expected, results, strict=True)):
            found, other_draws = findings[i], tensor.other_draws
            found.is_constant = found.is_constant and other_draws.allows(result, first_results[i])
            found.is_equal = found.is_equal and _are_equal(result, first_results[i])
            found.copied_inputs = {
                j for j in found.copied_inputs if other_draws.allows(inputs[j], result)
            }
        if not any(found.is_trivial for found in findings):
            break
    return findings


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
