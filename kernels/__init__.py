"""The kernels' sources, and the Python that builds and calls the kernels.

launchers.h      declares the functions that run the kernels, on raw pointers, sizes and a stream
torch_support/   C++ between the problems and torch: tensors, operators, autograd
relu/            ReLU: CUDA and CPU kernels, the operator that calls them, and dispatch.py, which
                 chooses between the operator and torch's ops
linear/          the same for Linear -> ReLU -> divide, with a folder for each group of kernels;
                 flops.py counts the operator's arithmetic
common/          what several CUDA kernels share; sizes.h is for the CPU, too
cpu/             what CPU kernels share, and the memory of large outputs on a CPU
build/           Python: from these sources to a loaded extension, or to a single-file bundle
interception.py  Python: detects other code that must see the calls of torch's functions
"""

import importlib
import importlib.resources
import importlib.util
import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import torch

if sys.version_info < (3, 10):  # noqa: UP036, older Pythons run this
    raise ImportError(f"Python {sys.version.split()[0]} is too old, 3.10 is needed")
if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 9):
    raise ImportError(f"torch {torch.__version__} is too old, 2.9 is needed")

# For each problem, the files to compile. `read_sources` adds the headers that they include.
SOURCES = {
    "relu": [
        "relu/relu_op.cpp",
        "relu/relu_cpu.cpp",
        "cpu/memory_pool.cpp",
        "relu/relu.cu",
    ],
    "linear_relu_divide": [
        "linear/operator/linear_op.cpp",
        "linear/fused_pass/fused_pass_cpu.cpp",
        "linear/fused_pass/fused_pass.cu",
        "linear/skinny/skinny.cu",
        "linear/transpose.cu",
        "linear/sm80/linear_sm80.cu",
        "linear/sm90/linear_sm90.cu",
    ],
}

# Programs that torch.export saves name our operators as torch.ops.<this namespace>.<operator>. If a
# process loads several versions of an extension, the first one defines the operators of this
# namespace. Each version also defines its operators in a namespace of its own,
# `<this namespace>_<key of the extension>` (build/extension.py).
STABLE_NAMESPACE = "relu_divide_kernels"

# Includes in quotes name a file by its path in this folder.
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)


def read_sources(problem: str) -> dict[str, str]:
    """Read the sources of a problem, and the headers that they include.

    The text is read through the package's loader so that it is found in a zip archive too.

    Args:
        problem: a key of `SOURCES`.

    Returns:
        The text of each file by its path in this folder, sorted by path.

    Raises:
        ValueError: there is no such problem.
    """
    if problem not in SOURCES:
        raise ValueError(f"expected a problem among {', '.join(SOURCES)}, got {problem!r}")
    folder = importlib.resources.files(__name__)
    texts: dict[str, str] = {}
    unread_paths = list(SOURCES[problem])
    while unread_paths:
        path = unread_paths.pop()
        if path not in texts:
            texts[path] = folder.joinpath(path).read_text(encoding="utf-8")
            unread_paths += _INCLUDE.findall(texts[path])
    return dict(sorted(texts.items()))


def load_reference() -> ModuleType:
    """Return the `model.py` beside this package.

    Another module named `model` may come first on `sys.path`, or be imported already. Then ours is
    imported under the name `kernels.model` so that neither takes the other's place.
    """
    project = str(Path(__file__).parent.parent)
    our_spec = PathFinder.find_spec("model", [project])
    if our_spec is None:
        raise ImportError(f"expected model.py beside the package 'kernels', in {project}")
    if _file_of_model() == os.path.realpath(our_spec.origin):
        return importlib.import_module("model")
    if "kernels.model" not in sys.modules:
        module = importlib.util.module_from_spec(our_spec)
        sys.modules["kernels.model"] = module
        try:
            our_spec.loader.exec_module(module)
        except BaseException:
            del sys.modules["kernels.model"]
            raise
    return sys.modules["kernels.model"]


def _file_of_model() -> str | None:
    """Return the file of the module that `import model` gives, or None if there is no such file."""
    if "model" in sys.modules:
        file = getattr(sys.modules["model"], "__file__", None)
    else:
        spec = importlib.util.find_spec("model")
        file = spec.origin if spec else None
    return os.path.realpath(file) if file else None
