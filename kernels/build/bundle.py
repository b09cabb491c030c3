"""One self-contained file a problem, for harnesses that take a single source text.

The file holds the problem's sources, the text that builds them and the replacement class, and
imports nothing of this project. It defines none of the names that a problem file uses.

Markers in the files, each a line of its own, say which lines it takes:

    # bundle: skip ... # bundle: end                    lines that no bundle takes
    # bundle: begin PROBLEM, from FOLDER ... # bundle: end    those of one problem's alone (in
                                                        model.py without the folder)
    # bundle: class ...                                 takes the place of the line after it
    # bundle: the same of model.py                      what model.py has marked for the problem
"""

import re
from pathlib import Path

from kernels import read_sources

_PROJECT = Path(__file__).resolve().parent.parent.parent
_SHARED = (
    "kernels/build/toolchain.py",
    "kernels/build/cache.py",
    "kernels/build/extension.py",
    "kernels/binding/subclasses.py",
)

_HEADER = '''\
"""One file for harnesses that take a single source text, made by `python run.py {} --bundle`.

The kernels are compiled when this text is executed. Needs torch 2.9 or newer, ninja, a C++
compiler, and for GPUs the CUDA toolkit of torch's version.
"""'''


def bundle(problem: str) -> str:
    """The solution of a problem as one text; the same text every time.

    Raises:
        ValueError: there is no such problem.
    """
    solution = (_PROJECT / "model_new.py").read_text()
    folders = dict(re.findall(r"^# bundle: begin (\w+), from ([\w/]+)$", solution, re.MULTILINE))
    if problem not in folders:
        raise ValueError(f"expected a problem among {', '.join(folders)}, got {problem!r}")
    folder = _PROJECT / folders[problem]
    own = (path.relative_to(_PROJECT).as_posix() for path in sorted(folder.glob("[!_]*.py")))
    sources = read_sources(folder.name).items()
    parts = [
        _HEADER.format(problem),
        *(_taken(file, problem) for file in (*_SHARED, *own)),
        "# The sources by file name.\nSOURCES = {}",
        *(f'SOURCES["{name}"] = r"""{text}"""' for name, text in sources),
        _taken("model_new.py", problem),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _taken(file: str, problem: str) -> str:
    """The lines of a file that the bundle of a problem takes, without the file's docstring."""
    text = re.sub(r'\A""".*?"""\n', "", (_PROJECT / file).read_text(), flags=re.DOTALL)
    lines, takes, replacement = [], True, None
    for line in text.splitlines():
        marker = re.fullmatch(r" *# bundle: (.*)", line)
        if marker is None:
            if takes:
                lines.append(line if replacement is None else replacement)
            replacement = None
        elif marker[1].startswith(("skip", "begin ")):
            takes = bool(re.match(rf"begin {problem}\b", marker[1]))
        elif marker[1] == "end":
            takes = True
        elif marker[1].startswith("class "):
            replacement = marker[1]
        elif marker[1] == "the same of model.py":
            if takes:
                lines.append(_marked("model.py", problem))
        else:
            raise ValueError(f"{file} has a marker that no bundle knows: {line}")
    return "\n".join(lines)


def _marked(file: str, problem: str) -> str:
    """The lines of a file between the markers of a problem."""
    pattern = rf" *# bundle: begin {problem}\n(.*?) *# bundle: end\n"
    return re.search(pattern, (_PROJECT / file).read_text(), re.DOTALL)[1].rstrip("\n") + "\n"
