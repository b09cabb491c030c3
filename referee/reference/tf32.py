"""TF32: which operators torch may compute in it, and a mode that rounds their operands to it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from referee.reference.in_parts import change_in_parts

TF32_BITS = 11  # significant bits of a TF32 number
# Parts of the names of operators that torch may compute in TF32: cuDNN's by default, matrix
# products if the precision setting says so.
CUDNN_OPERATORS = ("convolution", "rnn", "lstm", "gru")
MATRIX_PRODUCTS = ("mm", "matmul", "linear", "addmv", "mv")


def operators_in_tf32(
    called: set[str], device: torch.device, dtype: torch.dtype
) -> tuple[str, ...]:
    """Return parts of the names of those operators that torch may compute in TF32.

    Args:
        called: the names of all operators that the reference calls.
        device: the device on which they are called.
        dtype: the dtype of their operands.
    """
    if device.type != "cuda" or dtype != torch.float32:
        return ()
    allowed: tuple[str, ...] = ()
    if torch.backends.cudnn.allow_tf32:
        allowed += CUDNN_OPERATORS
    if torch.get_float32_matmul_precision() != "highest":
        allowed += MATRIX_PRODUCTS
    return tuple(part for part in allowed if any(part in name for name in called))


class RoundedOperands(TorchDispatchMode):
    """Rounds float64 operands of some operators to TF32 while the mode is on.

    A float64 result under this mode is as far off as a result that torch computes in TF32.

    Args:
        allowed: parts of the names of the operators that torch may compute in TF32.
    """

    def __init__(self, allowed: tuple[str, ...]) -> None:
        super().__init__()
        self._allowed = allowed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, for the reason that `operators.Operators` gives."""
        return False

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Call the operator, with rounded operands if torch may compute it in TF32."""
        if any(part in func._schema.name for part in self._allowed):
            args = tuple(_round_to_tf32(x) for x in args)
        return func(*args, **(kwargs or {}))


def _round_to_tf32(operand: object) -> object:
    """Return a copy of a float64 tensor, rounded to TF32's bits.

    The tensors in a list or tuple are rounded, too. Any other operand is returned unchanged.
    """
    if isinstance(operand, (list, tuple)):
        return type(operand)(_round_to_tf32(part) for part in operand)
    if not isinstance(operand, torch.Tensor) or operand.dtype != torch.float64:
        return operand
    rounded = operand.clone()
    change_in_parts(rounded, _round_in_place)
    return rounded


def _round_in_place(x: torch.Tensor) -> None:
    """Round float64 numbers to TF32's bits."""
    fraction, exponent = torch.frexp(x)
    scale = 2**TF32_BITS
    torch.ldexp((fraction * scale).round() / scale, exponent, out=x)
