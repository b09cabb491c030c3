"""Facts about a reference on a device, found once, before any solution starts."""

import copy
from dataclasses import dataclass

import torch

from referee.contestants.forms import pack
from referee.contestants.free_memory import MAX_SHARE_OF_FREE, free_bytes
from referee.reference.file import ReferenceFile
from referee.reference.first_forward import FirstForward, check_state, run_first_forward
from referee.reference.float64 import find_float64_obstacle
from referee.reference.input_source import InputSource, draw_first
from referee.reference.random_values import new_seed

# Memory that forwards need, in multiples of the bytes of inputs, outputs and parameters together.
# Training steps need up to 5, and are left out if there is less.
NEEDED_MEMORY = 3


@dataclass(frozen=True)
class Facts:
    """Facts about a reference on a device.

    Attributes:
        arguments: the constructor's arguments.
        input_source: draws inputs; also has the indices of those that are tensors.
        shapes: the shapes of the tensors among the inputs.
        dtype: the dtype of the first of these tensors.
        input_bytes, parameter_bytes: the sizes of all inputs, and of all parameters and buffers.
        forward: what a forward is like.
        float64_obstacle: see `Problem`.
    """

    arguments: list
    input_source: InputSource
    shapes: list[tuple[int, ...]]
    dtype: torch.dtype
    input_bytes: int
    parameter_bytes: int
    forward: FirstForward
    float64_obstacle: str | None


def examine(file: ReferenceFile, device: torch.device) -> Facts:
    """Run a reference for the first time, and return the facts about it.

    Args:
        file: the reference.
        device: the device on which it computes; a GPU has its index.

    Raises:
        BadReferenceError: the reference cannot be graded.
    """
    arguments = file.arguments()
    file.call_or_refuse("pickling its arguments", lambda: pack(arguments))
    module = file.construct(copy.deepcopy(arguments), new_seed(), device)
    inputs, draws_on_device = draw_first(file, device)
    input_source = InputSource(file, device, inputs, draws_on_device)
    tensors = [inputs[i] for i in input_source.tensor_indices]
    input_bytes = sum(x.nbytes for x in tensors)
    check_state(file, module)
    parameter_bytes = sum(x.nbytes for x in module.state_dict().values())
    forward = run_first_forward(file, device, module, inputs)
    if list(module.parameters()):
        file.copy(module)  # the grading needs copies; this raises if none can be made
    _check_room(file, device, input_bytes + parameter_bytes + forward.output_bytes)
    float64_obstacle = None
    if not file.has_own_cases:
        float64_obstacle = find_float64_obstacle(file, module, inputs)
    return Facts(
        arguments=arguments,
        input_source=input_source,
        shapes=[tuple(x.shape) for x in tensors],
        dtype=tensors[0].dtype,
        input_bytes=input_bytes,
        parameter_bytes=parameter_bytes,
        forward=forward,
        float64_obstacle=float64_obstacle,
    )


def _check_room(file: ReferenceFile, device: torch.device, all_bytes: int) -> None:
    """Raise BadReferenceError if the grading does not fit into the device's memory.

    Args:
        file: the reference.
        device: the device.
        all_bytes: the bytes of inputs, outputs and parameters together.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    needed = NEEDED_MEMORY * all_bytes
    usable = MAX_SHARE_OF_FREE * free_bytes(device)
    if needed > usable:
        raise file.bad(
            f"grading needs about {needed / 2**30:,.1f} GiB of memory on {device}, and "
            f"{usable / 2**30:,.1f} GiB can be used"
        )
