"""`import`: seconds to import model_new.py, without the seconds for torch."""

import os
import subprocess
import sys
import tempfile
from statistics import median

WARM_IMPORTS = 3


def measure_import() -> list[dict]:
    """Return one row: the seconds of an import that builds, and the median of three later ones.

    Each import is in a process of its own.
    """
    code = (
        "import torch, time; start = time.perf_counter(); import model_new; "
        "print(time.perf_counter() - start)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment_with_folder = os.environ | {"TORCH_EXTENSIONS_DIR": folder}
        seconds = []
        for _ in range(1 + WARM_IMPORTS):
            printed = subprocess.check_output(
                [sys.executable, "-c", code], env=environment_with_folder
            )
            seconds.append(float(printed))
    return [{"cold_seconds": seconds[0], "warm_seconds": median(seconds[1:])}]
