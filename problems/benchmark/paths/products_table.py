"""Tables and the summary of the results of `paths`. measure_paths.py explains a row of results."""

from problems.benchmark.paths.kernel_paths import PATHS

# The choice is good if the chosen path takes at most this many times as long as the fastest.
GOOD_RATIO = 1.03
EXCEPTIONS = 6  # at most so many products are in the table of choices that are not good


def paths_table(rows: list[dict]) -> list[list[str]]:
    """Return a row for each product: its sizes, microseconds of each path, and the chosen path."""
    paths = [path for path in PATHS if any(path in row["seconds"] for row in rows)]
    titles = [f"{path}, us" for path in paths]
    table = [["product", "limit", "M", "N", "K", *titles, "chosen", "chosen / best"]]
    for row in rows:
        sizes = [str(row[key]) for key in ("m", "n", "k")]
        times = [_microseconds(row["seconds"].get(path)) for path in paths]
        ratio = f"{_ratio(row):.3f}"
        table.append([kind(row), row["limit"], *sizes, *times, row["chosen"], ratio])
    return table


def exceptions_table(rows: list[dict]) -> list[list[str]]:
    """Return `paths_table` of the worst choices that are not good, the worst first."""
    worst_first = sorted(_exceptions(rows), key=_ratio, reverse=True)
    return paths_table(worst_first[:EXCEPTIONS])


def summary(rows: list[dict]) -> str:
    """Return three sentences about choices: the good ones, how many others are torch, the worst."""
    exceptions = _exceptions(rows)
    good = len(rows) - len(exceptions)
    torch_choices = sum(row["chosen"] == "torch" for row in exceptions)
    worst = max(rows, key=_ratio)
    percent = f"{GOOD_RATIO - 1:.0%}"
    size = f"M {worst['m']}, N {worst['n']}, K {worst['k']}"
    return (
        f"The chosen path took at most {percent} longer than the fastest path for {good} of "
        f"{len(rows)} products. For {torch_choices} of the other {len(exceptions)}, torch was "
        f"chosen. The largest chosen / best was {_ratio(worst):.3f}, for "
        f"{kind(worst)}, {size}: {worst['chosen']} was chosen, and {_fastest(worst)} was the "
        "fastest."
    )


def kind(row: dict) -> str:
    """Return the kind of a product: "forward, float32, highest", for example."""
    return ", ".join(filter(None, [row["operation"], row["dtype"], row["precision"]]))


def _exceptions(rows: list[dict]) -> list[dict]:
    """Return the products whose chosen path is not good."""
    return [row for row in rows if _ratio(row) > GOOD_RATIO]


def _fastest(row: dict) -> str:
    """Return the path with the least time."""
    return min(row["seconds"], key=row["seconds"].get)


def _ratio(row: dict) -> float:
    """Return the chosen path's time / the fastest path's."""
    return row["seconds"][row["chosen"]] / row["seconds"][_fastest(row)]


def _microseconds(seconds: float | None) -> str:
    """Return the cell of a time; "" if the path does not compute the product."""
    return "" if seconds is None else f"{seconds * 1e6:.1f}"
