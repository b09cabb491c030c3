"""The operators that a call or a training step uses, and how many terms their longest sum has.

Rounding errors grow with that number.
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that sum over one dimension of their operand.
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
    name_without_in_place = name.rstrip("_")
    if name_without_in_place in PRODUCTS:
        return tensors[PRODUCTS[name_without_in_place]].shape[-1]
    if name_without_in_place in FUNCTIONS:
        return FUNCTIONS[name_without_in_place](args)
    if "backward" in name:
        return _terms_of_backward(tensors, result)
    if "attention" in name:  # a product over the head's dimension, then one over the keys
        return max(x.shape[-1] for x in tensors) + tensors[1].shape[-2]
    return _terms_of_reduction(name, tensors[0], result)


def _terms_of_convolution(args: tuple) -> int:
    """Return how many elements of the weight belong to one output channel."""
    _x, weight, _bias, _stride, _padding, _dilation, is_transposed, *_ = args
    output_channels = weight.shape[1] if is_transposed else weight.shape[0]
    return weight.numel() // max(output_channels, 1)


def _terms_of_layer_norm(args: tuple) -> int:
    """Return how many elements are normalized together."""
    _x, normalized_shape, *_ = args
    return math.prod(normalized_shape)


def _terms_of_batch_norm(args: tuple) -> int:
    """Return how many elements are normalized together: those of a channel."""
    x, *_ = args
    return _elements_of_a_channel(x)


def _elements_of_a_channel(x: torch.Tensor) -> int:
    """Return how many elements each channel of x has, `[batch, channels, ...]`."""
    return x.numel() // max(x.shape[1], 1)


def _terms_of_group_norm(args: tuple) -> int:
    """Return how many elements are normalized together: a group of one sample's channels."""
    _x, _weight, _bias, _batch, channels, positions, groups, *_ = args
    return channels // groups * positions


def _terms_of_convolution_backward(args: tuple) -> int:
    """Return the larger number: of the sums of the gradient of x, or of those of the weight's."""
    output_gradient, x, weight, *_ = args
    terms_of_x = weight.numel() // max(min(weight.shape[:2]), 1)
    terms_of_weight = max(_elements_of_a_channel(output_gradient), _elements_of_a_channel(x))
    return max(terms_of_x, terms_of_weight)


def _terms_of_layer_norm_backward(args: tuple) -> int:
    """Return the larger number: of the elements normalized together, or of such groups."""
    _output_gradient, x, normalized_shape, *_ = args
    normalized = math.prod(normalized_shape)
    return max(normalized, x.numel() // max(normalized, 1))


def _terms_of_batch_norm_backward(args: tuple) -> int:
    """Return how many elements a channel of x has."""
    _output_gradient, x, *_ = args
    return _elements_of_a_channel(x)


def _terms_of_group_norm_backward(args: tuple) -> int:
    """Return the larger number: of the elements normalized together, or of a channel's."""
    _output_gradient, _x, _mean, _rstd, _weight, *sizes = args
    batch, channels, positions, groups, *_ = sizes
    return max(channels // groups * positions, batch * positions)


def _terms_of_index_put(args: tuple) -> int:
    """Return how many elements may be added to one place; 1 if they replace others."""
    _x, indices, _values, *accumulate = args  # a default may be left out
    if not any(accumulate):
        return 1
    return max(index.numel() for index in indices if index is not None)


def _terms_of_softmax_backward(args: tuple) -> int:
    """Return how many elements are normalized together."""
    output_gradient, _output, dimension, *_ = args
    return output_gradient.shape[dimension]


def _terms_of_cumulative(args: tuple) -> int:
    """Return the size of the dimension over which an operator of CUMULATIVE sums."""
    x, dimension, *_ = args
    return x.shape[dimension]


def _terms_of_index_add(args: tuple) -> int:
    """Return how many indices there are, and so how many elements one place gets at most."""
    _x, _dimension, index, *_ = args
    return index.numel()


def _terms_of_scatter_add(args: tuple) -> int:
    """Return how many indices there are along the dimension, as `_terms_of_index_add` does."""
    _x, dimension, index, *_ = args
    return index.shape[dimension]


def _terms_of_embedding_backward(args: tuple) -> int:
    """Return how many indices there are, as `_terms_of_index_add` does."""
    _output_gradient, index, *_ = args
    return index.numel()


def _terms_of_backward(tensors: list[torch.Tensor], result: object) -> int:
    """Return the largest possible number of terms of an operator of a backward.

    It is the number of elements of the largest operand. But it is 1 if all operands and the result
    have the same shape, as for the gradient of an elementwise function, or if the operator only
    copies a gradient into a larger tensor.
    """
    first = result[0] if isinstance(result, tuple) else result
    have_one_shape = len({x.shape for x in tensors}) == 1
    if have_one_shape and isinstance(first, torch.Tensor) and first.numel() >= tensors[0].numel():
        return 1
    return max(x.numel() for x in tensors)


# Functions that take an operator's arguments, by its name. torch passes them by position; for
# example, `torch.ops.aten.convolution.default._schema` has their names.
FUNCTIONS = {
    **dict.fromkeys(CUMULATIVE, _terms_of_cumulative),
    "convolution": _terms_of_convolution,
    "native_layer_norm": _terms_of_layer_norm,
    "native_batch_norm": _terms_of_batch_norm,
    "native_group_norm": _terms_of_group_norm,
    "index_add": _terms_of_index_add,
    "index_put": _terms_of_index_put,
    "scatter_add": _terms_of_scatter_add,
    "embedding_dense_backward": _terms_of_embedding_backward,
    "convolution_backward": _terms_of_convolution_backward,
    "native_layer_norm_backward": _terms_of_layer_norm_backward,
    "native_batch_norm_backward": _terms_of_batch_norm_backward,
    "native_group_norm_backward": _terms_of_group_norm_backward,
    "_softmax_backward_data": _terms_of_softmax_backward,
    "_log_softmax_backward_data": _terms_of_softmax_backward,
}


def _terms_of_reduction(name: str, x: torch.Tensor, result: object) -> int:
    """Return how many elements of x give one element of the result; 1 if it is no reduction."""
    first = result[0] if isinstance(result, tuple) else result
    if not isinstance(first, torch.Tensor) or not any(part in name for part in REDUCTIONS):
        return 1
    return max(1, x.numel() // max(first.numel(), 1))
