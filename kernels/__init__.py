"""Everything that is compiled, and the reading of it.

The kernels' sources lie beside this file; `build.py` makes them into an extension.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from kernels.build import load
from kernels.linear import call_column_parallel as call_column_parallel
from kernels.linear import is_column_parallel as is_column_parallel
from kernels.linear import is_plain_linear as is_plain_linear
from kernels.subclasses import serve_subclasses

_FOLDER = Path(__file__).resolve().parent


def read_sources() -> dict[str, str]:
    """The sources of the extension by file name."""
    suffixes = (".h", ".cuh", ".cu", ".cpp")
    paths = sorted(path for path in _FOLDER.iterdir() if path.suffix in suffixes)
    return {path.name: path.read_text() for path in paths}


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
