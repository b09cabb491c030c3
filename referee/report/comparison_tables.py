"""Makes the text of a comparison of a project's own solution: tables, and the last lines."""

from referee.call_names import COPY
from referee.report.tables import (
    LEGEND,
    UNDECIDED,
    explain_noise,
    forward_rounds,
    forward_row,
    interval,
    milliseconds,
    step_rounds,
    step_row,
    table,
    words_of_forwards,
)
from referee.verdict_words import CORRECT, INTERRUPTED, TIE, TOO_NOISY, WRONG

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
NO_LIMIT = "a copy is no limit: stores that bypass the caches are faster"
LEGEND_OF_ERRORS = "relF: the Frobenius norm of the errors, in parts of the result's"


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


def last_lines(records: list[dict], seconds: float, is_full: bool, documents: str) -> str:
    """Return the last lines of a comparison, which a newcomer understands.

    Args:
        records: of the comparison.
        seconds: that it took.
        is_full: whether the option --full was used.
        documents: the files that say how the results were made.
    """
    if not records:
        return "Nothing was graded."
    lines = [_all_verdicts(records)]
    lines += [_in_words(record, run) for record in records for run in record["runs"]]
    lines += explain_noise(_words_of_tables(records))
    sources = f"--json FILE writes every sample; {documents} say what was done"
    longer = "" if is_full else "; --full measures for longer"
    lines.append(f"{seconds:.0f} s in all. Details: {sources}{longer}.")
    return "\n".join(lines)


def _all_verdicts(records: list[dict]) -> str:
    """Return a sentence on the verdicts: all are correct, or which are not."""
    failures = [record for record in records if record["verdict"] != CORRECT]
    if not failures:
        names = ", ".join(dict.fromkeys(record["problem"] for record in records))
        return f"All correct: {names}."
    list_of_failures = ", ".join(
        f"{record['problem']} {record['dtype']}: {record['verdict']}" for record in failures
    )
    return f"NOT all correct: {list_of_failures}."


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
