"""Makes the text that the command prints on the project's own solution and on sweeps.

    headline                   all commands
    details, closing           the project's own solution: tables of each problem, last lines
    sweep_line                 a sweep: the line of a size
    closing_of_sweep           its last lines

See `referee/records.py` for records, runs, summaries and rows. The parts of all reports are
also used by `graded_files`, `folder_table` and `markdown`.
"""

from referee.names import COPY
from referee.report import by_role, machine
from referee.words import CORRECT, INTERRUPTED, LEFT_OUT, TIE, TOO_NOISY, WRONG

TIME_TITLES = ["median ms", "p10 - p90 ms"]
ERROR_TITLES = ["error against float64", "ours: max", "mean", "relF", "eager: max", "mean", "relF"]
# The keys of a row of errors, in the order of these titles.
ERROR_KEYS = [
    "solution_max",
    "solution_mean",
    "solution_relative",
    "reference_max",
    "reference_mean",
    "reference_relative",
]
DECIMALS = {"GB/s": 1, "TFLOP/s": 2}  # digits after the point of a speed
# A sweep's lines: the width of the first column, and the format of the others.
LABEL_WIDTH = 30
SWEEP_COLUMNS = "{:>12}  {:>10}  {}"
UNDECIDED = (TIE, TOO_NOISY)  # the words that tables print beside a ratio
LEGEND = f"{TIE}: it may be the same speed"
NO_LIMIT = "a copy is no limit: stores that bypass the caches are faster"
NOISY = f"{TOO_NOISY}: torch's own time varied too much; an idle machine or more --trials help"
LEGEND_OF_ERRORS = "relF: the Frobenius norm of the errors, in parts of the result's"


# ------------------------------------------------------------------------- parts of all reports


def headline(environment: dict, device: object, why_no_gpu: str) -> str:
    """Return the line on the device and the versions.

    Args:
        environment: of the run, see `records.environment`.
        device: its name, "cuda:0" for example.
        why_no_gpu: "; no GPU: ..." or "".
    """
    cuda = f"CUDA {environment['cuda']}" if environment["cuda"] else "no CUDA"
    return f"{device}: {machine(environment)}{why_no_gpu}; torch {environment['torch']}, {cuda}"


def table(rows: list[list[str]]) -> str:
    """Return rows as aligned columns: the first to the left, all others to the right."""
    columns = zip(*rows, strict=True)
    first_width, *other_widths = [max(len(cell) for cell in column) for column in columns]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, other_widths, strict=True)]
        lines.append("  ".join([first.ljust(first_width), *cells]).rstrip())
    return "\n".join(lines)


def indented(text: str) -> str:
    """Indent a text, such as a traceback, that is printed below a file's line."""
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


def interval(row: dict, rounds: int = 0) -> str:
    """Return a row's ratio with its 95% interval: "1.234 [1.200, 1.250]".

    Args:
        row: of a summary.
        rounds: how many were timed. One round alone has no interval: "1.234 (one round)".
    """
    if rounds == 1:
        return f"{row['ratio']:.3f} (one round)"
    return f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"


def milliseconds(row: dict) -> str:
    """Return a row's median with three decimals, or below 0.1 ms with three significant digits."""
    value = row["median_ms"]
    return f"{value:.3f} ms" if value >= 0.1 else f"{value:.3g} ms"


def forward_row(run: dict, role: str) -> dict:
    """Return the row with this role of a run's forward."""
    return by_role(run["forward"]["summary"], role)


def step_row(run: dict, role: str) -> dict:
    """Return the row with this role of a run's whole training step."""
    return by_role(run["step"]["summary"]["step"], role)


def forward_rounds(run: dict) -> int:
    """Return how many rounds of a run's forward were timed."""
    return len(run["forward"]["seconds"][forward_row(run, "eager")["name"]])


def step_rounds(run: dict) -> int:
    """Return how many rounds of a run's training step were timed."""
    return len(run["step"]["seconds"]["step"][step_row(run, "eager")["name"]])


def explain_noise(printed_words: list[str]) -> list[str]:
    """Return the line that explains "too noisy", if a printed word is that; else no line."""
    return [NOISY] if TOO_NOISY in printed_words else []


def words_of_forwards(records: list[dict]) -> list[str]:
    """Return the words on the solutions' forwards."""
    return [run["time"] for record in records for run in record["runs"]]


def words_of_lines(records: list[dict]) -> list[str]:
    """Return the words in the lines of graded files: on forwards, and on whole training steps."""
    runs = [run for record in records for run in record["runs"]]
    words_of_steps = [step_row(run, "solution")["time"] for run in runs if run["step"]]
    return words_of_forwards(records) + words_of_steps


def _words_of_tables(records: list[dict]) -> list[str]:
    """Return the words in the tables of `details`: also on yardsticks, forwards and backwards."""
    rows = []
    for record in records:
        for run in record["runs"]:
            rows += run["forward"]["summary"]
            if run["step"]:
                for summary in run["step"]["summary"].values():
                    rows += summary
    return words_of_forwards(records) + [row["time"] for row in rows]


# --------------------------------------------------------------------- the project's own solution


def details(record: dict) -> str:
    """Return all that is printed on a record: cases, tables, notes, and what is wrong."""
    wrong_count = "1" if record["verdict"] == WRONG else "none"
    lines = [f"{record['cases']} cases compared with the reference, {wrong_count} wrong"]
    if record["errors"]:
        rows = [ERROR_TITLES]
        for error_row in record["errors"]:
            rows.append([error_row["name"], *(f"{error_row[key]:.2g}" for key in ERROR_KEYS)])
        lines.append(f"\n{table(rows)}\n{LEGEND_OF_ERRORS}")
    if record["runs"]:
        lines += [f"\n{results(run)}" for run in record["runs"]]
    else:
        lines.append("nothing was timed")
    lines += [f"\n{note}" for note in record["notes"]]
    if record["verdict"] not in (CORRECT, INTERRUPTED):
        lines.append(f"{record['verdict'].upper()}  {record['reason']}")
    return "\n".join(lines)


def results(run: dict) -> str:
    """Return the tables of a run, and how to read them."""
    forward = run["forward"]
    setting = f", {run['setting']}" if run["setting"] else ""
    rounds = forward_rounds(run)
    control = forward_row(run, "control")
    about = [
        f"{rounds} rounds; a ratio is the median over rounds, with a 95% interval",
        LEGEND,
        f"the same code timed twice gave {interval(control, rounds)}",
    ]
    exceeds_copy = forward_row(run, "solution")["percent_of_yardstick"] > 100
    if forward["yardstick"] == COPY and exceeds_copy:
        about.append(NO_LIMIT)
    parts = [
        _forward_table(run, setting),
        "; ".join(about),
        *forward["notes"],
    ]
    if run["step"]:
        parts += _step_results(run, setting)
    return "\n".join(parts)


def _forward_table(run: dict, setting: str) -> str:
    """Return the table of forwards: a row for each timed call.

    Args:
        run: of a record.
        setting: of the precision, for the title: ", highest" for example; or "".
    """
    forward = run["forward"]
    unit = forward["unit"]
    yardstick = forward["yardstick"].split()[0]  # "copy" for "copy, fresh memory"
    ratio_title = f"{forward_row(run, 'eager')['name']} / this"
    rows = [[f"forward{setting}", *TIME_TITLES, unit, f"of {yardstick}", ratio_title, ""]]
    for row in forward["summary"]:
        speed = f"{row['rate']:.{DECIMALS[unit]}f}"
        share = f"{row['percent_of_yardstick']:.1f}%"
        rows.append(_cells_of_row("", row, forward_rounds(run), speed, share))
    return table(rows)


def _step_results(run: dict, setting: str) -> list[str]:
    """Return the table of training steps, and how to read it.

    Args:
        run: of a record.
        setting: of the precision, as in `_forward_table`.
    """
    step = run["step"]
    rounds = step_rounds(run)
    ratio_title = f"{forward_row(run, 'eager')['name']} / this"
    rows = [[f"training step{setting}", *TIME_TITLES, ratio_title, ""]]
    for part, summary in step["summary"].items():  # forward, backward, step
        rows += [_cells_of_row(f"{part}, ", row, rounds) for row in summary]
    return [
        f"\n{table(rows)}",
        f"{rounds} rounds; a step is the forward and backward of a round",
        _saved_bytes(run),
        *step["notes"],
    ]


def _saved_bytes(run: dict) -> str:
    """Return the line on the bytes that autograd keeps from the forward for the backward."""
    ours, eager = step_row(run, "solution")["name"], step_row(run, "eager")["name"]
    our_bytes = run["step"]["kept_bytes"].get(ours, 0)
    eager_bytes = run["step"]["kept_bytes"].get(eager, 0)
    part = f" (1/{eager_bytes / our_bytes:.4g})" if our_bytes else ""
    return f"kept for backward: {ours} {our_bytes:,} bytes, {eager} {eager_bytes:,} bytes{part}"


def _cells_of_row(prefix: str, row: dict, rounds: int, *speed_cells: str) -> list[str]:
    """Return the cells of a timed call in a printed table.

    Args:
        prefix: before the timed call's name: "backward, " for example.
        row: of the summary.
        rounds: how many were timed.
        *speed_cells: cells between the times and the ratio.
    """
    times = [f"{row['median_ms']:.3f}", f"{row['p10_ms']:.3f} - {row['p90_ms']:.3f}"]
    word = ""
    if row["role"] != "eager" and row["time"] in UNDECIDED:
        word = row["time"]
    return [prefix + row["name"], *times, *speed_cells, interval(row, rounds), word]


def closing(records: list[dict], seconds: float, is_full: bool, documents: str) -> str:
    """Return the last lines of a comparison, which a newcomer understands.

    Args:
        records: of the comparison.
        seconds: that it took.
        is_full: whether the option --full was used.
        documents: the files that say how the results were made.
    """
    if not records:
        return "Nothing was graded."
    failures = [record for record in records if record["verdict"] != CORRECT]
    if failures:
        list_of_failures = ", ".join(
            f"{record['problem']} {record['dtype']}: {record['verdict']}" for record in failures
        )
        lines = [f"NOT all correct: {list_of_failures}."]
    else:
        names = ", ".join(dict.fromkeys(record["problem"] for record in records))
        lines = [f"All correct: {names}."]
    lines += [_in_words(record, run) for record in records for run in record["runs"]]
    lines += explain_noise(_words_of_tables(records))
    details = f"--json FILE writes every sample; {documents} say what was done"
    longer = "" if is_full else "; --full times longer"
    lines.append(f"{seconds:.0f} s in all. Details: {details}{longer}.")
    return "\n".join(lines)


def _in_words(record: dict, run: dict) -> str:
    """Return a sentence on a run's time and torch's."""
    ours, eager = forward_row(run, "solution"), forward_row(run, "eager")
    setting = f", {run['setting']}" if run["setting"] else ""
    our_time = f"{record['problem']} {record['dtype']}{setting}: {milliseconds(ours)}"
    both_times = f"{our_time}, torch {milliseconds(eager)}"
    if run["time"] == TOO_NOISY:
        return f"{both_times}: {TOO_NOISY} to tell."
    if run["time"] == TIE:
        return f"{both_times}: as fast as torch, within what the same code varies."
    return f"{both_times}: {ours['ratio']:.2f} times torch's speed."


# --------------------------------------------------------------------------------------- sweeps


def sweep_line(record: dict, needs_title: bool) -> str:
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
    title = ""
    if needs_title:
        ratio_title = f"{forward_row(run, 'eager')['name']} / this"
        titles = SWEEP_COLUMNS.format("median us", run["forward"]["unit"], ratio_title)
        title = f"\n{record['problem']:<{LABEL_WIDTH}}  {titles}\n"
    row = forward_row(run, "solution")
    microseconds = f"{row['median_ms'] * 1e3:.2f}"
    columns = SWEEP_COLUMNS.format(microseconds, f"{row['rate']:.4g}", interval(row))
    word = f"  {run['time']}" if run["time"] in UNDECIDED else ""
    return f"{title}{label:<{LABEL_WIDTH}}  {columns}{word}"


def untimed(records: list[dict]) -> list[str]:
    """Return the names of a sweep's problems of which no size was timed."""
    timed = {record["problem"] for record in records if record["runs"]}
    names = dict.fromkeys(record["problem"] for record in records)
    return [name for name in names if name not in timed]


def closing_of_sweep(records: list[dict], seconds: float) -> str:
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
