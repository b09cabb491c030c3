"""Finds results of the reference that a solution would get right without computing them."""

import torch
from torch import nn

from referee.budget import ReferenceTensor
from referee.problem import Problem
from referee.redraw import new_seed, redraw_module
from referee.unusual_inputs import unusual_inputs

USUAL_DRAWS = 2  # besides the first draw, with which their results are compared


def describe_trivial_results(problem: Problem, kinds: list[str]) -> list[str]:
    """Return a line for each result that is a constant or a copy of an input.

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
        tensor.forget()
    constant = set(range(len(expected)))  # indices of the results that have been the same so far
    copied = [set(problem.tensors) for _ in expected]  # for each result, the inputs that it equals
    for kind in (*[""] * USUAL_DRAWS, *kinds):
        inputs = unusual_inputs(problem, kind, problem.draw()) if kind else problem.draw()
        results = problem.run(module, inputs)
        for i, (tensor, result) in enumerate(zip(expected, results, strict=True)):
            if not tensor.allows(result, first_results[i]):
                constant.discard(i)
            copied[i] = {j for j in copied[i] if tensor.allows(inputs[j], result)}
        if not constant and not any(copied):
            return []
    depends_on_parameters = _depends_on_parameters(problem, module, expected, first_results)
    lines = []
    for i, tensor in enumerate(expected):
        number = f" {i}" if len(expected) > 1 else ""
        subject = f"the reference's result{number} is"
        if i in constant and tensor.numel:
            ignored = "inputs" if depends_on_parameters[i] else "inputs and parameters"
            lines.append(f"{subject} the same for all {ignored}")
        elif copied[i] and tensor.numel:
            lines.append(f"{subject} its input {min(copied[i])}")
    return lines


def _depends_on_parameters(
    problem: Problem,
    module: nn.Module,
    expected: list[ReferenceTensor],
    first_results: list[torch.Tensor],
) -> list[bool]:
    """Return whether each result changes with the module's parameters, which are overwritten."""
    redraw_module(module)
    results = problem.run(module, problem.draw())
    triples = zip(expected, results, first_results, strict=True)
    return [not tensor.allows(result, first) for tensor, result, first in triples]
