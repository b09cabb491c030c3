"""Torch dispatch modes that see every operator of a forward.

`Operators` notes which operators are called, and how many terms the longest sum has: rounding
errors grow with that number. `RoundedOperands` rounds the operands of products to TF32.
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that sum over the dimension in their second argument.
CUMULATIVE = ("cumsum", "cumprod", "logcumsumexp", "_softmax", "_log_softmax")
# Operators that sum over the last dimension of an operand, by the operand's index.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0}
# Parts of the names of operators that sum over the dimensions which their result does not have.
REDUCTIONS = ("sum", "mean", "prod", "var", "std", "norm", "logsumexp", "pool", "loss", "dist")
TF32_BITS = 11  # significant bits of a TF32 number


class Operators(TorchDispatchMode):
    """Notes all operators that are called while the mode is on.

    Attributes:
        names: the operators' names, without "aten::".
        most_terms: the number of terms of the longest sum that gives one element of a result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.most_terms = 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because torch would import Dynamo to skip it, which takes two seconds.

        While a mode is on, torch runs no compiled frames in any case.
        """
        return False

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Call the operator, note it, and return its result."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.names.add(name)
        self.most_terms = max(self.most_terms, _terms(name, args, result))
        return result


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
        """Return False, as `Operators` does."""
        return False

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Call the operator, with rounded operands if torch may compute it in TF32."""
        if any(part in func._schema.name for part in self._allowed):
            args = tuple(_round_to_tf32(x) for x in args)
        return func(*args, **(kwargs or {}))


def _round_to_tf32(operand: object) -> object:
    """Return a float64 tensor rounded to TF32's bits; also the tensors in a list or tuple.

    Any other operand is returned unchanged.
    """
    if isinstance(operand, (list, tuple)):
        return type(operand)(_round_to_tf32(part) for part in operand)
    if not isinstance(operand, torch.Tensor) or operand.dtype != torch.float64:
        return operand
    fraction, exponent = torch.frexp(operand)
    scale = 2**TF32_BITS
    return torch.ldexp((fraction * scale).round() / scale, exponent)


def _terms(name: str, args: tuple, result: object) -> int:
    """Return the number of terms of the sum that gives one element of an operator's result.

    Args:
        name: the operator's name, without "aten::".
        args: its arguments.
        result: what it returned.
    """
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if not tensors or not tensors[0].dim():
        return 1
    if name in CUMULATIVE:
        return tensors[0].shape[args[1]]
    if name in PRODUCTS:
        return tensors[PRODUCTS[name]].shape[-1]
    if name in LAYERS:
        return LAYERS[name](args)
    if "attention" in name:  # a product over the head's dimension, then one over the keys
        return max(x.shape[-1] for x in tensors) + tensors[1].shape[-2]
    return _terms_of_reduction(name, tensors[0], result)


def _terms_of_convolution(args: tuple) -> int:
    """Return how many elements of the weight belong to one output channel."""
    weight, is_transposed = args[1], args[6]
    output_channels = weight.shape[1] if is_transposed else weight.shape[0]
    return weight.numel() // max(output_channels, 1)


def _terms_of_layer_norm(args: tuple) -> int:
    """Return how many elements are normalized together."""
    normalized_shape = args[1]
    return math.prod(normalized_shape)


def _terms_of_channels(args: tuple) -> int:
    """Return how many elements a channel of x has, `[batch, channels, ...]`."""
    x = args[0]
    return x.numel() // max(x.shape[1], 1)


# Functions of an operator's arguments, by its name.
LAYERS = {
    "convolution": _terms_of_convolution,
    "native_layer_norm": _terms_of_layer_norm,
    "native_batch_norm": _terms_of_channels,
    "native_group_norm": _terms_of_channels,
}


def _terms_of_reduction(name: str, x: torch.Tensor, result: object) -> int:
    """Return how many elements of x give one element of the result; 1 if it is no reduction."""
    first = result[0] if isinstance(result, tuple) else result
    if not isinstance(first, torch.Tensor) or not any(part in name for part in REDUCTIONS):
        return 1
    return max(1, x.numel() // max(first.numel(), 1))
