"""Writes a bundle: our solution of one problem as one file, for harnesses such as KernelBench.

The file has the problem's sources as two strings, one `load_inline` call, `ModelNew`, and the
functions that `ModelNew` calls. The sources, and the Python that `ModelNew` needs, are copied from
this project. An include of one of our C++ headers is replaced by the header's text. The rest of the
file is `_TEMPLATE`. It repeats in a few lines how `toolchain.py` chooses flags, because a bundle
cannot import that module.
"""

import ast
import hashlib
import importlib.resources
import itertools
import re
from dataclasses import dataclass
from operator import attrgetter

from kernels import STABLE_NAMESPACE, read_sources
from kernels.build.toolchain import CUDA_FLAGS, CXX_FLAGS

_TEMPLATE = '''\
"""{title}

Written by `python run.py {problem} --bundle FILE`.

This file compiles the kernels when it is executed. It needs Python 3.10 and torch 2.9 or newer,
ninja, a C++ compiler, and for GPUs the CUDA toolkit of torch's version.
"""

{imports}

CPP_SOURCE = r"""
{cpp_source}"""

CUDA_SOURCE = r"""
{cuda_source}"""

# The library, and the namespace of its operators: torch.ops.<NAME>.
NAME = "{name}"

cxx_flags = {cxx_flags}
cuda_flags = {cuda_flags}
if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
    cxx_flags += ["-mavx2", "-mf16c"]
has_gpu = torch.version.cuda is not None and torch.cuda.is_available()
if has_gpu:
    cxx_flags += ["-DKERNELS_WITH_CUDA"]
    gpus = range(torch.cuda.device_count())
    for major, minor in sorted({{torch.cuda.get_device_capability(gpu) for gpu in gpus}}):
        # Hopper's tensor-core instructions are in code for sm_90a alone.
        arch = "90a" if (major, minor) == (9, 0) else f"{{major}}{{minor}}"
        cuda_flags += [f"-gencode=arch=compute_{{arch}},code=sm_{{arch}}"]

load_inline(
    name=NAME,
    cpp_sources=CPP_SOURCE,
    cuda_sources=CUDA_SOURCE if has_gpu else None,
    extra_cflags=[*cxx_flags, f"-DKERNELS_NAMESPACE={{NAME}}"],
    extra_cuda_cflags=cuda_flags,
    extra_ldflags=["-fopenmp"],
    no_implicit_headers=True,
    is_python_module=False,
)
{operators} = getattr(torch.ops, NAME)


{definitions}


{class_text}
'''


@dataclass(frozen=True)
class _Recipe:
    """Where the parts of a problem's bundle come from.

    Attributes:
        title: the first line of the bundle's docstring.
        reference: the name of the reference class in `model.py`.
        replacement: the name of the class in `model_new.py` that becomes `ModelNew`.
        operators: the variable in `model_new.py` that holds the operators.
        python_files: the files of the package `kernels` with the functions that the class calls.
    """

    title: str
    reference: str
    replacement: str
    operators: str
    python_files: list[str]


_RECIPES = {
    "relu": _Recipe(
        title="ModelNew for KernelBench level 1 #19: ReLU.",
        reference="Model",
        replacement="ModelNew",
        operators="relu_ops",
        python_files=["interception.py", "relu/dispatch.py"],
    ),
    "linear_relu_divide": _Recipe(
        title="ModelNew for KernelBench level 2 #63: Linear -> ReLU -> divide.",
        reference="LinearReluDivide",
        replacement="LinearReluDivideNew",
        operators="linear_ops",
        python_files=["interception.py", "linear/dispatch.py"],
    ),
}


def bundle(problem: str) -> str:
    """Return our solution of a problem as the text of one file.

    Two calls return the same text.

    Args:
        problem: `relu` or `linear_relu_divide`.

    Raises:
        ValueError: there is no such problem.
    """
    if problem not in _RECIPES:
        raise ValueError(f"expected a problem among {', '.join(_RECIPES)}, got {problem!r}")
    recipe = _RECIPES[problem]
    sources = read_sources(problem)
    class_text = _replacement_class(recipe)
    paths = [f"kernels/{path}" for path in recipe.python_files] + ["model_new.py"]
    files = [_read_python(path) for path in paths]
    needed = _needed_names(class_text, files, defined_by_template={recipe.operators, "ModelNew"})
    texts = {
        "cxx_flags": _list_literal(CXX_FLAGS),
        "cuda_flags": _list_literal(CUDA_FLAGS),
        "cpp_source": _join(sources, ".cpp"),
        "cuda_source": _join(sources, ".cu"),
        "imports": _needed_imports(files, needed),
        "definitions": _needed_definitions(files, needed),
        "class_text": class_text,
    }
    # A process can load several bundles, because those with different texts have different names.
    digest = hashlib.sha256(f"{_TEMPLATE}{texts}".encode()).hexdigest()[:16]
    return _TEMPLATE.format(
        title=recipe.title,
        problem=problem,
        name=f"{STABLE_NAMESPACE}_{digest}",
        operators=recipe.operators,
        **texts,
    )


def _list_literal(items: list[str]) -> str:
    """Return a list of strings as Python source, with one item on each line."""
    return "[\n" + "".join(f'    "{item}",\n' for item in items) + "]"


def _read(path: str) -> str:
    """Read a file of the project."""
    return importlib.resources.files("kernels").parent.joinpath(path).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------- C++


def _join(sources: dict[str, str], suffix: str) -> str:
    """Return the sources with this suffix as one text, which has each header only once."""
    included: set[str] = set()
    parts = [_expand(path, sources, included) for path in sources if path.endswith(suffix)]
    return "\n".join(parts)


def _expand(path: str, sources: dict[str, str], included: set[str]) -> str:
    """Return the text of a file, with each `#include "..."` line replaced by the header's text.

    A header that is in `included` already is left out, as `#pragma once` would do. So the first
    `#include` of a header must not be in a part that `#if` may leave out.

    Args:
        path: the file.
        sources: the text of every file.
        included: the files that the bundle has already; this function adds those it expands.
    """
    included.add(path)
    lines = [f"// ---- {path}"]
    for line in sources[path].splitlines():
        header = re.match('#include "(.+)"', line)
        if header is None:
            if line != "#pragma once":
                lines.append(line)
        elif header[1] not in included:
            lines.append(_expand(header[1], sources, included))
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------- Python


def _replacement_class(recipe: _Recipe) -> str:
    """Return the text of the class in `model_new.py`, turned into `class ModelNew(nn.Module)`.

    The class inherits from the reference, which the bundle does not have. So a class without a
    constructor gets a copy of the reference's constructor, before `forward`. Its docstrings and
    comments may still speak of the reference.
    """
    text = _read_python("model_new.py").definitions[recipe.replacement].text
    text = text.replace(f"(reference.{recipe.reference})", "(nn.Module)")
    text = re.sub(rf"\b{recipe.replacement}\b", "ModelNew", text)
    reference = _read("model.py")
    constructor = _method(reference, recipe.reference, "__init__")
    if constructor and "def __init__" not in text:
        text = text.replace("    def forward(", f"{constructor}\n\n    def forward(", 1)
    return text


def _method(text: str, class_name: str, name: str) -> str:
    """Return the text of a method of a class; empty if the class does not define it."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == name:
                    return _lines(text, method)
    return ""


@dataclass(frozen=True)
class _Definition:
    """The text that defines a function, a class or a variable, and whether it is a variable."""

    text: str
    is_variable: bool


@dataclass(frozen=True)
class _PythonFile:
    """The definitions and imports at the top level of a Python file.

    Attributes:
        definitions: each function, class and variable by its name, in the file's order.
        imports: an import statement for each name that is imported from outside this project.
    """

    definitions: dict[str, _Definition]
    imports: dict[str, str]


def _read_python(path: str) -> _PythonFile:
    """Read a Python file of the project."""
    text = _read(path)
    return _PythonFile(_definitions(text), _imports(text))


def _needed_names(
    class_text: str, files: list[_PythonFile], defined_by_template: set[str]
) -> set[str]:
    """Return the names that a class uses, and those that the definitions of these names use.

    Only names that the files define or import count, without those in `defined_by_template` and the
    package `kernels`, which the bundle does not have. (A local name of a function counts, too, if a
    file defines the same name. The bundle then has a definition that it does not need.)

    Args:
        class_text: the text of the class.
        files: the files that may define or import the names.
        defined_by_template: names that the bundle defines in another way, so that no copy is
            needed: the operators, and `ModelNew`, the class itself.
    """
    definitions: dict[str, _Definition] = {}
    available: set[str] = set()
    for file in files:
        definitions |= file.definitions
        available |= file.definitions.keys() | file.imports.keys()
    available -= defined_by_template
    needed: set[str] = set()
    unread_texts = [class_text]
    while unread_texts:
        new_names = (_names(unread_texts.pop()) & available) - needed
        needed |= new_names
        unread_texts += [definitions[name].text for name in new_names & definitions.keys()]
    return needed


def _needed_imports(files: list[_PythonFile], needed: set[str]) -> str:
    """Return the statements that import the needed names, and those that the template uses."""
    lines = {
        "import torch",
        "from torch import nn",  # for the class, which becomes an nn.Module
        "from torch.utils.cpp_extension import load_inline",
    }
    for file in files:
        lines |= {line for name, line in file.imports.items() if name in needed}
    return "\n".join(sorted(lines, key=_import_order))


def _needed_definitions(files: list[_PythonFile], needed: set[str]) -> str:
    """Return the needed definitions of all files, in their order.

    Two blank lines separate definitions. Between neighbouring variables of a file there are none.
    """
    blocks = []
    for file in files:
        found = [definition for name, definition in file.definitions.items() if name in needed]
        for are_variables, group in itertools.groupby(found, attrgetter("is_variable")):
            texts = [definition.text for definition in group]
            if are_variables:
                blocks.append("\n".join(texts))
            else:
                blocks += texts
    # A variable that is copied from model_new.py uses `kernels.STABLE_NAMESPACE`. The bundle has no
    # `kernels`, so it gets the value.
    return "\n\n\n".join(blocks).replace("kernels.STABLE_NAMESPACE", f'"{STABLE_NAMESPACE}"')


def _import_order(line: str) -> tuple[bool, bool, str]:
    """Return a sort key: Python's own modules come before torch's, and `import` before `from`."""
    return "torch" in line, line.startswith("from"), line


def _definitions(text: str) -> dict[str, _Definition]:
    """Return each function, class and variable at the top level of a file, by its name."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = _Definition(_lines(text, node), is_variable=False)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found[target.id] = _Definition(_lines(text, node), is_variable=True)
    return found


def _imports(text: str) -> dict[str, str]:
    """Return the import statement for each name that a file imports from outside this project."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "kernels":
                    continue
                found[alias.asname or alias.name] = ast.unparse(ast.Import([alias]))
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] != "kernels":
            for alias in node.names:
                line = ast.unparse(ast.ImportFrom(node.module, [alias], 0))
                found[alias.asname or alias.name] = line
    return found


def _names(text: str) -> set[str]:
    """Return every name in a piece of Python, except attributes such as the `b` of `a.b`."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def _lines(text: str, node: ast.stmt) -> str:
    """Return the comment directly above a statement, its decorators and its lines."""
    lines = text.splitlines()
    decorators = getattr(node, "decorator_list", [])
    first = min(part.lineno for part in [node, *decorators]) - 1
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])
