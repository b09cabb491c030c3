"""Finds results of the reference that a solution would get right without computing them."""

import torch

from referee.comparison.compare import first_mismatch, flat_reals
from referee.comparison.reference_tensor import ReferenceTensor
from referee.reference.problem import Problem
from referee.reference.random_values import new_seed, vary_module
from referee.reference.unusual_inputs import unusual_inputs

USUAL_DRAWS = 2  # whose results are compared with those of a first draw


class _TriedResult:
    """One of the reference's results, for the inputs that were tried so far.

    Args:
        tensor: the result for the first inputs, with its error budget.
        copy_candidates: the indices of those inputs of which the result may be a copy.

    Attributes:
        numel: how many elements the result has.
        copied_inputs: the indices of those inputs of which the result was a copy each time.
        is_constant: whether the error budget cannot tell any result from the first one.
        is_equal: whether all results are equal to the first one.
    """

    def __init__(self, tensor: ReferenceTensor, copy_candidates: list[int]) -> None:
        self.numel = tensor.spec.numel
        self.copied_inputs = set(copy_candidates)
        self.is_constant = True
        self.is_equal = True
        self._first = tensor.eager
        self._spec = tensor.spec

    @property
    def is_trivial(self) -> bool:
        """True if a constant or a copy of an input is right."""
        return self.is_constant or bool(self.copied_inputs)

    def add(self, result: torch.Tensor, inputs: list) -> None:
        """Add the result for other inputs."""
        self.is_constant = self.is_constant and self.is_like_first(result)
        self.is_equal = self.is_equal and _are_equal(result, self._first)
        self.copied_inputs = {i for i in self.copied_inputs if self._spec.allows(inputs[i], result)}

    def is_like_first(self, result: torch.Tensor) -> bool:
        """Return whether the error budget cannot tell a result from the first one."""
        return self._spec.allows(result, self._first)


def describe_trivial_results(problem: Problem, kinds: list[str]) -> list[str]:
    """Return a line for each result for which a constant or a copy of an input is right.

    Only a few inputs are tried. So a result that the lines do not mention is certainly not trivial,
    but one that they mention may be different for other inputs.

    Args:
        problem: its reference is run.
        kinds: the kinds of unusual inputs that are tried besides usual ones; see `unusual_inputs`.
    """
    module = problem.construct(new_seed())
    copy_candidates = problem.input_source.tensor_indices
    tried_results = [
        _TriedResult(tensor, copy_candidates)
        for tensor in problem.reference_tensors(module, problem.draw())
    ]
    usual_kinds = [""] * USUAL_DRAWS
    for kind in (*usual_kinds, *kinds):
        inputs = unusual_inputs(problem, kind, problem.draw()) if kind else problem.draw()
        results = problem.run(module, inputs)
        for tried, result in zip(tried_results, results, strict=True):
            tried.add(result, inputs)
        if not any(tried.is_trivial for tried in tried_results):
            return []
    vary_module(module)
    results_of_varied = problem.run(module, problem.draw())
    lines = []
    for i, (tried, result) in enumerate(zip(tried_results, results_of_varied, strict=True)):
        if tried.is_trivial and tried.numel:
            number = f" {i}" if len(tried_results) > 1 else ""
            depends_on_parameters = not tried.is_like_first(result)
            lines.append(_describe(f"the reference's result{number}", tried, depends_on_parameters))
    return lines


def _describe(result: str, tried: _TriedResult, depends_on_parameters: bool) -> str:
    """Return the line about a trivial result.

    Args:
        result: the result in words.
        tried: the result for the inputs that were tried.
        depends_on_parameters: whether it changes with the module's parameters.
    """
    if not tried.is_constant:
        return f"{result} is its input {min(tried.copied_inputs)}"
    ignored = "inputs" if depends_on_parameters else "inputs and parameters"
    if tried.is_equal:
        return f"{result} is the same for all {ignored} that were tried"
    return f"the error budget cannot tell {result} for other {ignored} apart"


def _are_equal(result: torch.Tensor, first: torch.Tensor) -> bool:
    """Return whether two results are equal; the first is flat."""
    flat = flat_reals(result)
    return len(flat) == len(first) and first_mismatch(flat, first) is None
