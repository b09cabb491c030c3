"""The operators that a forward calls, and how many terms the longest of their sums has.

Rounding errors grow with that number.
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that sum over one dimension, whose index is their second argument.
CUMULATIVE = ("cumsum", "cumprod", "logcumsumexp", "_softmax", "_log_softmax")
# Operators that sum over the last dimension of an operand, by the operand's index.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0}
# Parts of the names of operators that sum over the dimensions which their result does not have.
REDUCTIONS = ("sum", "mean", "prod", "var", "std", "norm", "logsumexp", "pool", "loss", "dist")


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


def _terms_of_groups(args: tuple) -> int:
    """Return how many elements are normalized together: a group of one sample's channels."""
    channels, positions, groups = args[4:7]
    return channels // groups * positions


# Functions of an operator's arguments, by its name.
LAYERS = {
    "convolution": _terms_of_convolution,
    "native_layer_norm": _terms_of_layer_norm,
    "native_batch_norm": _terms_of_channels,
    "native_group_norm": _terms_of_groups,
}


def _terms_of_reduction(name: str, x: torch.Tensor, result: object) -> int:
    """Return how many elements of x give one element of the result; 1 if it is no reduction."""
    first = result[0] if isinstance(result, tuple) else result
    if not isinstance(first, torch.Tensor) or not any(part in name for part in REDUCTIONS):
        return 1
    return max(1, x.numel() // max(first.numel(), 1))
