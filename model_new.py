"""Drop-in replacements for the modules of `model.py`. The first import builds their kernels.

The file may be imported, or read as text and passed to `exec`. Either way, Python must find the
package `kernels` of this project on `sys.path`.
"""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.jit import is_scripting

import kernels

# Another package of this name may come first on sys.path.
if not hasattr(kernels, "read_sources"):
    raise ImportError(
        "expected the package 'kernels' that is beside model_new.py, got another of that name, "
        f"{kernels}: put this project's folder first on sys.path"
    )

from kernels.build.extension import load_extensions
from kernels.interception import as_builtin
from kernels.linear.dispatch import linear_in_graph, linear_slow_path, operands_unless_intercepted
from kernels.linear.flops import register_flops
from kernels.relu.dispatch import is_relu_intercepted, relu_slow_path

__all__ = ["SOLUTIONS", "LinearReluDivideNew", "ModelNew"]


def compile_and_load(**arguments: object) -> None:
    """Call torch's `load_inline`, which compiles sources and loads the library.

    `load_extensions` calls this function for each extension that it does not find in the cache. It
    gets the function as an argument so that this file shows the call of `load_inline`, as other
    KernelBench solutions do.

    Torch's build tools are imported here, not at the top of the file, because their import takes a
    second. It is not needed if all extensions are in the cache.
    """
    from torch.utils import cpp_extension

    cpp_extension.load_inline(**arguments)


# Each problem's sources become one extension, which registers the problem's operators in a
# namespace of its own, `torch.ops.<namespace>`.
sources = {problem: kernels.read_sources(problem) for problem in kernels.SOURCES}
namespaces = load_extensions(sources, compile_and_load)
relu_ops = getattr(torch.ops, namespaces["relu"])
linear_ops = getattr(torch.ops, namespaces["linear_relu_divide"])

# Eager calls use the operator as a built-in function, which is the fastest way to call it.
relu_builtin = as_builtin(relu_ops.relu.default)

# The linear operator, for eager calls.
linear_builtin = as_builtin(linear_ops.linear_relu_divide.default)
# This operator as torch.compile puts it into a graph: torch's `OpOverload`.
linear_overload = linear_ops.linear_relu_divide.default
# The operator as torch.export puts it into a program. The extension registers it a second time, in
# STABLE_NAMESPACE. A saved program refers to operators by name. The name in `namespaces` changes
# with the sources; STABLE_NAMESPACE does not.
linear_stable_overload = getattr(torch.ops, kernels.STABLE_NAMESPACE).linear_relu_divide.default
# Let torch.utils.flop_counter count the arithmetic of the operator, in both namespaces.
register_flops(namespaces["linear_relu_divide"], kernels.STABLE_NAMESPACE)

reference = kernels.load_reference()


class ModelNew(reference.Model):
    """ReLU of a tensor of any shape, strides and device.

    The forward calls torch's own op in four cases: with `inplace`; under `torch.compile` or
    TorchScript; if other Python code intercepts the call; and for tensor subclasses other than
    parameters and DTensors that are replicated, sharded or partial sums (these are added up first).
    In all other cases it calls our operator.

    The operator calls the kernels if the tensor (of a DTensor: its local tensor) is float32,
    float64, float16 or bfloat16, is on a CPU or a CUDA GPU, has no gaps in memory, is not empty,
    begins at a multiple of 16 bytes, has no forward-mode tangent, and is not under a `torch.func`
    transform or a `TorchDispatchMode`. Otherwise it calls torch's own op.

    Args:
        inplace: overwrite forward's x, as `torch.nn.ReLU(inplace=True)` does.
    """

    # The default for objects that are made without this constructor: a user may assign ModelNew to
    # the `__class__` of a `Model`.
    inplace = False

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        """Replace negative elements by 0, differentiably. NaN and -0.0 are not negative.

        Args:
            x: a tensor of any shape, strides and dtype that `torch.relu` takes: float32, float64,
                float16, bfloat16 and integers.

        Returns:
            A new tensor of x's shape, dtype and device; x itself if `inplace`.

        Raises:
            RuntimeError: x is bool; or `inplace`, gradients are enabled, and x is a leaf that
                requires a gradient.
            NotImplementedError: torch has no ReLU for x's dtype, for example a complex one.
            TypeError: x is not a tensor.
        """
        if self.inplace:
            return torch.relu_(x)
        if is_scripting():  # TorchScript cannot compile the lines below
            return torch.relu(x)
        if is_relu_intercepted(x):  # by Python code that must see torch's call, or by Dynamo
            return torch.relu(x)
        if type(x) is Tensor:
            return relu_builtin(x)
        return relu_slow_path(x, relu_builtin)

    def extra_repr(self) -> str:
        """Return the constructor's argument for `repr`, as `torch.nn.ReLU` does."""
        return "inplace=True" if self.inplace else ""


class LinearReluDivideNew(reference.LinearReluDivide):
    """relu(x weight^T + bias) / divisor, for x `[..., in_features]`.

    It accepts what the reference accepts, and returns the same shape and dtype. Each call reads the
    parameters and the divisor anew.

    Args:
        in_features: K, the last size of x.
        out_features: N, the last size of the result.
        divisor: any number; 0, infinities and NaN give what torch gives.

    Attributes:
        linear: an `nn.Linear` with weight `[N, K]` and bias `[N]`. They are the `state_dict`.
        divisor: the constructor's argument.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Compute relu(x weight^T + bias) / divisor, differentiably in x, weight and bias.

        float32 products are as accurate as torch's settings ask for:
        `torch.set_float32_matmul_precision`, or `fp32_precision` of `torch.backends`.

        Args:
            x: `[..., K]` of any strides, of the parameters' dtype and device. The dtype is float32,
                float64, float16 or bfloat16. Under autocast, the dtype of x may differ from
                the parameters'.

        Returns:
            A contiguous tensor `[..., N]` on x's device. Its dtype is x's. Under autocast, it is
            autocast's, unless x is float64.

        Raises:
            RuntimeError: sizes, dtypes or devices do not match, or x has no dimension.
            TypeError: x is not a tensor.
        """
        if is_scripting():  # TorchScript cannot compile the lines below
            return self.linear(x).relu() / self.divisor
        if is_dynamo_compiling():
            return linear_in_graph(self, x, linear_overload, linear_stable_overload)
        # The fast path. `operands` is None if the call cannot take it, for example because other
        # code intercepts the call, or `self` is of a subclass. (A subclass may override the
        # attribute `linear`, but the fast path reads `linear` from the module's dictionary.)
        operands = operands_unless_intercepted(self, LinearReluDivideNew, x)
        if operands is not None:
            weight, bias, divisor = operands
            return linear_builtin(x, weight, bias, divisor)
        return linear_slow_path(self, x, linear_builtin, linear_stable_overload)


SOLUTIONS: dict[str, type] = {"relu": ModelNew, "linear_relu_divide": LinearReluDivideNew}
