"""Drop-in replacements for the modules of `model.py`. Importing this file builds their kernels.

It works imported, and as text given to `exec`: only the package `kernels` beside it must be found.
"""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.jit import is_scripting

import kernels

if not hasattr(kernels, "read_sources"):
    raise ImportError(
        "expected the package 'kernels' that is beside model_new.py, got another of that name from "
        f"{list(kernels.__path__)}: put this project's folder first on sys.path"
    )

from kernels.build.extension import load_extensions
from kernels.linear.dispatch import linear_in_graph, linear_of_others, operands_unless_watched
from kernels.linear.flops import register_flops
from kernels.relu.dispatch import is_relu_watched, relu_of_subclass
from kernels.watchers import without_python_frame

__all__ = ["SOLUTIONS", "LinearReluDivideNew", "ModelNew"]


def compile_and_load(**arguments: object) -> None:
    """Compile sources and load the result; called only where no finished build is found."""
    # Imported here, because it takes a second that a finished build does not need.
    from torch.utils import cpp_extension

    cpp_extension.load_inline(**arguments)


# Each problem's sources become one extension, which registers the problem's operators in a
# namespace of its own, `torch.ops.<namespace>`. Both are compiled at the same time.
sources = {problem: kernels.read_sources(problem) for problem in kernels.SOURCES}
namespaces = load_extensions(sources, compile_and_load)
relu_ops = getattr(torch.ops, namespaces["relu"])
linear_ops = getattr(torch.ops, namespaces["linear_relu_divide"])
register_flops(namespaces["linear_relu_divide"], kernels.STABLE_NAMESPACE)

relu_kernel = without_python_frame(relu_ops.relu.default)
linear_kernel = without_python_frame(linear_ops.linear_relu_divide.default)
# In graphs, operators are called as Python sees them. Programs that torch.export saves hold a name
# that stays the same when the sources change.
linear_operator = linear_ops.linear_relu_divide.default
linear_exported = getattr(torch.ops, kernels.STABLE_NAMESPACE).linear_relu_divide.default

reference = kernels.load_reference()


class ModelNew(reference.Model):
    """ReLU of a tensor of any shape, strides and device.

    The kernels compute it for dense tensors of float32, float64, float16 and bfloat16 on a CPU or a
    CUDA GPU; torch's own op computes everything else.

    Args:
        inplace: overwrite x by torch's own op, as `torch.nn.ReLU(inplace=True)` does.
    """

    inplace = False  # for an object of `Model` whose class was changed to this one

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        """Compute max(x, 0) element by element, differentiably. NaN stays NaN.

        Args:
            x: a tensor of any shape, strides and dtype that `torch.relu` takes.

        Returns:
            A tensor of x's shape, dtype and device in fresh memory, dense; x itself if in place.

        Raises:
            RuntimeError: x is bool, or in place a leaf that requires gradients.
            NotImplementedError: torch has no ReLU for the dtype, such as complex ones.
            TypeError: x is no tensor.
        """
        if self.inplace:
            return torch.relu_(x)
        if is_scripting():  # TorchScript compiles nothing below
            return torch.relu(x)
        if is_relu_watched(x):
            return torch.relu(x)
        if type(x) is Tensor:
            return relu_kernel(x)
        return relu_of_subclass(x, relu_kernel)

    def extra_repr(self) -> str:
        """Show the constructor's argument, as `torch.nn.ReLU` does."""
        return "inplace=True" if self.inplace else ""


class LinearReluDivideNew(reference.LinearReluDivide):
    """relu(x weight^T + bias) / divisor, for x `[..., in_features]`.

    It takes what the reference takes and returns what the reference returns, in the same dtype and
    shape. Parameters and divisor are read in each call.

    Args:
        in_features: K, the last size of x.
        out_features: N, the last size of the result.
        divisor: any number; 0, infinities and NaN give what torch gives.

    Attributes:
        linear: an `nn.Linear` with weight `[N, K]` and bias `[N]`. They are the `state_dict`.
        divisor: the number.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Compute relu(x weight^T + bias) / divisor, differentiably in x, weight and bias.

        float32 is as accurate as `torch.set_float32_matmul_precision` and torch's newer settings
        ask for.

        Args:
            x: `[..., K]` of any strides, of the parameters' dtype and device: float32, float64,
                float16 or bfloat16.

        Returns:
            A dense tensor `[..., N]` of x's dtype and device.

        Raises:
            RuntimeError: sizes, dtypes or devices do not match, or x has no dimension.
            TypeError: x is no tensor.
        """
        if is_scripting():  # TorchScript cannot ask whether `linear` is hooked
            return self.linear(x).relu() / self.divisor
        if is_dynamo_compiling():
            return linear_in_graph(self, x, linear_operator, linear_exported)
        operands = operands_unless_watched(self, LinearReluDivideNew, x)
        if operands is not None:
            weight, bias, divisor = operands
            return linear_kernel(x, weight, bias, divisor)
        return linear_of_others(self, x, linear_kernel, linear_exported)


SOLUTIONS: dict[str, type] = {"relu": ModelNew, "linear_relu_divide": LinearReluDivideNew}
