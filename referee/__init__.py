"""Grades files that define `ModelNew` against a reference: first the results, then the time.

`judge` decides in this process, `child` serves each file in a process of its own, `session` runs a
command, `report` prints and writes. `benchmark` measures the figures beside the headline.
"""

import warnings

# NumPy is not needed, and requirements.txt does not install it. Before torch is imported.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
