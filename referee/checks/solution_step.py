"""A training step of the solution: gradients to draw for it, results and gradients to read.

`gradients` compares such steps before anything is timed, and `timed_training_steps` while they are
timed.
"""

from typing import NamedTuple

import torch

from referee.checks.returned_results import (
    check_description,
    check_elements_apart,
    check_new_memory,
    read_result,
)
from referee.comparison.quantity import Kind, Quantity
from referee.contestants.descriptions import ResultIndex
from referee.grading import Grading
from referee.reference.reference_step import draw_gradients


class OutputGradients(NamedTuple):
    """New gradients for the reference's outputs.

    Attributes:
        gradients: for each output that holds floats.
        are_masked: whether they are zero wherever rounding decides if a gradient passes, as in
            `Problem.where_gradients_pass`.
        output_count: the number of outputs, floats or not.
    """

    gradients: list[torch.Tensor]
    are_masked: bool
    output_count: int


def draw_output_gradients(grading: Grading, inputs: list) -> OutputGradients:
    """Draw gradients for the reference's outputs."""
    outputs = grading.reference.eager_results(inputs)
    gradients = draw_gradients(outputs)
    output_count = len(outputs)
    mask = grading.problem.where_gradients_pass(grading.reference.module, inputs)
    if mask is not None:
        for gradient in gradients:
            gradient.mul_(mask)
    return OutputGradients(gradients, mask is not None, output_count)


def read_quantity(
    grading: Grading, quantity: Quantity, description: dict, prefix: str, index: ResultIndex
) -> torch.Tensor:
    """Check the form of a result or gradient of the solution; return its values.

    Args:
        grading: the file under grading.
        quantity: the result or gradient.
        description: describes the solution's.
        prefix: the beginning of a message.
        index: its index in the reply.
    """
    check_description(grading, description, quantity.requirements, prefix)
    if quantity.kind is Kind.RESULT:
        check_elements_apart(description, quantity.requirements, prefix)
        check_new_memory(grading, description, index.result_index, prefix.removesuffix(": "))
    return read_result(grading, description, quantity.name, index)
