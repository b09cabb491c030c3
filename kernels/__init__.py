"""Everything that is compiled, and the reading of it.

A problem has a folder of sources and of the Python that its tensors need; what several use lies
beside. `build/` makes an extension of them. A bundle has functions of its own in place of these.
"""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent


def problems() -> list[str]:
    """The folders of the problems: those with operators for torch."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/*_op.cpp"))


def read_sources(problem: str) -> dict[str, str]:
    """The sources of a problem's extension by their paths in this folder.

    All that lies in its folder, which has the first word of its name, is compiled, and each `.cpp`
    beside a header of its name; what they `#include "..."` comes along.

    Raises:
        ValueError: there is no such problem.
    """
    folder = problem.split("_")[0]
    if folder not in problems():
        raise ValueError(f"expected a problem among {', '.join(problems())}, got {problem!r}")
    wanted = [path for path in (_FOLDER / folder).rglob("*") if path.suffix in (".cpp", ".cu")]
    sources: dict[str, str] = {}
    for path in wanted:  # which grows
        name = path.relative_to(_FOLDER).as_posix()
        if name not in sources:
            sources[name] = path.read_text(encoding="utf-8")
            includes = re.findall(r'^#include "(.+)"', sources[name], re.MULTILINE)
            found = [path.with_suffix(".cpp"), *(_FOLDER / include for include in includes)]
            wanted += filter(Path.exists, found)
    return dict(sorted(sources.items()))


def build_together(*names: str) -> None:
    """Builds and loads the extensions of several problems at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    from kernels.build.extension import load

    def load_one(name: str) -> None:
        tools = "torch.utils.cpp_extension"
        load(name, read_sources(name), lambda **a: importlib.import_module(tools).load_inline(**a))

    flags = sys.getdlopenflags()  # which torch changes while it loads a library
    with ThreadPoolExecutor() as pool:
        list(pool.map(load_one, names))
    sys.setdlopenflags(flags)


def load_reference() -> ModuleType:
    """The project's `model.py`, also where another module of that common name comes first."""
    path, spec = _FOLDER.parent / "model.py", importlib.util.find_spec("model")
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != path:
        spec = importlib.util.spec_from_file_location("kernels.model", path)
    if spec.name not in sys.modules:
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    return sys.modules[spec.name]
