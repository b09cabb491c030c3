"""Judges from outside whether a PyTorch solution is right, and how fast it is beside eager.

    from referee import Reference, grade

    result = grade(Reference("problem.py"), "solution.py")
    print(result)

`README.md` says what a solution can see and touch, when its clock runs, and where to add a check.
"""

import os
import warnings

# Before torch is imported: OpenMP's threads of this process would spin for milliseconds after they
# have drawn inputs, on the cores of the process that is timed next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# NumPy is not needed, and requirements.txt does not install it. Before torch is imported.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

_NAMES = ("Reference", "Result", "grade")


def __getattr__(name: str) -> object:
    """Import the API when it is asked for: it takes seconds, for it imports torch."""
    if name not in _NAMES:
        raise AttributeError(f"module 'referee' has no attribute {name!r}")
    from referee import api

    return getattr(api, name)
