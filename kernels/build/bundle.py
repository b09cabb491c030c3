"""One file a problem, for harnesses that take a single text: sources and Python as they are."""

import hashlib
import re
from pathlib import Path

from kernels import load_reference, read_sources

PROJECT = Path(__file__).resolve().parents[2]
TEMPLATE = '''\
"""One file for harnesses that take a single source text, by `python run.py {problem} --bundle`.

The kernels are compiled when this text is executed. Needs torch 2.9 or newer, ninja, a C++
compiler, and for GPUs the CUDA toolkit of torch's version.
"""

import importlib.abc
import importlib.util
import sys

_SOURCES, _MODULES = {{}}, {{}}
{files}

class _Importer(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports the modules of this text, under names that no other package has."""

    modules = _MODULES

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name in self.modules else None

    def is_package(self, name):
        return any(other.startswith(name + ".") for other in self.modules)

    def get_source(self, name):
        return self.modules[name]


if "{package}" not in sys.modules:
    sys.meta_path.insert(0, _Importer())
    _package = importlib.import_module("{package}")
    _package.problems = lambda: ["{folder}"]
    _package.read_sources = lambda problem, sources=_SOURCES: sources
    _package.load_reference = lambda: importlib.import_module("{package}.model")
ModelNew = importlib.import_module("{package}.model_new").{new}
'''


def bundle(problem: str) -> str:
    """The solution of a problem as one text; the same text every time."""
    problems = load_reference().PROBLEMS
    if problem not in problems:
        raise ValueError(f"expected a problem among {', '.join(problems)}, got {problem!r}")
    sources, modules = read_sources(problem), {"": ""}
    files = (PROJECT / "model.py", PROJECT / "model_new.py", *PROJECT.glob("kernels/*/**/*.py"))
    for path in sorted(files):
        name = path.relative_to(PROJECT).as_posix().removesuffix(".py").removesuffix("/__init__")
        modules["." + name.removeprefix("kernels/").replace("/", ".")] = path.read_text()
    del modules[".build.bundle"]
    package = f"kernels_{hashlib.sha256(repr([sources, modules]).encode()).hexdigest()[:12]}"
    texts = [f'_SOURCES["{name}"] = {quote(text)}\n' for name, text in sources.items()]
    for name, text in modules.items():
        text = re.sub(r"^( *)import kernels$", rf"\1import {package} as kernels", text, flags=re.M)
        text = re.sub(r"^( *from) kernels\b", rf"\1 {package}", text, flags=re.M)
        texts.append(f'_MODULES["{package}{name}"] = {quote(text)}\n')
    names = {"folder": problem.split("_")[0], "new": problems[problem].reference.__name__ + "New"}
    return TEMPLATE.format(problem=problem, files="".join(texts), package=package, **names)


def quote(text: str) -> str:
    """A literal of the text, with its lines as they are where that can be."""
    quotes = "'''" if '"""' in text else '"""'
    return repr(text) if quotes in text else f"r{quotes}{text}{quotes}"
