"""Pairs solutions with references by their names."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

# KernelBench's names of a problem ("level1/19_ReLU.py") and of a solution for it
# ("level_1_problem_19_sample_0_kernel.py"). The groups are the level and the number.
PROBLEM_NAME = re.compile(r"level_?(\d+)/(\d+)_[^/]*\.py$")
SAMPLE_NAME = re.compile(r"level_?(\d+)_problem_(\d+)_")


def pair(references: Path, solutions: list[Path]) -> tuple[dict[Path, list[Path]], list[Path]]:
    """Pair solutions with references; return each reference's solutions, and the unpaired ones.

    The first of these rules that names exactly one reference decides:

        rule                              solution                               reference
        the same path in both folders     level1/19_ReLU.py                      level1/19_ReLU.py
        the same file name                other/19_ReLU.py                       level1/19_ReLU.py
        KernelBench's level and number    level_1_problem_19_sample_0_kernel.py  level1/19_ReLU.py

    Args:
        references: a folder.
        solutions: files and folders. A file that is named twice is graded once.
    """
    index = _ReferenceIndex(references)
    paired: dict[Path, list[Path]] = {}
    unpaired = []
    for relative_path, path in _solution_files(solutions):
        reference = index.find(relative_path)
        if reference is None:
            unpaired.append(path)
        else:
            paired.setdefault(reference, []).append(path)
    return paired, unpaired


class _ReferenceIndex:
    """Finds the reference of a solution by the solution's name, see `pair`.

    Args:
        folder: of the references.
    """

    def __init__(self, folder: Path) -> None:
        self._by_path: dict[str, Path] = {}
        self._by_stem: dict[str, list[Path]] = {}
        self._by_number: dict[tuple, list[Path]] = {}  # KernelBench's level and number
        for path in sorted(folder.rglob("*.py")):
            if not path.is_file():
                continue
            self._by_path[path.relative_to(folder).as_posix()] = path
            self._by_stem.setdefault(path.stem, []).append(path)
            # The folder may be ".": the name of the level is then only in the resolved path.
            if match := PROBLEM_NAME.search(path.resolve().as_posix()):
                self._by_number.setdefault(match.groups(), []).append(path)

    def find(self, relative_path: Path) -> Path | None:
        """Return the reference of a solution; None if there is none, or more than one.

        Args:
            relative_path: of the solution in its folder.
        """
        if reference := self._by_path.get(relative_path.as_posix()):
            return reference
        candidates = self._by_stem.get(relative_path.stem, [])
        if len(candidates) == 1:
            return candidates[0]
        if match := SAMPLE_NAME.search(relative_path.name):
            candidates = self._by_number.get(match.groups(), [])
            if len(candidates) == 1:
                return candidates[0]
        return None


def _solution_files(solutions: list[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield the path of each solution in its folder, and its whole path; each file once."""
    seen = set()
    for path in solutions:
        if path.is_dir():
            folder = path
            files_inside = sorted(file for file in path.rglob("*.py") if file.is_file())
        else:
            folder = path.parent
            files_inside = [path]
        for file in files_inside:
            if absolute(file) not in seen:
                seen.add(absolute(file))
                yield file.relative_to(folder), file


def absolute(path: Path | str) -> str:
    """Return the absolute path without "..", by which files are compared; links are kept."""
    return os.path.abspath(path)  # noqa: PTH100, Path.absolute leaves "..", resolve follows links
