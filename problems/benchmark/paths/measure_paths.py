"""`paths`: times of each path that can compute a product, for the products of products.py.

A row of the results has the attributes of its `Product`, and:

seconds   the median seconds of each path, by its name
chosen    the path that choose_path takes for the product on this GPU

path_calls.py explains which call is timed.
"""

from dataclasses import asdict
from statistics import median

import torch

from problems.benchmark.paths import path_calls, products
from problems.benchmark.paths.choice import chosen_paths
from problems.benchmark.rounds import time_in_turn


@torch.no_grad()
def measure_paths(device: str = "cuda") -> list[dict]:
    """Return a row for each product of `products.PRODUCTS`."""
    chosen = chosen_paths(products.PRODUCTS, path_calls.current_gpu())
    rows = []
    for product, chosen_path in zip(products.PRODUCTS, chosen, strict=True):
        calls, operand = path_calls.calls_by_path(product, device)
        with path_calls.float32_precision(product.precision):
            times = time_in_turn(calls, operand)
        seconds = {path: median(of_path) for path, of_path in times.items()}
        rows.append({**asdict(product), "seconds": seconds, "chosen": chosen_path})
    return rows
