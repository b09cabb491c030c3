"""The views of results that README and docs/BENCHMARKS.md show: the functions of `VIEWS`.

A view takes the contents of files of docs/benchmarks/ and returns Markdown. pages.py explains which
files these are, and how a page names a view.
"""

from collections.abc import Callable, Iterator

from problems.benchmark.paths.products_table import exceptions_table, summary
from problems.benchmark.tables import TABLES, Cells
from problems.linear_yardsticks import THREE_PRODUCTS
from referee.call_names import COMPILED
from referee.report import by_role, machine_and_versions, markdown
from referee.report.tables import forward_row, interval, step_row


def heading_of(results: dict) -> str:
    """Return the line above a table: the machine, the versions, the command, commit and date."""
    day, _, _ = results["date"].partition("T")
    machine = machine_and_versions(results["environment"])
    return f"{machine}; `{results['command']}`; commit {results['commit']}, {day}"


def dtype_and_setting(dtype: str, setting: str) -> str:
    """Return a dtype with its precision setting, if it has one: "float32, highest"."""
    return f"{dtype}, {setting}" if setting else dtype


def view_heading(results: list[dict]) -> str:
    """Show the heading alone. Tables without a heading follow it on the page."""
    [only] = results
    return f"{heading_of(only)}\n"


# ------------------------------------------------------------- the views of problems.benchmark


def view_table(results: list[dict]) -> str:
    """Show the table that the command printed."""
    [only] = results
    cells = TABLES[only["benchmark"]](only["rows"])
    return f"{heading_of(only)}\n\n{markdown.table(cells)}"


def view_paths(results: list[dict]) -> str:
    """Show the summary of `paths`, and the worst choices."""
    [only] = results
    table = markdown.table(exceptions_table(only["rows"]))
    return f"{heading_of(only)}\n\n{summary(only['rows'])}\n\n{table}"


def view_range(results: list[dict]) -> str:
    """Show the smallest and the largest speedup for each M, in a row for each file of `linear`."""
    all_m = list(dict.fromkeys(row["m"] for file in results for row in file["rows"]))
    table: Cells = [["dtype (GPU)", *(f"M {m}" for m in all_m)]]
    for file in results:
        label = dtype_and_setting(file["dtype"], file["precision"])
        cells = [f"{label} ({file['environment']['device']})"]
        for m in all_m:
            ratios = [row["ratio"] for row in file["rows"] if row["m"] == m]
            cells.append(f"{min(ratios):.3f} to {max(ratios):.3f}")
        table.append(cells)
    headings = "".join(f"- {heading_of(file)}\n" for file in results)
    return f"{headings}\n{markdown.table(table)}"


# ---------------------------------------------------------------------------- the views of run.py


def view_comparison(results: list[dict]) -> str:
    """Show the table of run.py's --markdown: a row for each problem, dtype and setting."""
    [only] = results
    return f"{heading_of(only)}\n\n{markdown.table(markdown.comparison_rows(only['records']))}"


def _runs_of(results: list[dict], problem: str) -> Iterator[tuple[str, dict]]:
    """Yield each run of a problem, in the order of the file, after its dtype and setting."""
    [only] = results
    for record in only["records"]:
        if record["problem"] == problem:
            for run in record["runs"]:
                yield dtype_and_setting(record["dtype"], run["setting"]), run


def _milliseconds(row: dict) -> str:
    """Return the median of a summary's row; "not timed" if there is no row.

    A machine may have no compiler that torch.compile could use.
    """
    return f"{row['median_ms']:.3f}" if row else "not timed"


def view_forward(results: list[dict], problem: str) -> str:
    """Show a row for each run: milliseconds of the forward, and the speedup.

    The columns after eager's control are torch.compile and the yardsticks.
    """
    runs = list(_runs_of(results, problem))
    yardsticks = _yardsticks_of([run for _, run in runs])
    titles = ["forward", "this, ms", "eager, ms", "speedup", "eager, timed again"]
    table = [titles + [f"{name}, ms" for name in (COMPILED, *yardsticks)]]
    for label, run in runs:
        ours = forward_row(run, "solution")
        eager = forward_row(run, "eager")
        control = forward_row(run, "control")
        compiled = forward_row(run, "compiled")
        table.append(
            [
                label,
                _milliseconds(ours),
                _milliseconds(eager),
                interval(ours),
                interval(control),
                _milliseconds(compiled),
                *(_yardstick_cell(name, run) for name in yardsticks),
            ]
        )
    return markdown.table(table)


def _yardsticks_of(runs: list[dict]) -> list[str]:
    """Return the names of the yardsticks that any of the runs has, in order."""
    rows = [row for run in runs for row in run["forward"]["summary"]]
    return list(dict.fromkeys(row["name"] for row in rows if row["role"] == "yardstick"))


def _yardstick_cell(name: str, run: dict) -> str:
    """Return the milliseconds of a yardstick; "" if it is not one for this run."""
    rows = {row["name"]: row for row in run["forward"]["summary"]}
    is_shown = name in rows and _is_yardstick_for(name, run)
    return _milliseconds(rows[name]) if is_shown else ""


def _is_yardstick_for(name: str, run: dict) -> bool:
    """Return whether a yardstick does no more than the module does in this run.

    Three float16 products are timed in float32 at any precision, but only `highest` needs three.
    """
    return name != THREE_PRODUCTS or run["setting"] == "highest"


def view_step(results: list[dict], problem: str) -> str:
    """Show a row for each timed training step: milliseconds, speedups and bytes kept."""
    table = [
        [
            "training step",
            "this, ms",
            "eager, ms",
            "speedup",
            "speedup of its forward",
            "speedup of its backward",
            f"{COMPILED}, ms",
            "this keeps, bytes",
            "eager keeps, bytes",
        ]
    ]
    for label, run in _runs_of(results, problem):
        step = run["step"]
        if not step:
            continue
        ours = step_row(run, "solution")
        eager = step_row(run, "eager")
        compiled = step_row(run, "compiled")
        halves = [by_role(step["summary"][half], "solution") for half in ("forward", "backward")]
        kept_bytes = [step["kept_bytes"].get(row["name"], 0) for row in (ours, eager)]
        table.append(
            [
                label,
                _milliseconds(ours),
                _milliseconds(eager),
                interval(ours) + markdown.note_if_no_gain(ours["time"]),
                *(interval(row) for row in halves),
                _milliseconds(compiled),
                *(f"{count:,}" for count in kept_bytes),
            ]
        )
    return markdown.table(table)


def view_errors(results: list[dict], problem: str) -> str:
    """Show a row for each dtype and setting: relative Frobenius errors, ours and eager's."""
    [only] = results
    cells_of: dict[str, dict[str, str]] = {}  # cells by dtype and setting, and by quantity
    for record in only["records"]:
        if record["problem"] != problem:
            continue
        for row in record["errors"]:
            label = dtype_and_setting(record["dtype"], row["setting"])
            both = f"{row['solution_relative']:.2g}, {row['reference_relative']:.2g}"
            cells_of.setdefault(label, {})[row["quantity"]] = both
    quantities = list(dict.fromkeys(name for cells in cells_of.values() for name in cells))
    table = [["relF: this, eager", *quantities]]
    for label, cells in cells_of.items():
        table.append([label, *(cells.get(name, "") for name in quantities)])
    return markdown.table(table)


VIEWS: dict[str, Callable[..., str]] = {
    "heading": view_heading,
    "table": view_table,
    "paths": view_paths,
    "range": view_range,
    "comparison": view_comparison,
    "forward": view_forward,
    "step": view_step,
    "errors": view_errors,
}
