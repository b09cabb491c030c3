"""`path-grid`: times of each path for the products of grid.py, with a cold and with a warm L2.

grid_rows.py explains a row of the results, and path_calls.py which call is timed.
"""

from statistics import median

import torch

from problems.benchmark.clock import CudaClock, WarmCudaClock
from problems.benchmark.paths import grid, path_calls
from problems.benchmark.paths.choice import chosen_paths
from problems.benchmark.paths.grid_rows import TimedProduct, as_row
from problems.benchmark.paths.products import Product
from problems.benchmark.rounds import time_rounds

ROUNDS = 5  # with a cold L2
# skinny is not timed for larger products, which would take it long.
MOST_MULTIPLICATIONS_OF_SKINNY = 2**30


@torch.no_grad()
def measure_path_grid(device: str = "cuda") -> list[dict]:
    """Return a row for each operation, dtype and precision of `grid.PRODUCTS`."""
    chosen = chosen_paths(grid.PRODUCTS, path_calls.current_gpu())
    clocks = {"cold": CudaClock(torch.device(device)), "warm": WarmCudaClock()}
    timed_by_kind: dict[tuple[str, str, str], list[TimedProduct]] = {}
    for product, chosen_path in zip(grid.PRODUCTS, chosen, strict=True):
        with path_calls.float32_precision(product.precision):
            microseconds = _time_product(product, device, clocks)
        kind = (product.operation, product.dtype, product.precision)
        timed = TimedProduct(product, chosen_path, microseconds)
        timed_by_kind.setdefault(kind, []).append(timed)
    return [as_row(all_timed) for all_timed in timed_by_kind.values()]


def _time_product(
    product: Product, device: str, clocks: dict[str, CudaClock | WarmCudaClock]
) -> dict[str, dict[str, float]]:
    """Return the microseconds of each path, by the state of the L2 and the path's name.

    A warm clock times several replays itself, so it times each path once.
    """
    calls, operand = path_calls.calls_by_path(product, device)
    if product.multiplications > MOST_MULTIPLICATIONS_OF_SKINNY:
        calls.pop("skinny", None)
    cold = time_rounds(calls, lambda call: clocks["cold"].time(call, operand), ROUNDS)
    return {
        "cold": {path: median(seconds) * 1e6 for path, seconds in cold.items()},
        "warm": {path: clocks["warm"].time(call, operand) * 1e6 for path, call in calls.items()},
    }
