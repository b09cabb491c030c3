"""Makes the text of a sweep: a line for each size, and the last lines."""

from referee.report.tables import LEGEND, NOISY, UNDECIDED, forward_row, interval
from referee.verdict_words import LEFT_OUT, TIE, TOO_NOISY

# The width of the first column, and the format of the others.
LABEL_WIDTH = 30
COLUMNS = "{:>12}  {:>10}  {}"


def line(record: dict, needs_title: bool) -> str:
    """Return the line of a size.

    Args:
        record: of the size; it has one run, or none.
        needs_title: whether the titles of the columns come first.
    """
    settings = [run["setting"] for run in record["runs"]]
    label = " ".join(filter(None, [str(record["shape"]), record["dtype"], *settings]))
    if not record["runs"]:
        return f"{label:<{LABEL_WIDTH}}  {record['verdict']}: {record['reason']}"
    [run] = record["runs"]
    title = f"\n{_titles(record['problem'], run)}\n" if needs_title else ""
    row = forward_row(run, "solution")
    microseconds = f"{row['median_ms'] * 1e3:.2f}"
    columns = COLUMNS.format(microseconds, f"{row['rate']:.4g}", interval(row))
    word = f"  {run['time']}" if run["time"] in UNDECIDED else ""
    return f"{title}{label:<{LABEL_WIDTH}}  {columns}{word}"


def _titles(problem: str, run: dict) -> str:
    """Return the line with the titles of the columns; the problem's name is that of the first."""
    ratio_title = f"{forward_row(run, 'eager')['name']} / this"
    titles = COLUMNS.format("median us", run["forward"]["unit"], ratio_title)
    return f"{problem:<{LABEL_WIDTH}}  {titles}"


def untimed(records: list[dict]) -> list[str]:
    """Return the names of a sweep's problems of which no size was timed."""
    timed = {record["problem"] for record in records if record["runs"]}
    names = dict.fromkeys(record["problem"] for record in records)
    return [name for name in names if name not in timed]


def last_lines(records: list[dict], seconds: float) -> str:
    """Return the last lines of a sweep: how many sizes were timed, and what helps otherwise.

    Args:
        records: of the sweep.
        seconds: that it took.
    """
    count = len([record for record in records if record["runs"]])
    lines = [f"{count} of {len(records)} sizes were timed, in {seconds:.0f} s."]
    words = {run["time"] for record in records for run in record["runs"]}
    if TIE in words:
        lines.append(f"{LEGEND}.")
    if TOO_NOISY in words:
        lines.append(NOISY)
    has_several = len({(record["problem"], record["dtype"]) for record in records}) > 1
    if has_several and any(record["verdict"] == LEFT_OUT for record in records):
        lines.append("A sweep of one problem and one --dtype has more time for each size.")
    lines += [f"NOTHING of {name} was timed." for name in untimed(records)]
    return "\n".join(lines)
