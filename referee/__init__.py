"""Grades files that define `ModelNew` against a reference: first the results, then the time.

Nothing here knows how the replacement works. `session` does what run.py is asked for. `judge`
decides, in this process, on files that processes of `child` run; `relu` and `linear_relu_divide`
have the cases of this project's problems. `records` is what was measured, `report` makes tables and
pictures of it. `benchmark` measures the figures beside the headline.
"""

import warnings

# NumPy is not needed, and requirements.txt does not install it. Before torch is imported.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
