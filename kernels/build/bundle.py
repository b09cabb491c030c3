"""One self-contained file a problem, for harnesses that take a single source text.

The file holds the sources of the kernels, the text that builds them and the replacement class, and
imports nothing of this project. It defines none of the names that a problem file uses.
"""

import ast
from pathlib import Path

from kernels import read_sources

_KERNELS = Path(__file__).resolve().parent.parent
# The class of model_new.py behind each problem.
_CLASSES = {"relu": "ModelNew", "linear_relu_divide": "LinearReluDivideNew"}
# The Python that the classes and the build use.
_PYTHON = (
    "build/toolchain.py",
    "build/cache.py",
    "build/extension.py",
    "binding/subclasses.py",
    "binding/linear.py",
)

_HEADER = '''\
"""{doc}

One file for harnesses that take a single source text, made by
`python run.py {problem} --bundle`. The kernels are compiled when this text is executed. Needs torch
2.9 or newer, ninja, a C++ compiler, and for GPUs the CUDA toolkit of torch's version.
"""
'''

_LOADING = """\
_extension = load(SOURCES)
serve_subclasses(_extension)
"""


def bundle(problem: str) -> str:
    """The solution of a problem as one text; the same text every time.

    Raises:
        ValueError: there is no such problem.
    """
    if problem not in _CLASSES:
        raise ValueError(f"expected a problem among {', '.join(_CLASSES)}, got {problem!r}")
    solution = _class_source(_CLASSES[problem])
    doc = ast.get_docstring(ast.parse(solution).body[0]).splitlines()[0]
    parts = [
        _HEADER.format(doc=doc, problem=problem),
        *(_body((_KERNELS / name).read_text()) for name in _PYTHON),
        "# The sources by file name.\nSOURCES = {}\n" + "\n".join(_sources()),
        _LOADING + _shortcuts(),
        solution,
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _class_source(name: str) -> str:
    """The class `name` of model_new.py as `ModelNew`, with no base of this project.

    Where it leaves its construction to its reference, it gets the reference's.
    """
    lines, node = _find("model_new.py", name)
    docstring, *methods = node.body
    body = [lines[docstring.lineno - 1 : docstring.end_lineno]]
    if all(method.name != "__init__" for method in methods):
        reference_lines, reference = _find("model.py", node.bases[0].attr)
        (construction,) = [n for n in reference.body if getattr(n, "name", None) == "__init__"]
        body.append(reference_lines[construction.lineno - 1 : construction.end_lineno])
    body.append(lines[methods[0].lineno - 1 : node.end_lineno])
    return "class ModelNew(torch.nn.Module):\n" + "\n\n".join("\n".join(part) for part in body)


def _find(file: str, name: str) -> tuple[list[str], ast.ClassDef]:
    """The lines of a file of the project, and the class of that name in it."""
    text = (_KERNELS.parent / file).read_text()
    (node,) = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name]
    return text.splitlines(), node


def _shortcuts() -> str:
    """The names that model_new.py gives to parts of the extension."""
    text = (_KERNELS.parent / "model_new.py").read_text()
    assignments = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    lines = [ast.get_source_segment(text, node) for node in assignments]
    return "\n".join(line for line in lines if "kernels." not in line)


def _body(text: str) -> str:
    """A file without its docstring, and without what it imports of this project."""
    docstring, *nodes = ast.parse(text).body
    lines = text.splitlines()
    ours = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module.startswith("kernels.")]
    for node in (*reversed(ours), docstring):
        del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines)


def _sources() -> list[str]:
    return [f'SOURCES["{name}"] = r"""{text}"""\n' for name, text in read_sources().items()]
