"""Grades a replacement module against its reference: first the results, then the time.

Nothing here knows how the replacement works. `correctness` compares outputs over `cases`, `timing`
measures, `report` prints and writes. This project's replacement runs in this process, so they catch
mistakes and the usual short cuts (returned inputs, replayed results, unwritten tails, work on
another stream), not a program that sets out to rewrite the interpreter. Import the package before
the replacement: the functions that decide are bound at import. `solutions` grades files of others,
in processes of their own that `remote` starts and `child` serves. `records` is what `report`
writes. `benchmark` measures the figures beside the headline.
"""

import warnings

# NumPy is not needed, and requirements.txt does not install it. Before torch is imported.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
