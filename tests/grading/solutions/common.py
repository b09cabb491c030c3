"""The common part of the designs and their repairs, which import it from their folder."""

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

if not torch.cuda.is_available():
    raise RuntimeError("needs a GPU")
HEAD = "#include <torch/extension.h>\n"
RELU = "torch::Tensor relu_forward(torch::Tensor x)"  # a declaration, for `build`


def build(name: str, source: str, *declarations: str) -> object:
    """Build and return an extension with the functions of these declarations."""
    functions = [text.partition("(")[0].split()[-1] for text in declarations]
    text = "".join(f"{text};\n" for text in declarations)
    return load_inline(name, text, HEAD + source, functions=functions)


def relu_module(function: object) -> type[nn.Module]:
    """Return the class of a module that calls the function."""

    class ModelNew(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    return ModelNew


def register(name: str, source: str) -> object:
    """Build a source, and return the operator that it registers."""
    load_inline(name, "", source, is_python_module=False, no_implicit_headers=True)
    return getattr(torch.ops, name).relu_forward
