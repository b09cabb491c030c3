"""Everything that is compiled, and the reading of it.

Each problem has a folder of sources, and of the Python that its tensors need; `binding/`,
`common/`, `cpu/` and `launchers.h` serve them all. `build/extension.py` makes sources into an
extension.
"""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent
_SHARED = ("binding", "common", "cpu")


def read_sources(problem: str | None = None) -> dict[str, str]:
    """The sources of the extension by their paths in this folder.

    Args:
        problem: the folder of one problem, as `relu`: the files to compile that lie there or serve
            all, and what they `#include "..."` or say that it `// needs "..."`. By default, all.

    Raises:
        ValueError: there is no such problem.
    """
    suffixes = (".h", ".cuh", ".cu", ".cpp")
    paths = sorted(path for path in _FOLDER.rglob("*") if path.suffix in suffixes)
    sources = {path.relative_to(_FOLDER).as_posix(): path.read_text() for path in paths}
    if problem is None:
        return sources
    problems = {name.split("/")[0] for name in sources if "/" in name} - {*_SHARED}
    if problem not in problems:
        raise ValueError(f"expected a problem among {', '.join(sorted(problems))}, got {problem!r}")
    folders = (problem, *_SHARED)
    wanted = [n for n in sources if n.endswith((".cu", ".cpp")) and n.split("/")[0] in folders]
    for name in wanted:  # which grows
        included = re.findall(r'^(?:#include|// needs) "(.+)"$', sources[name], re.MULTILINE)
        wanted.extend(other for other in included if other not in wanted)
    return {name: sources[name] for name in sorted(wanted)}


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
