"""Drop-in replacements for the modules of `model.py`. Importing this builds their kernels.

Works imported, and as text given to `exec`: only the package `kernels` beside it must be found. It
has the __global__ kernels, their __device__ functions, and what binds them to torch. The lines
`# bundle:` tell `kernels/build/bundle.py` which lines a bundle takes.
"""

from types import ModuleType

import torch

# bundle: skip
import kernels

if not hasattr(kernels, "read_sources"):
    raise ImportError(
        "expected the package 'kernels' that lies beside model_new.py, got another of that name "
        f"from {list(kernels.__path__)}: put this project's folder first on sys.path"
    )

from kernels.binding.subclasses import serve_subclasses
from kernels.build.extension import load
from kernels.linear.modules import (
    call_column_parallel,
    call_reference,
    is_column_parallel,
    is_plain_linear,
)
from kernels.linear.subclasses import serve_linear
from kernels.relu.subclasses import serve_relu

_reference = kernels.load_reference()
SOURCES = kernels.read_sources()
# bundle: end


def _load_inline(**arguments: object) -> ModuleType:
    """Compiles and loads the kernels. `load` calls it where it finds no finished build."""
    from torch.utils.cpp_extension import load_inline  # a warm start saves this second

    return load_inline(**arguments)


_extension = load(SOURCES, _load_inline)
serve_subclasses(_extension)
_is_scripted = torch.jit.is_scripting
_is_traced = torch.compiler.is_dynamo_compiling

# bundle: begin relu, from kernels/relu
serve_relu(_extension)
_relu = _extension.relu
_relu_in_place = _extension.relu_


# bundle: class ModelNew(torch.nn.Module):
class ModelNew(_reference.Model):
    """ReLU of a tensor of any shape, layout and device, by a kernel of this project.

    The forward takes what `torch.relu` takes and returns what it returns, in fresh memory. In
    place, it takes what `torch.relu_` takes, overwrites it and returns it.

    Args:
        inplace: as for `torch.nn` ReLU; off by default.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """max(x, 0) element by element; NaN stays NaN. Differentiable.

        Args:
            x: of any shape and strides; float32, float64, float16, bfloat16, int8 to int64, uint8,
                and what else the installed torch takes.

        Returns:
            A dense tensor of x's shape, dtype and device; x itself if in place.

        Raises:
            RuntimeError: x is bool, or in place a leaf that requires gradients.
            NotImplementedError: torch has no ReLU for the dtype, such as complex ones.
            TypeError: x is no tensor.
        """
        if _is_scripted() or _is_traced():  # a graph holds torch's own op, which compilers fuse
            return x.relu_() if self.inplace else x.relu()
        return _relu_in_place(x) if self.inplace else _relu(x)

    def extra_repr(self) -> str:
        return "inplace=True" if self.inplace else ""


# bundle: end
# bundle: begin linear_relu_divide, from kernels/linear
serve_linear(_extension)
_linear_relu_divide = _extension.linear_relu_divide
_linear_relu_divide_in_graph = _extension.linear_relu_divide_in_graph


# bundle: class ModelNew(torch.nn.Module):
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

    # bundle: the same of model.py
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
        linear, divisor = self.linear, self.divisor
        fused = _linear_relu_divide_in_graph if _is_traced() else _linear_relu_divide
        if is_plain_linear(linear):
            out = fused(x, linear.weight, linear.bias, divisor)
            if out is not NotImplemented:
                return out
        elif isinstance(divisor, (float, int)) and is_column_parallel(linear):
            return call_column_parallel(linear, x, divisor, fused)
        # Whoever hooked, wrapped or replaced `linear`, or gave it tensors of a class of its own,
        # expects it to be called; torch's ops do all of it, as in the reference.
        return call_reference(linear, x, divisor)


# bundle: end
# bundle: skip
SOLUTIONS: dict[str, type[torch.nn.Module]] = {
    "relu": ModelNew,
    "linear_relu_divide": LinearReluDivideNew,
}


def __getattr__(name: str) -> object:
    """The names of a problem file, for harnesses that ask the solution for them."""
    if name in ("batch_size", "dim", "get_inputs", "get_init_inputs"):
        return getattr(_reference, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# bundle: end
