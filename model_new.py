"""Drop-in replacements for the modules of `model.py`. Importing this builds their kernels.

Works imported, and as text given to `exec`: only the package `kernels` beside it must be found. It
has the __global__ kernels, their __device__ functions, and what binds them to torch.
"""

import sys

import torch
from torch.overrides import has_torch_function_unary, has_torch_function_variadic

import kernels

if not hasattr(kernels, "read_sources"):
    raise ImportError(
        "expected the package 'kernels' that lies beside model_new.py, got another of that name "
        f"from {list(kernels.__path__)}: put this project's folder first on sys.path"
    )

from kernels.build.extension import load
from kernels.linear import (
    is_number,
    is_plain_linear,
    linear_in_graph,
    linear_of_others,
    register_flops,
)
from kernels.relu import relu_of_others
from kernels.watchers import direct

_reference = kernels.load_reference()
_is_scripted = torch.jit.is_scripting
_is_traced = torch.compiler.is_dynamo_compiling
_torch_relu, _Tensor, _Parameter = torch.relu, torch.Tensor, torch.nn.Parameter


def _load_inline(**arguments: object) -> None:
    """Compiles and loads the kernels. `load` calls it where it finds no finished build."""
    from torch.utils.cpp_extension import load_inline  # a warm start saves this second

    load_inline(**arguments)


if "relu" in kernels.problems():  # a bundle has one problem's kernels
    load("relu", kernels.read_sources("relu"), _load_inline)
    _relu = direct(torch.ops.relu_divide_kernels.relu.default)


class ModelNew(_reference.Model):
    """ReLU of a tensor of any shape, layout and device, by a kernel of this project.

    The forward takes what `torch.relu` takes and returns what it returns, in fresh memory.

    Args:
        inplace: as for `torch.nn` ReLU, by torch's own op; off by default.
    """

    inplace = False  # of a `Model` whose class was changed to this one

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """max(x, 0) element by element; NaN stays NaN. Differentiable.

        Args:
            x: of any shape, strides and dtype that torch takes. The kernels serve dense tensors of
                float32, float64, float16 and bfloat16, torch's own op all others.

        Returns:
            A dense tensor of x's shape, dtype and device; x itself if in place.

        Raises:
            RuntimeError: x is bool, or in place a leaf that requires gradients.
            NotImplementedError: torch has no ReLU for the dtype, such as complex ones.
            TypeError: x is no tensor.
        """
        if self.inplace:
            return torch.relu_(x)
        if _is_scripted() or _is_traced():  # a graph holds torch's own op, which compilers fuse
            return torch.relu(x)
        if type(x) is _Tensor and not has_torch_function_unary(x) and torch.relu is _torch_relu:
            return _relu(x)
        return relu_of_others(x, _relu)

    def extra_repr(self) -> str:
        return "inplace=True" if self.inplace else ""


class LinearReluDivideNew(_reference.LinearReluDivide):
    """relu(x weight^T + bias) / divisor, for x `[..., in_features]`, by kernels of this project.

    Takes what the reference takes and returns what it returns, in the same dtype and shape.
    Parameters and divisor are read in each call.

    Args:
        in_features: K, the last size of x.
        out_features: N, the last size of the result.
        divisor: any number; 0, infinities and NaN give what torch gives.

    Attributes:
        linear: `nn.Linear` with weight `[N, K]` and bias `[N]`, which make the `state_dict`.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """relu(x weight^T + bias) / divisor. Differentiable in x, weight and bias.

        float32 is as accurate as `torch.set_float32_matmul_precision` and torch's other settings
        ask for.

        Args:
            x: `[..., K]` of any strides, of the parameters' dtype and device: float32, float64,
                float16 or bfloat16.

        Returns:
            `[..., N]`, of x's dtype and device, dense.

        Raises:
            RuntimeError: sizes, dtypes or devices do not match, or x has no dimension.
            TypeError: x is no tensor.
        """
        if _is_scripted():  # TorchScript can't ask what else `linear` does, so it calls it
            return self.linear(x).relu() / self.divisor
        if _is_traced():
            return linear_in_graph(self, x, _linear_operator)
        # By nn.Module's search, `linear` and its parameters take a third of a small call.
        own, divisor = self.__dict__, self.divisor
        is_found = type(self) is __class__ and "linear" not in own
        linear = (is_found and own["_modules"].get("linear")) or self.linear
        # Whoever hooked, wrapped or replaced `linear` expects it to be called.
        if not (is_plain_linear(linear) and is_number(divisor)):
            return torch.relu(linear(x)) / self.divisor  # which a hook may change
        own = linear.__dict__
        parameters = own["_parameters"]
        weight = parameters.get("weight")
        bias = parameters.get("bias", NotImplemented)  # None says that there is none to add
        if (
            type(x) is _Tensor
            and type(weight) is _Parameter
            and (bias is None or type(bias) is _Parameter)
            and not ("weight" in own or "bias" in own)  # which come first
            and not has_torch_function_variadic(x, weight, bias)
        ):
            return _linear(x, weight, bias, divisor)
        return linear_of_others(linear, x, divisor, _linear)


def _load_linear() -> None:
    global _linear_operator, _linear
    load("linear_relu_divide", kernels.read_sources("linear_relu_divide"), _load_inline)
    _linear_operator = torch.ops.relu_divide_kernels.linear_relu_divide.default
    _linear = direct(_linear_operator)
    register_flops()


# The second problem's kernels are built when somebody first asks this module for its class (PEP
# 562); at once where this text is executed and there is no module to ask.
if vars(sys.modules.get(__name__, object)) is globals():
    _linear_class = globals().pop("LinearReluDivideNew")
else:
    _load_linear()


def __getattr__(name: str) -> object:
    if name == "LinearReluDivideNew":
        _load_linear()
        globals()[name] = _linear_class
        return _linear_class
    if name == "SOLUTIONS":
        solutions = {"relu": ModelNew, "linear_relu_divide": __getattr__("LinearReluDivideNew")}
        return globals().setdefault(name, solutions)
    if name in ("batch_size", "dim", "get_inputs", "get_init_inputs"):
        return getattr(_reference, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
