"""One file for harnesses that take a single source text, as people write them for KernelBench.

The file has the problem's sources as two strings, one `load_inline` call, `ModelNew`, and the
functions that `ModelNew` calls. They are copied from this project: C++ includes are replaced by
what they include, and of the Python only what the class needs is taken.
"""

import ast
import hashlib
import importlib.resources
import re
from dataclasses import dataclass

from kernels import STABLE_NAMESPACE, read_sources
from kernels.build.toolchain import CUDA_FLAGS, CXX_FLAGS

_TEMPLATE = '''\
"""{title}

Written by `python run.py {problem} --bundle FILE`. The kernels are compiled when this file is
executed. It needs torch 2.9 or newer, ninja, a C++ compiler, and for GPUs the CUDA toolkit of
torch's version.
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
if torch.cuda.is_available():
    cxx_flags += ["-DKERNELS_WITH_CUDA"]
    for gpu in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(gpu)
        # Hopper's tensor-core instructions are in code for sm_90a alone.
        arch = "90a" if (major, minor) == (9, 0) else f"{{major}}{{minor}}"
        cuda_flags += [f"-gencode=arch=compute_{{arch}},code=sm_{{arch}}"]

load_inline(
    name=NAME,
    cpp_sources=CPP_SOURCE,
    cuda_sources=CUDA_SOURCE if torch.cuda.is_available() else None,
    extra_cflags=[*cxx_flags, f"-DKERNELS_NAMESPACE={{NAME}}"],
    extra_cuda_cflags=cuda_flags,
    extra_ldflags=["-fopenmp"],
    no_implicit_headers=True,
    is_python_module=False,
)
{operators} = getattr(torch.ops, NAME)


{definitions}


{module}
'''


@dataclass(frozen=True)
class _Problem:
    """Where a problem's Python is.

    Attributes:
        title: the first line of the bundle.
        reference: the class in `model.py`.
        replacement: the class in `model_new.py`.
        operators: the variable in `model_new.py` that holds the operators.
        modules: the files of this package that the class calls.
    """

    title: str
    reference: str
    replacement: str
    operators: str
    modules: list[str]


_PROBLEMS = {
    "relu": _Problem(
        title="ModelNew for KernelBench level 1 #19: ReLU.",
        reference="Model",
        replacement="ModelNew",
        operators="relu_ops",
        modules=["watchers.py", "relu/dispatch.py"],
    ),
    "linear_relu_divide": _Problem(
        title="ModelNew for KernelBench level 2 #63: Linear -> ReLU -> divide.",
        reference="LinearReluDivide",
        replacement="LinearReluDivideNew",
        operators="linear_ops",
        modules=["watchers.py", "linear/dispatch.py"],
    ),
}


def bundle(problem: str) -> str:
    """Return the solution of a problem as one text; the same text every time.

    Args:
        problem: `relu` or `linear_relu_divide`.

    Raises:
        ValueError: there is no such problem.
    """
    if problem not in _PROBLEMS:
        raise ValueError(f"expected a problem among {', '.join(_PROBLEMS)}, got {problem!r}")
    where = _PROBLEMS[problem]
    sources = read_sources(problem)
    module = _replacement_class(where)
    files = [_read(f"kernels/{path}") for path in where.modules] + [_read("model_new.py")]
    imports, definitions = _needed_by(module, files, provided={where.operators, "ModelNew"})
    texts = {
        "cpp_source": _join(sources, ".cpp"),
        "cuda_source": _join(sources, ".cu"),
        "imports": imports,
        "definitions": definitions,
        "module": module,
    }
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    return _TEMPLATE.format(
        title=where.title,
        problem=problem,
        name=f"{STABLE_NAMESPACE}_{digest}",
        cxx_flags=_list(CXX_FLAGS),
        cuda_flags=_list(CUDA_FLAGS),
        operators=where.operators,
        **texts,
    )


def _list(items: list[str]) -> str:
    """Return the literal of a list, an item a line."""
    return "[\n" + "".join(f'    "{item}",\n' for item in items) + "]"


def _read(path: str) -> str:
    """Read a file of the project."""
    return importlib.resources.files("kernels").parent.joinpath(path).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------- C++


def _join(sources: dict[str, str], suffix: str) -> str:
    """Return the sources with this suffix as one text, in which each header is once."""
    included: set[str] = set()
    parts = [_expand(path, sources, included) for path in sources if path.endswith(suffix)]
    return "\n".join(parts)


def _expand(path: str, sources: dict[str, str], included: set[str]) -> str:
    """Return a file with its `#include "..."` lines replaced by what they name, unless it is there.

    Args:
        path: the file.
        sources: the text of every file.
        included: the files that the text has already; grows.
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


def _replacement_class(where: _Problem) -> str:
    """Return the text of the class in `model_new.py`, as `ModelNew(nn.Module)`.

    The reference's constructor becomes its own, unless it has one.
    """
    text = _definitions(_read("model_new.py"))[where.replacement]
    text = text.replace(f"(reference.{where.reference})", "(nn.Module)")
    text = re.sub(rf"\b{where.replacement}\b", "ModelNew", text)
    reference = _read("model.py")
    constructor = _method(reference, where.reference, "__init__")
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


def _needed_by(module: str, files: list[str], provided: set[str]) -> tuple[str, str]:
    """Return the imports and the definitions in these files that a class needs, directly or not.

    Args:
        module: the text of the class.
        files: the texts of Python files, in the order in which definitions are to come.
        provided: names that are defined elsewhere.
    """
    definitions: dict[str, str] = {}
    imports: dict[str, str] = {"load_inline": "from torch.utils.cpp_extension import load_inline"}
    for text in files:
        definitions |= _definitions(text)
        imports |= _imports(text)
    needed = {"load_inline", "nn", "torch"}
    waiting = [module]
    while waiting:
        for name in _names(waiting.pop()) - needed - provided:
            if name in definitions:
                waiting.append(definitions[name])
            if name in definitions or name in imports:
                needed.add(name)
    import_lines = sorted({imports[name] for name in needed if name in imports}, key=_import_order)
    bodies = [_body(text, needed) for text in files]
    body = "\n\n\n".join(body for body in bodies if body)
    body = body.replace("kernels.STABLE_NAMESPACE", f'"{STABLE_NAMESPACE}"')
    return "\n".join(import_lines), body


def _body(text: str, needed: set[str]) -> str:
    """Return the needed definitions of a file: the variables, then the functions."""
    variables, functions = [], []
    for name, definition in _definitions(text).items():
        if name in needed:
            is_block = definition.rpartition("\n")[2].startswith(" ")
            (functions if is_block else variables).append(definition)
    if variables:
        functions.insert(0, "\n".join(variables))
    return "\n\n\n".join(functions)


def _import_order(line: str) -> tuple[bool, bool, str]:
    """Sort Python's own modules before torch's, and `import` before `from`."""
    return "torch" in line, line.startswith("from"), line


def _definitions(text: str) -> dict[str, str]:
    """Return the text of each function, class and variable at the top of a file, by its name."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = _lines(text, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found[target.id] = _lines(text, node)
    return found


def _imports(text: str) -> dict[str, str]:
    """Return the import statement of each name that a file imports from outside this project."""
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
    """Return every name that a piece of Python reads."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def _lines(text: str, node: ast.stmt) -> str:
    """Return the lines of a statement, with the comment directly above it."""
    lines = text.splitlines()
    first = node.lineno - 1
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])
