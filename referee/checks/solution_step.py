"""A training step of the solution: arguments to draw for it, results and gradients to read.

`gradients` compares untimed steps, and `timed_training_steps` timed ones.
"""

import torch

from referee.checks.returned_results import (
    check_description,
    check_elements_apart,
    check_new_memory,
    read_result,
)
from referee.checks.separate_results import check_results_apart
from referee.comparison.quantity import Quantity
from referee.contestants.descriptions import ResultIndex
from referee.grading import Grading
from referee.reference.problem import StepArguments
from referee.reference.reference_step import draw_gradients


def prepare_step(grading: Grading, inputs: list) -> StepArguments:
    """Draw gradients for the reference's outputs; return the step with these inputs.

    If the problem knows where rounding decides whether ReLU passes a gradient, these gradients are
    set to zero there.
    """
    reference = grading.reference
    outputs = reference.eager_results(inputs)
    gradients = draw_gradients(outputs)
    mask = grading.problem.where_gradients_pass(reference.module, inputs)
    if mask is not None:
        for gradient in gradients:
            gradient.mul_(mask)
    return StepArguments(
        reference.module,
        inputs,
        gradients,
        reference.parameter_names(),
        len(outputs),
        are_masked=mask is not None,
    )


def check_results_of_step_apart(
    grading: Grading, quantities: list[Quantity], descriptions: list[dict], case_name: str
) -> None:
    """Check that no two results of a step share memory, as `check_results_apart` does.

    Args:
        grading: the file under grading.
        quantities: results first, then gradients.
        descriptions: the solution's, one for each quantity.
        case_name: the case in messages.
    """
    count = sum(quantity.is_result for quantity in quantities)
    check_results_apart(grading, descriptions[:count], case_name)


def read_quantity(
    grading: Grading, quantity: Quantity, description: dict, case_name: str, index: ResultIndex
) -> torch.Tensor:
    """Check the form of a result or gradient of the solution; return its values.

    Args:
        grading: the file under grading.
        quantity: the result or gradient.
        description: describes the solution's.
        case_name: the case in messages.
        index: its index in the reply.
    """
    check_description(grading, description, quantity.spec, case_name)
    # autograd may return a gradient that shares memory, as torch's own modules do.
    if quantity.is_result:
        check_elements_apart(description, quantity.spec, case_name)
        check_new_memory(grading, description, index.result_index, case_name)
    return read_result(grading, description, quantity.name, index)
