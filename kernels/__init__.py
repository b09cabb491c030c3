"""Everything that is compiled, and the reading of it.

The kernels' sources lie below this folder; `build/extension.py` makes them into an extension.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from kernels.binding.linear import call_column_parallel as call_column_parallel
from kernels.binding.linear import is_column_parallel as is_column_parallel
from kernels.binding.linear import is_plain_linear as is_plain_linear
from kernels.binding.subclasses import serve_subclasses
from kernels.build.extension import load

_FOLDER = Path(__file__).resolve().parent


def read_sources() -> dict[str, str]:
    """The sources of the extension by their paths in this folder."""
    suffixes = (".h", ".cuh", ".cu", ".cpp")
    paths = sorted(path for path in _FOLDER.rglob("*") if path.suffix in suffixes)
    return {path.relative_to(_FOLDER).as_posix(): path.read_text() for path in paths}


def load_extension() -> ModuleType:
    """The extension: built when nobody has built it on this machine yet, which takes seconds."""
    extension = load(read_sources())
    serve_subclasses(extension)
    return extension


def load_reference() -> ModuleType:
    """The project's `model.py`, also where another module of that common name comes first."""
    path = _FOLDER.parent / "model.py"
    found = importlib.util.find_spec("model")
    if found is not None and found.origin is not None and Path(found.origin).resolve() == path:
        return importlib.import_module("model")
    name = "kernels.model"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
