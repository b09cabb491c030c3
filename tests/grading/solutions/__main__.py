"""Grades five designs and their repairs: `python tests/grading/solutions [run.py's OPTION ...]`.

This folder has complete files that are graded. They do not import the tests.

design_*      kernels with which one might begin this project, most with a fault
repair_*      the same without the fault
honest_*      correct files of several kinds, for `test_solutions.py`
*_reference   the problems of the designs, as reference files
common.py     what designs and repairs share; they find it because it is in their folder
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[2]))

import run  # noqa: E402
from referee import console  # noqa: E402

# By reference, a pattern of its solutions: designs 1 to 4 and their repairs; design 5.
FILES = {"relu_reference.py": "[dr]*_[1-4]_*.py", "linear_reference.py": "design_5_*.py"}


def main() -> int:
    """Run one command of run.py for each reference; return the highest exit status."""
    statuses = []
    for reference, pattern in FILES.items():
        files = map(str, sorted(FOLDER.glob(pattern)))
        against = ["--reference", str(FOLDER / reference)]
        statuses.append(run.main([*against, *sys.argv[1:], "--solution", *files]))
    return max(statuses)


if __name__ == "__main__":
    sys.exit(console.run(main))
