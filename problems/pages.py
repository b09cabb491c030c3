"""The tables of docs/BENCHMARKS.md, made from the results in docs/benchmarks/*.json.

A file of results holds what one command printed, cell by cell:

    {"device": "cuda", "command": "python -m problems.benchmark host",
     "output": ["NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0",
                {"columns": ["host time", "ours ns"], "rows": [["ReLU of 1,024", "2957.06"]]}]}

A block of the page begins with a comment that names a view and one or more of these files,
`<!-- table: host.json -->`, and ends with `<!-- end -->`. `fill` puts the view's Markdown between
the two. The views are the functions of `VIEWS`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = re.compile(r"(<!-- ([\w ]+): ([\w. -]+\.json) -->\n).*?(?=<!-- end -->)", re.DOTALL)
SUBJECT = re.compile(r"(\w+): .*?: (.*); (\[.*\]) (\w+)")  # run.py's line above its tables
KEPT = re.compile(r"kept for backward: \S+ ([\d,]+) bytes, \S+ ([\d,]+) bytes")
FEWEST_CELLS = 3  # of a table's row; other lines are text

Table = dict[str, list]  # {"columns": names, "rows": cells of each row}


def parse(printed: str) -> list[str | Table]:
    """Split printed text into lines of text and tables; blank lines are left out.

    A table begins with a line of at least three cells, which two or more blanks separate. It ends
    before a line of fewer cells, or a blank line.
    """
    output: list[str | Table] = []
    table: Table | None = None
    for line in printed.splitlines():
        cells = re.split(r" {2,}", line.strip())
        if len(cells) < FEWEST_CELLS:
            table = None
            if line.strip():
                output.append(line.strip())
        elif table is None:
            table = {"columns": cells, "rows": []}
            output.append(table)
        else:
            table["rows"].append(cells)
    return output


def dump(results: dict) -> str:
    """Return results as JSON, with one row of a table on each line."""

    def item(part: str | Table) -> str:
        if isinstance(part, str):
            return json.dumps(part)
        rows = ",\n".join("    " + json.dumps(row) for row in part["rows"])
        return f'{{"columns": {json.dumps(part["columns"])}, "rows": [\n{rows}]}}'

    parts = ",\n".join("  " + item(part) for part in results["output"])
    device, command = (json.dumps(results[key]) for key in ("device", "command"))
    return f'{{"device": {device},\n "command": {command},\n "output": [\n{parts}\n]}}\n'


def fill(page: str, folder: Path) -> str:
    """Return the page with every block made anew from the files of results in `folder`."""

    def content(match: re.Match) -> str:
        view, *arguments = match[2].split()
        results = [json.loads((folder / name).read_text()) for name in match[3].split()]
        return match[1] + VIEWS[view](results, *arguments)

    return BLOCK.sub(content, page)


def as_markdown(heading: str, columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table below a line of text."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
    return "\n".join([heading, "", *lines, ""])


def heading_of(results: dict) -> str:
    """Return the line above a table: the machine, the versions and the command."""
    return f"{machine(results)}; `{results['command']}`"


def machine(results: dict) -> str:
    """Return the device, and the versions of torch and CUDA, that a command printed first."""
    first = results["output"][0]
    subject = SUBJECT.fullmatch(first)
    return subject[2].replace("; ", ", ") if subject else first


# ------------------------------------------------------------- the views of problems.benchmark


def tables_of(results: dict) -> list[Table]:
    """Return the tables that a command printed, without the text between them."""
    return [part for part in results["output"] if isinstance(part, dict)]


def view_table(results: list[dict]) -> str:
    """Show the one table that a command printed."""
    [one] = results
    [table] = tables_of(one)
    return as_markdown(heading_of(one), table["columns"], table["rows"])


def view_range(results: list[dict]) -> str:
    """Show the least and the largest ratio of each column, in a row for each file.

    A cell of a file's table is a ratio, and ours in microseconds in parentheses: `1.318 (9)`.
    """
    rows = []
    columns: list[str] = []
    for one in results:
        [table] = tables_of(one)
        columns = ["", *table["columns"][1:]]
        device = machine(one).partition(", ")[0]
        row = [f"{one['output'][1]} ({device})"]
        for column in range(1, len(columns)):
            ratios = sorted((cells[column].split()[0] for cells in table["rows"]), key=float)
            row.append(f"{ratios[0]} to {ratios[-1]}")
        rows.append(row)
    versions = machine(results[0]).partition(", ")[2]
    commands = ", ".join(f"`{one['command']}`" for one in results)
    return as_markdown(f"{versions}; {commands}", columns, rows)


# ---------------------------------------------------------------------------- the views of run.py


@dataclass
class Setting:
    """The tables that run.py printed for one problem, dtype and precision: rows by name."""

    label: str  # "float32, highest"
    forward: dict[str, dict[str, str]] = field(default_factory=dict)
    step: dict[str, dict[str, str]] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=dict)  # by gradient; "" is the output
    kept: tuple[str, str] = ("", "")  # bytes that ours and eager keep for backward


def settings_of(results: dict, problem: str) -> list[Setting]:
    """Collect the tables of a problem, in the order in which run.py printed them."""
    settings: dict[str, Setting] = {}
    current = dtype = ""
    latest: Setting | None = None

    def setting_of(precision: str) -> Setting:
        label = f"{dtype}, {precision}" if precision else dtype
        return settings.setdefault(label, Setting(label))

    for part in results["output"]:
        if isinstance(part, str):
            subject, kept = SUBJECT.fullmatch(part), KEPT.match(part)
            if subject:
                current, dtype, latest = subject[1], subject[4], None
            if kept and latest:
                latest.kept = (kept[1], kept[2])
        elif current == problem:
            what, _, precision = part["columns"][0].partition(", ")
            if what.startswith("error"):
                _add_errors(part["rows"], setting_of)
            else:
                latest = setting_of(precision)
                _add_times(part, what, latest)
    return list(settings.values())


def _add_times(table: Table, what: str, setting: Setting) -> None:
    """File the rows of a forward's or a training step's table by their names."""
    rows = {row[0]: dict(zip(table["columns"], row, strict=False)) for row in table["rows"]}
    if what == "forward":
        setting.forward = rows
    else:
        setting.step = rows


def _add_errors(rows: list[list[str]], setting_of: Callable[[str], Setting]) -> None:
    """File rows named `[shape], highest`, `highest, gradient of x` or `gradient of x`."""
    for name, *values in rows:
        words = re.sub(r"^\[.*?\](, )?", "", name).split(", ")
        gradient = words.pop() if words[-1].startswith("gradient of ") else ""
        precision = words[0] if words else ""
        setting_of(precision).errors[gradient.removeprefix("gradient of ")] = values


def _names(rows: dict[str, dict[str, str]]) -> tuple[str, str]:
    """Return the names of this project's module and of eager, the first two rows."""
    ours, eager, *_ = rows
    return ours, eager


def view_forward(results: list[dict], problem: str) -> str:
    """Show a row for each setting: milliseconds of the forward, and eager's time / this."""
    [one] = results
    settings = settings_of(one, problem)
    ours, eager = _names(settings[0].forward)
    again = f"{eager} (again)"
    yardsticks: list[str] = []
    for setting in settings:
        extra = [name for name in setting.forward if name not in (ours, eager, again)]
        yardsticks += [name for name in extra if name not in yardsticks]
    rows = []
    for setting in settings:
        times = setting.forward
        cells = [times[name]["median ms"] if name in times else "" for name in yardsticks]
        ratio = times[ours][f"{eager} / this"]
        rows.append([setting.label, times[ours]["median ms"], times[eager]["median ms"], ratio])
        rows[-1] += [times[again][f"{eager} / this"], *cells]
    columns = ["forward", "this, ms", f"{eager}, ms", f"{eager} / this"]
    columns += [f"{eager}, timed again", *(f"{name}, ms" for name in yardsticks)]
    return as_markdown(heading_of(one), columns, rows)


def view_step(results: list[dict], problem: str) -> str:
    """Show a row for each setting: a training step's milliseconds, ratios and bytes kept."""
    [one] = results
    rows = []
    settings = settings_of(one, problem)
    ours, eager = _names(settings[0].forward)
    for setting in settings:
        step = setting.step
        row = [setting.label]
        row += [step[f"step, {who}"]["median ms"] for who in (ours, eager, "torch.compile")]
        halves = ("forward", "backward", "step")
        row += [step[f"{half}, {ours}"][f"{eager} / this"] for half in halves]
        rows.append([*row, f"{setting.kept[0]} / {setting.kept[1]}"])
    columns = ["training step", "this, ms", f"{eager}, ms", "torch.compile, ms"]
    columns += [f"forward: {eager} / this", "backward", "step", f"bytes kept: this / {eager}"]
    return as_markdown(heading_of(one), columns, rows)


def view_errors(results: list[dict], problem: str) -> str:
    """Show a row for each setting: relative errors in the Frobenius norm, ours / eager's."""
    [one] = results
    rows = []
    columns: dict[str, None] = {}
    for setting in settings_of(one, problem):
        columns |= dict.fromkeys(setting.errors)
        cells = [f"{ours} / {eager}" for *_, ours, _, _, eager in setting.errors.values()]
        rows.append([setting.label, *cells])
    titles = [f"gradient of {name}" if name else "output" for name in columns]
    return as_markdown(heading_of(one), ["relF, this / eager", *titles], rows)


VIEWS = {
    "table": view_table,
    "range": view_range,
    "forward": view_forward,
    "step": view_step,
    "errors": view_errors,
}
