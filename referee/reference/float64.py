"""The reference in float64, which tells how far off eager's own results are.

The error budget of a result follows from eager's error. Where torch may compute float32 products in
TF32, the reference also runs in float64 with operands rounded to TF32. The budget then allows that
error even if eager's process happens to choose a more accurate algorithm.
"""

import copy

import torch
from torch import nn

from referee.comparison.compare import relative_difference
from referee.contestants.autograd import is_differentiable
from referee.reference.file import BadReferenceError, NoRoomError, ReferenceFile
from referee.reference.tf32 import RoundedOperands

# If two results have a larger relative difference, rounding alone does not explain it.
MAX_ROUNDING = 1e-2
# Reasons, for messages, why results are compared with eager's.
NO_FLOAT64 = "compared with eager, since the reference does not run in float64"
NO_ROOM_FOR_FLOAT64 = "compared with eager, since there is no memory for float64"
NO_FLOAT64_RESULT = "compared with eager, since the reference gives no float64 result"
ANOTHER_FLOAT64_RESULT = "compared with eager, since its float64 result is a different one"


def module_in_float64(module: nn.Module) -> nn.Module:
    """Return a copy of a module in float64."""
    return copy.deepcopy(module).double()


def inputs_in_float64(inputs: list) -> list:
    """Return the inputs, floats converted to float64 and complex numbers to complex128."""
    return [_widened(x) for x in inputs]


def _widened(x: object) -> object:
    """Return an input in float64 or complex128; return any other input unchanged."""
    if is_differentiable(x):
        return x.double()
    is_complex = isinstance(x, torch.Tensor) and x.is_complex()
    return x.to(torch.complex128) if is_complex else x


def run_in_float64(file: ReferenceFile, module: nn.Module, inputs: list) -> list[torch.Tensor]:
    """Return the reference's results in float64.

    Raises:
        BadReferenceError, torch.OutOfMemoryError: there are no such results.
    """
    wide_module = file.call_or_refuse("float64", lambda: module_in_float64(module))
    return file.run(wide_module, inputs_in_float64(inputs))


def run_in_tf32(
    file: ReferenceFile, module: nn.Module, inputs: list, operators: tuple[str, ...]
) -> list[torch.Tensor]:
    """Return the reference's results in float64, but with operands rounded to TF32.

    Args:
        file: the reference.
        module: its module.
        inputs: the arguments of the forward.
        operators: parts of the names of the operators whose operands are rounded, as
            `tf32.operators_in_tf32` returns them.
    """
    with RoundedOperands(operators):
        return run_in_float64(file, module, inputs)


def find_float64_obstacle(file: ReferenceFile, module: nn.Module, inputs: list) -> str | None:
    """Return why eager's results cannot be compared with float64's; None if they can be."""
    eager_results = file.run(module, inputs)
    try:
        exact_results = run_in_float64(file, module, inputs)
    except (NoRoomError, torch.OutOfMemoryError):
        return NO_ROOM_FOR_FLOAT64
    except BadReferenceError:
        return NO_FLOAT64
    for eager, exact in zip(eager_results, exact_results, strict=True):
        if eager.is_floating_point() or eager.is_complex():
            wide_dtype = torch.complex128 if eager.is_complex() else torch.float64
            if exact.dtype != wide_dtype or exact.shape != eager.shape:
                return NO_FLOAT64_RESULT
        # Eager may overflow where float64 does not.
        if relative_difference(exact, eager, where_finite=True) > MAX_ROUNDING:
            return ANOTHER_FLOAT64_RESULT
    return None
