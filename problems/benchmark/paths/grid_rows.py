"""Rows of the results of `path-grid`.

A row has all products of an operation in a dtype and a precision. These may be more than a
thousand, so each product is one short line of text. A row's keys:

operation, dtype, precision   as `Product` of products.py explains them
columns                       the titles of the columns of `products`
products                      a line for each product

Example of the last two:

    "columns": "M N K chosen sm90_cold_us torch_cold_us sm90_warm_us torch_warm_us"
    "products": ["512 1024 256 torch 18.34 17.12 15.20 14.81", ...]

`chosen` is the path that choose_path takes. The columns after it are the microseconds of each path
with a cold and with a warm L2. "-" means that this path was not timed for this product.
"""

from dataclasses import dataclass

from problems.benchmark.paths.kernel_paths import PATHS
from problems.benchmark.paths.products import Product

STATES = ("cold", "warm")  # of the L2
SIZES = ["M", "N", "K"]
NOT_TIMED = "-"


@dataclass(frozen=True)
class TimedProduct:
    """The times of a product.

    Attributes:
        product: its operation, dtype, precision and sizes.
        chosen: the path that choose_path takes for it.
        microseconds: of each path that was timed, by the state of the L2 and the path's name:
            microseconds["cold"]["torch"], for example.
    """

    product: Product
    chosen: str
    microseconds: dict[str, dict[str, float]]


def as_row(all_timed: list[TimedProduct]) -> dict:
    """Return the row of one or more products of the same operation, dtype and precision."""
    first = all_timed[0].product
    paths = [
        path for path in PATHS if any(path in timed.microseconds["cold"] for timed in all_timed)
    ]
    times = [_title(path, state) for state in STATES for path in paths]
    return {
        "operation": first.operation,
        "dtype": first.dtype,
        "precision": first.precision,
        "columns": " ".join([*SIZES, "chosen", *times]),
        "products": [_as_line(timed, paths) for timed in all_timed],
    }


def read_row(row: dict) -> list[TimedProduct]:
    """Return the products of a row, the inverse of `as_row`."""
    titles = row["columns"].split()
    found = []
    for line in row["products"]:
        cells = dict(zip(titles, line.split(), strict=True))
        sizes = [int(cells[title]) for title in SIZES]
        product = Product("", row["operation"], row["dtype"], row["precision"], *sizes)
        microseconds = {state: _read_times(cells, state) for state in STATES}
        found.append(TimedProduct(product, cells["chosen"], microseconds))
    return found


def _title(path: str, state: str) -> str:
    """Return the title of a column of times: "torch_cold_us", for example."""
    return f"{path}_{state}_us"


def _as_line(timed: TimedProduct, paths: list[str]) -> str:
    """Return the line of a product."""
    product = timed.product
    cells = [str(product.m), str(product.n), str(product.k), timed.chosen]
    for state in STATES:
        for path in paths:
            time = timed.microseconds[state].get(path)
            cells.append(NOT_TIMED if time is None else f"{time:.2f}")
    return " ".join(cells)


def _read_times(cells: dict[str, str], state: str) -> dict[str, float]:
    """Return the microseconds of each timed path, from the cells of a line by their titles."""
    times = {path: cells.get(_title(path, state), NOT_TIMED) for path in PATHS}
    return {path: float(time) for path, time in times.items() if time != NOT_TIMED}
