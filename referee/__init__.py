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
