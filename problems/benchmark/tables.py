"""Tables of results, for the output of `python -m problems.benchmark` and for docs/BENCHMARKS.md.

Each function of `TABLES` takes the rows of a file that `--json` wrote, and returns rows of cells,
of which the first has the columns' titles. Tables of this project's and eager's times have the same
columns in the same order: this project's time, eager's time, and the speedup, which is eager's time
/ this project's. The tables of `paths` and `path-grid` are in the folder paths/.
"""

from collections.abc import Callable

from problems.benchmark.paths.grid_table import path_grid_table
from problems.benchmark.paths.products_table import paths_table

Cells = list[list[str]]  # rows of cells


def linear_table(rows: list[dict]) -> Cells:
    """Return a row for each weight and a column for each M: the speedup, and our time."""
    all_m = list(dict.fromkeys(row["m"] for row in rows))
    weights = list(dict.fromkeys((row["k"], row["n"]) for row in rows))
    cells = {
        (row["k"], row["n"], row["m"]): f"{row['ratio']:.3f} ({row['ours_seconds'] * 1e6:.0f})"
        for row in rows
    }
    table = [["speedup (this, us)", *(f"M {m}" for m in all_m)]]
    for k, n in weights:
        table.append([f"K {k}, N {n}", *(cells[k, n, m] for m in all_m)])
    return table


def operands_table(rows: list[dict]) -> Cells:
    """Return a row for each kind of operands: microseconds, the speedup and the largest errors."""
    table = [
        ["operands", "this, us", "eager, us", "speedup", "error of this, u", "eager's error, u"]
    ]
    for row in rows:
        errors = [_three_digits(row[key]) for key in ("ours_error", "eager_error")]
        table.append([row["operands"], *_times(row), *errors])
    return table


def host_table(rows: list[dict]) -> Cells:
    """Return a row for each call: microseconds of the host, and the speedup."""
    table = [["call", "this, us", "eager, us", "speedup"]]
    for row in rows:
        title = f"{row['call']}, {row['part']}, {row['device']}"
        table.append([title, *_times(row)])
    return table


def import_table(rows: list[dict]) -> Cells:
    """Return one row: the seconds of an import that builds, and of one that does not."""
    [row] = rows
    return [
        ["import beyond torch", "cold, s", "warm, s"],
        ["both problems", f"{row['cold_seconds']:.2f}", f"{row['warm_seconds']:.2f}"],
    ]


def _times(row: dict) -> list[str]:
    """Return the cells of a comparison: our microseconds, eager's, and the speedup."""
    ours, eager = (_microseconds(row[key]) for key in ("ours_seconds", "eager_seconds"))
    return [ours, eager, f"{row['ratio']:.3f}"]


def _three_digits(value: float) -> str:
    """Return a number rounded to three digits, below a million without an exponent: "13000"."""
    return f"{float(f'{value:.3g}'):g}"


def _microseconds(seconds: float) -> str:
    """Return microseconds with three digits: "3.35", "24.9", "157"; all digits of whole ones."""
    time = seconds * 1e6
    if time < 10:
        return f"{time:.2f}"
    if time < 100:
        return f"{time:.1f}"
    return f"{time:.0f}"


TABLES: dict[str, Callable[[list[dict]], Cells]] = {
    "linear": linear_table,
    "operands": operands_table,
    "host": host_table,
    "import": import_table,
    "paths": paths_table,
    "path-grid": path_grid_table,
}
