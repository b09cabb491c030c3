"""`linear`: times of LinearReluDivideNew and of eager, over numbers of rows and features."""

from dataclasses import asdict

import torch

from problems.benchmark.modules import make_modules
from problems.benchmark.rounds import compare, time_in_turn

# The rows of x by kind of device, and the features of x and of the output.
ROWS = {"cpu": (1, 16, 64), "cuda": (1, 16, 64, 128, 512, 1024, 4096, 8192)}
FEATURES = (1024, 4096, 8192)


@torch.no_grad()
def measure_linear(device: str, dtype: torch.dtype) -> list[dict]:
    """Return a row for each K, N and M: the times of both modules."""
    rows = []
    for k in FEATURES:
        for n in FEATURES:
            modules = make_modules("linear_relu_divide", device, dtype, [k, n, 2.0])
            for m in ROWS[device]:
                x = torch.empty(m, k, dtype=dtype, device=device).uniform_(-1, 1)
                compared = compare(time_in_turn(modules, x))
                rows.append({"k": k, "n": n, "m": m, **asdict(compared)})
    return rows
