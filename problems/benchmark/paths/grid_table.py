"""The table of the results of `path-grid`: how much time the choice of a path saves over torch."""

from statistics import geometric_mean

from problems.benchmark.paths.grid_rows import STATES, TimedProduct, read_row
from problems.benchmark.paths.products import Product
from problems.benchmark.paths.products_table import kind

# A choice loses if its path takes more than this many times as long as torch.
LOSING_RATIO = 1.03


def path_grid_table(rows: list[dict]) -> list[list[str]]:
    """Return a row for each operation, dtype, precision and alignment of the weight's rows.

    Products whose chosen path was not timed are left out.
    """
    table = [["product", "rows of the weight", "products"]]
    for state in STATES:
        table[0] += [f"{title}, {state}" for title in ("torch / chosen", "torch / best", "slower")]
    for row in rows:
        groups: dict[str, list[TimedProduct]] = {}
        for timed in read_row(row):
            if timed.chosen in timed.microseconds["cold"]:
                groups.setdefault(_rows_of_weight(timed.product), []).append(timed)
        for rows_of_weight, group in groups.items():
            cells = [kind(row), rows_of_weight, str(len(group))]
            for state in STATES:
                cells += _cells_of_state(group, state)
            table.append(cells)
    return table


def _rows_of_weight(product: Product) -> str:
    """Return the cell that says if the rows of the weight are aligned; "" for a gradient."""
    if not product.is_forward:
        return ""
    return "aligned" if product.weight_has_vector_rows else "not aligned"


def _cells_of_state(group: list[TimedProduct], state: str) -> list[str]:
    """Return three cells for a state of the L2.

    They are the geometric means of torch's time / the chosen path's and of torch's time / the
    fastest path's, and the number of products for which the choice loses.
    """
    torch_to_chosen = []
    torch_to_best = []
    losses = 0
    for timed in group:
        times = timed.microseconds[state]
        chosen_time = times[timed.chosen]
        torch_to_chosen.append(times["torch"] / chosen_time)
        torch_to_best.append(times["torch"] / min(times.values()))
        if chosen_time > LOSING_RATIO * times["torch"]:
            losses += 1
    means = [f"{geometric_mean(ratios):.3f}" for ratios in (torch_to_chosen, torch_to_best)]
    return [*means, str(losses)]
