"""Judges from outside whether a PyTorch module is right, and how fast it is compared with eager.

    from referee import Reference, grade

    result = grade(Reference("problem.py"), "solution.py")
    print(result)

`README.md` says what a solution can see and touch, when its clock runs, and where to add a check.
"""

import os
import warnings

# Both settings must be made before torch is imported.
# By default OpenMP's threads spin for milliseconds after they have drawn inputs. They would take
# cores from the process that is timed next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# torch warns if NumPy is missing, which the referee does not need.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

API_NAMES = ("Reference", "Result", "grade")


def __getattr__(name: str) -> object:
    """Import the API when one of its names is used: it imports torch, which takes seconds."""
    if name not in API_NAMES:
        raise AttributeError(f"module 'referee' has no attribute {name!r}")
    from referee import api

    return getattr(api, name)
