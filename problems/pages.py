"""The tables of docs/BENCHMARKS.md, made from the results in docs/benchmarks/*.json.

A file of results holds what one command printed, cell by cell:

    {"device": "cuda", "command": "python -m problems.benchmark host",
     "output": ["NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0",
                {"columns": ["host time", "ours ns"], "rows": [["ReLU of 1,024", "2957.06"]]}]}

A block of the page begins with a comment that names a view and one or more of these files,
`<!-- table: host.json -->`, and ends with `<!-- end -->`. `fill` puts the view's Markdown between
the two. The views are the functions of `VIEWS`.

"command" renews the file. If an older command has printed the results, which had other options,
"measured_by" is that command, and pages show it.

The columns of all views have the same names and order: this project's time, eager's time, the
speedup, which is eager's time / this project's, and then the rest.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from problems.linear_yardsticks import THREE_PRODUCTS
from referee.names import COMPILED

# A block: its comment, whose groups are the view with its arguments and the names of the files, and
# the text below the comment.
BLOCK = re.compile(r"(<!-- ([\w ]+): ([\w. -]+\.json) -->\n).*?(?=<!-- end -->)", re.DOTALL)
# The line that run.py prints above a problem's tables, for example
# "relu: cuda:0: NVIDIA H200; torch 2.11.0+cu130, CUDA 13.0; [4096, 393216] float32".
SUBJECT = re.compile(r"(?P<problem>\w+): .*?: (?P<machine>.*); (?P<shape>\[.*\]) (?P<dtype>\w+)")
# The line that run.py prints below the table of a training step.
KEPT_BYTES = re.compile(
    r"kept for backward: \S+ (?P<ours>[\d,]+) bytes, \S+ (?P<eager>[\d,]+) bytes"
)
FEWEST_CELLS = 3  # of a table's row; a line of fewer cells is text

Table = dict[str, list]  # {"columns": names, "rows": cells of each row}


def parse(printed: str) -> list[str | Table]:
    """Split printed text into lines of text and tables; blank lines are left out.

    A table begins with a line of at least three cells, which two or more blanks separate. It ends
    before a line of fewer cells, or a blank line.
    """
    output: list[str | Table] = []
    table: Table | None = None
    for line in printed.splitlines():
        text = line.strip()
        cells = re.split(r" {2,}", text)
        if len(cells) < FEWEST_CELLS:
            table = None
            if text:
                output.append(text)
        elif table is None:
            table = {"columns": cells, "rows": []}
            output.append(table)
        else:
            table["rows"].append(cells)
    return output


def dump(results: dict) -> str:
    """Return results as JSON, with one row of a table on each line."""

    def dump_part(part: str | Table) -> str:
        if isinstance(part, str):
            return json.dumps(part)
        rows = ",\n".join("    " + json.dumps(row) for row in part["rows"])
        return f'{{"columns": {json.dumps(part["columns"])}, "rows": [\n{rows}]}}'

    fields = [
        f'"{name}": {json.dumps(value)}' for name, value in results.items() if name != "output"
    ]
    parts = ",\n".join("  " + dump_part(part) for part in results["output"])
    fields.append(f'"output": [\n{parts}\n]')
    return "{" + ",\n ".join(fields) + "}\n"


def fill(page: str, folder: Path) -> str:
    """Return the page with every block made anew from the files of results in `folder`."""

    def make_block(match: re.Match) -> str:
        comment, view_and_arguments, file_names = match.groups()
        view, *arguments = view_and_arguments.split()
        results = [json.loads((folder / name).read_text()) for name in file_names.split()]
        return comment + VIEWS[view](results, *arguments)

    return BLOCK.sub(make_block, page)


def as_markdown(columns: list[str], rows: list[list[str]], heading: str = "") -> str:
    """Return a Markdown table, below a line of text if there is a heading."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
    above = [heading, ""] if heading else []
    return "\n".join([*above, *lines, ""])


def heading_of(results: dict) -> str:
    """Return the line above a table: the machine, the versions and the command."""
    command = results.get("measured_by", results["command"])
    return f"{machine_of(results)}; `{command}`"


def machine_of(results: dict) -> str:
    """Return the device, and the versions of torch and CUDA, that a command printed first."""
    first_line = results["output"][0]
    subject = SUBJECT.fullmatch(first_line)
    return subject["machine"].replace("; ", ", ") if subject else first_line


# ------------------------------------------------------------- the views of problems.benchmark


def tables_of(results: dict) -> list[Table]:
    """Return the tables that a command printed, without the text between them."""
    return [part for part in results["output"] if isinstance(part, dict)]


def view_heading(results: list[dict]) -> str:
    """Show the machine, the versions and the command. Tables without this line follow it."""
    [only] = results
    return heading_of(only) + "\n"


def view_table(results: list[dict]) -> str:
    """Show the one table that a command printed."""
    [only] = results
    [table] = tables_of(only)
    return as_markdown(table["columns"], table["rows"], heading_of(only))


def view_host(results: list[dict]) -> str:
    """Show a row for each call: the host's nanoseconds, and the speedup."""
    return _view_comparison(
        results,
        {
            "call": "host time",
            "this, ns": "ours ns",
            "eager, ns": "eager ns",
            "speedup": "eager / ours",
        },
    )


def view_operands(results: list[dict]) -> str:
    """Show a row for each kind of operands: microseconds, the speedup, and the largest errors."""
    return _view_comparison(
        results,
        {
            "operands": "operands",
            "this, us": "ours us",
            "eager, us": "eager us",
            "speedup": "ratio",
            "error of this, u": "u",
            "eager's error, u": "eager's u",
        },
    )


def _view_comparison(results: list[dict], printed_names: dict[str, str]) -> str:
    """Show the one table that a command printed, with other names and another order of its columns.

    `printed_names` has the name of each shown column, in order, and the name that was printed.
    """
    [only] = results
    [table] = tables_of(only)
    rows = [
        [cells[printed] for printed in printed_names.values()]
        for cells in _rows_by_name(table).values()
    ]
    return as_markdown([*printed_names], rows, heading_of(only))


def view_range(results: list[dict]) -> str:
    """Show the smallest and the largest speedup of each column, in a row for each file.

    A cell such as `1.318 (9)` is a speedup, followed by our time in microseconds.
    """
    rows = []
    columns: list[str] = []
    for file in results:
        [table] = tables_of(file)
        columns = ["dtype (GPU)", *table["columns"][1:]]
        device = machine_of(file).partition(", ")[0]
        dtype_and_precision = file["output"][1]
        row = [f"{dtype_and_precision} ({device})"]
        for column in range(1, len(columns)):
            ratios = [cells[column].split()[0] for cells in table["rows"]]
            row.append(f"{min(ratios, key=float)} to {max(ratios, key=float)}")
        rows.append(row)
    versions = machine_of(results[0]).partition(", ")[2]
    commands = ", ".join(f"`{file['command']}`" for file in results)
    return as_markdown(columns, rows, f"{versions}; {commands}")


# ---------------------------------------------------------------------------- the views of run.py

Row = dict[str, str]  # a row's cells by the names of their columns


@dataclass
class Setting:
    """The tables that run.py printed for a problem in one dtype and precision.

    Attributes:
        label: the dtype and the precision, for example "float32, highest".
        forward: the rows of the forward's table, by their names.
        step: the rows of the training step's table, by their names.
        errors: for each gradient, the cells of its row in the table of errors. The key "" is the
            output.
        kept_bytes: the bytes that ours and eager keep for the backward.
    """

    label: str
    forward: dict[str, Row] = field(default_factory=dict)
    step: dict[str, Row] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=dict)
    kept_bytes: tuple[str, str] = ("", "")


def settings_of(results: dict, problem: str) -> list[Setting]:
    """Collect the tables of a problem, in the order in which run.py printed them."""
    collected: dict[str, Setting] = {}  # by label
    for dtype, parts in _outputs_of(results, problem):
        last_timed: Setting | None = None
        for part in parts:
            if isinstance(part, str):
                kept = KEPT_BYTES.match(part)
                if kept and last_timed:
                    last_timed.kept_bytes = (kept["ours"], kept["eager"])
            elif part["columns"][0].startswith("error"):
                _add_errors(part["rows"], dtype, collected)
            else:
                last_timed = _add_times(part, dtype, collected)
    return list(collected.values())


def _outputs_of(results: dict, problem: str) -> list[tuple[str, list[str | Table]]]:
    """Return what run.py printed for a problem in each dtype: the dtype, and the lines and tables.

    A line that names a problem and a dtype is above the lines and tables that belong to it.
    """
    outputs: list[tuple[str, list[str | Table]]] = []
    is_of_problem = False
    for part in results["output"]:
        subject = SUBJECT.fullmatch(part) if isinstance(part, str) else None
        if subject:
            is_of_problem = subject["problem"] == problem
            if is_of_problem:
                outputs.append((subject["dtype"], []))
        elif is_of_problem:
            _, parts = outputs[-1]
            parts.append(part)
    return outputs


def _setting_of(dtype: str, precision: str, collected: dict[str, Setting]) -> Setting:
    """Return the setting of a dtype and a precision; add a new one to `collected` if needed."""
    label = f"{dtype}, {precision}" if precision else dtype
    return collected.setdefault(label, Setting(label))


def _rows_by_name(table: Table) -> dict[str, Row]:
    """Return the rows of a table by their names, which are their first cells."""
    return {row[0]: dict(zip(table["columns"], row, strict=False)) for row in table["rows"]}


def _add_times(table: Table, dtype: str, collected: dict[str, Setting]) -> Setting:
    """Add a table of times to its setting, and return the setting.

    The title of the table's first column is "forward" or "training step". If there are several
    precisions, the table's follows: "forward, highest".
    """
    title, _, precision = table["columns"][0].partition(", ")
    setting = _setting_of(dtype, precision, collected)
    if title == "forward":
        setting.forward = _rows_by_name(table)
    else:
        setting.step = _rows_by_name(table)
    return setting


def _add_errors(rows: list[list[str]], dtype: str, collected: dict[str, Setting]) -> None:
    """Add the rows of an errors' table to their settings.

    A row's name has up to three parts: "[1024, 8192], highest, gradient of x". Without the last
    part, the errors are those of the output. Without the second, there is one precision.
    """
    for name, *cells in rows:
        without_shape = re.sub(r"^\[.*?\](, )?", "", name)
        parts = without_shape.split(", ")
        gradient = ""
        if parts[-1].startswith("gradient of "):
            gradient = parts.pop().removeprefix("gradient of ")
        precision = parts[0] if parts else ""
        _setting_of(dtype, precision, collected).errors[gradient] = cells


def _names_of_modules(settings: list[Setting]) -> tuple[str, str]:
    """Return the names of this project's module and of eager: those of the first two rows."""
    ours, eager, *_ = settings[0].forward
    return ours, eager


def view_forward(results: list[dict], problem: str) -> str:
    """Show a row for each setting: milliseconds of the forward, and the speedup.

    The columns after eager's control are torch.compile and the yardsticks.
    """
    [only] = results
    settings = settings_of(only, problem)
    ours, eager = _names_of_modules(settings)
    eager_again = f"{eager} (again)"
    ratio = f"{eager} / this"
    others: list[str] = []
    for setting in settings:
        for name in setting.forward:
            if name not in (ours, eager, eager_again, *others):
                others.append(name)
    if COMPILED in others:
        others.remove(COMPILED)
        others.insert(0, COMPILED)
    rows = []
    for setting in settings:
        times = setting.forward
        row = [setting.label, times[ours]["median ms"], times[eager]["median ms"]]
        row += [times[ours][ratio], times[eager_again][ratio]]
        for name in others:
            is_shown = name in times and _is_yardstick_for(name, setting)
            row.append(times[name]["median ms"] if is_shown else "")
        rows.append(row)
    columns = ["forward", "this, ms", "eager, ms", "speedup", "eager, timed again"]
    columns += [f"{name}, ms" for name in others]
    return as_markdown(columns, rows)


def _is_yardstick_for(name: str, setting: Setting) -> bool:
    """Return whether a yardstick does no more than the module does in this setting.

    Three float16 products are timed in float32 at any precision, but only `highest` needs three.
    """
    return name != THREE_PRODUCTS or setting.label.endswith(", highest")


def view_step(results: list[dict], problem: str) -> str:
    """Show a row for each setting: a training step's milliseconds, speedups and bytes kept."""
    [only] = results
    settings = settings_of(only, problem)
    ours, eager = _names_of_modules(settings)
    ratio = f"{eager} / this"
    rows = []
    for setting in settings:
        step = setting.step
        row = [setting.label]
        row += [step[f"step, {name}"]["median ms"] for name in (ours, eager)]
        row += [step[f"{part}, {ours}"][ratio] for part in ("step", "forward", "backward")]
        compiled = step.get(f"step, {COMPILED}")
        row.append(compiled["median ms"] if compiled else "not timed")
        row += setting.kept_bytes
        rows.append(row)
    columns = ["training step", "this, ms", "eager, ms", "speedup"]
    columns += ["speedup of its forward", "speedup of its backward", f"{COMPILED}, ms"]
    columns += ["this keeps, bytes", "eager keeps, bytes"]
    return as_markdown(columns, rows)


def view_errors(results: list[dict], problem: str) -> str:
    """Show a row for each setting: relative errors in the Frobenius norm, ours and eager's.

    A row of run.py's table ends with max, mean and relative errors of ours, and then of eager's.
    """
    [only] = results
    rows = []
    gradients: dict[str, None] = {}  # the keys are in the order in which they were added
    for setting in settings_of(only, problem):
        gradients |= dict.fromkeys(setting.errors)
        row = [setting.label]
        for cells in setting.errors.values():
            ours = cells[-4]
            eager = cells[-1]
            row.append(f"{ours}, {eager}")
        rows.append(row)
    titles = [f"gradient of {name}" if name else "output" for name in gradients]
    return as_markdown(["relF: this, eager", *titles], rows)


VIEWS: dict[str, Callable[..., str]] = {
    "heading": view_heading,
    "table": view_table,
    "host": view_host,
    "operands": view_operands,
    "range": view_range,
    "forward": view_forward,
    "step": view_step,
    "errors": view_errors,
}
