"""Makes the text that the command prints and `--markdown` writes, from the records of `--json`.

See `referee/records.py` for records, runs, summaries and rows. What is printed:

    headline                   all commands
    details, closing           the project's own solution: tables of each problem, last lines
    sweep_line, closing_of_sweep
    line, ranking              graded files: a line for each, and the table of all
    markdown                   the file of `--markdown`
"""

from statistics import geometric_mean

from referee.names import COPY
from referee.report import by_role, machine

TIME_TITLES = ["median ms", "p10 - p90 ms"]
ERROR_TITLES = ["error against float64", "ours: max", "mean", "relF", "eager: max", "mean", "relF"]
DECIMALS = {"GB/s": 1, "TFLOP/s": 2}  # digits after the point of a speed
# A sweep's lines: the width of the first column, and the format of the others.
LABEL_WIDTH = 30
SWEEP_COLUMNS = "{:>12}  {:>10}  {}"
TIE = "a tie"
TOO_NOISY = "too noisy"
UNDECIDED = (TIE, TOO_NOISY)  # the words that tables print beside a ratio
LEGEND = "a tie: it may be the same speed"
NO_LIMIT = "a copy is no limit: stores that bypass the caches are faster"
NOISY = "too noisy to tell, for torch's own time varied; an idle machine or more --trials help"
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
    """Indent a traceback, or what a file has printed, to stand below the file's line."""
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


def _forward_row(run: dict, role: str) -> dict:
    """Return the row with this role of a run's forward."""
    return by_role(run["forward"]["summary"], role)


def _step_row(run: dict, role: str) -> dict:
    """Return the row with this role of a run's whole training step."""
    return by_role(run["step"]["summary"]["step"], role)


def _forward_rounds(run: dict) -> int:
    """Return how many rounds of a run's forward were timed."""
    return len(run["forward"]["seconds"][_forward_row(run, "eager")["name"]])


def _step_rounds(run: dict) -> int:
    """Return how many rounds of a run's training step were timed."""
    return len(run["step"]["seconds"]["step"][_step_row(run, "eager")["name"]])


def _explain_noise(words: list[str]) -> list[str]:
    """Return the line that explains "too noisy", if that is one of the words; else no line."""
    return [NOISY] if TOO_NOISY in words else []


# --------------------------------------------------------------------- the project's own solution


def details(record: dict) -> str:
    """Return all that is printed on a record: cases, tables, notes, and what is wrong."""
    wrong_count = "1" if record["verdict"] == "wrong" else "none"
    lines = [f"{record['cases']} cases compared with the reference, {wrong_count} wrong"]
    if record["errors"]:
        rows = [ERROR_TITLES]
        for error_row in record["errors"]:
            name, *values = error_row.values()
            rows.append([name, *(f"{value:.2g}" for value in values)])
        lines.append(f"\n{table(rows)}\n{LEGEND_OF_ERRORS}")
    if record["runs"]:
        lines += [f"\n{results(run)}" for run in record["runs"]]
    else:
        lines.append("nothing was timed")
    lines += [f"\n{note}" for note in record["notes"]]
    if record["verdict"] not in ("correct", "interrupted"):
        lines.append(f"{record['verdict'].upper()}  {record['reason']}")
    return "\n".join(lines)


def results(run: dict) -> str:
    """Return the tables of a run, and how to read them."""
    forward = run["forward"]
    setting = f", {run['setting']}" if run["setting"] else ""
    rounds = _forward_rounds(run)
    control = _forward_row(run, "control")
    about = [
        f"{rounds} rounds; a ratio is the median over rounds, with a 95% interval",
        LEGEND,
        f"the same code timed twice gave {interval(control, rounds)}",
    ]
    exceeds_copy = _forward_row(run, "solution")["percent_of_yardstick"] > 100
    if forward["yardstick"] == COPY and exceeds_copy:
        about.append(NO_LIMIT)
    parts = [
        _forward_table(run, setting),
        "; ".join(about),
        *_explain_noise([row["said"] for row in forward["summary"]]),
        *forward["notes"],
    ]
    if run["step"]:
        parts += _step_results(run, setting)
    return "\n".join(parts)


def _forward_table(run: dict, setting: str) -> str:
    """Return the table of forwards: a row for each contestant.

    Args:
        run: of a record.
        setting: of the precision, for the title: ", highest" for example; or "".
    """
    forward = run["forward"]
    unit = forward["unit"]
    yardstick = forward["yardstick"].split()[0]  # "copy" for "copy, fresh memory"
    ratio_title = f"{_forward_row(run, 'eager')['name']} / this"
    rows = [[f"forward{setting}", *TIME_TITLES, unit, f"of {yardstick}", ratio_title, ""]]
    for row in forward["summary"]:
        speed = f"{row['rate']:.{DECIMALS[unit]}f}"
        share = f"{row['percent_of_yardstick']:.1f}%"
        rows.append(_cells_of_row("", row, _forward_rounds(run), speed, share))
    return table(rows)


def _step_results(run: dict, setting: str) -> list[str]:
    """Return the table of training steps, and how to read it.

    Args:
        run: of a record.
        setting: of the precision, as in `_forward_table`.
    """
    step = run["step"]
    rounds = _step_rounds(run)
    ratio_title = f"{_forward_row(run, 'eager')['name']} / this"
    rows = [[f"training step{setting}", *TIME_TITLES, ratio_title, ""]]
    words = []
    for part, summary in step["summary"].items():  # forward, backward, step
        rows += [_cells_of_row(f"{part}, ", row, rounds) for row in summary]
        words += [row["said"] for row in summary]
    return [
        f"\n{table(rows)}",
        f"{rounds} rounds; a step is the forward and backward of a round",
        *_explain_noise(words),
        _saved_bytes(run),
        *step["notes"],
    ]


def _saved_bytes(run: dict) -> str:
    """Return the line on the bytes that autograd keeps from the forward for the backward."""
    ours, eager = _step_row(run, "solution")["name"], _step_row(run, "eager")["name"]
    our_bytes = run["step"]["kept_bytes"].get(ours, 0)
    eager_bytes = run["step"]["kept_bytes"].get(eager, 0)
    part = f" (1/{eager_bytes / our_bytes:.4g})" if our_bytes else ""
    return f"kept for backward: {ours} {our_bytes:,} bytes, {eager} {eager_bytes:,} bytes{part}"


def _cells_of_row(prefix: str, row: dict, rounds: int, *speed_cells: str) -> list[str]:
    """Return the cells of a contestant in a printed table.

    Args:
        prefix: before the contestant's name: "backward, " for example.
        row: of the summary.
        rounds: how many were timed.
        *speed_cells: cells between the times and the ratio.
    """
    times = [f"{row['median_ms']:.3f}", f"{row['p10_ms']:.3f} - {row['p90_ms']:.3f}"]
    word = ""
    if row["role"] != "eager" and row["said"] in UNDECIDED:
        word = row["said"]
    return [prefix + row["name"], *times, *speed_cells, interval(row, rounds), word]


def closing(records: list[dict], seconds: float, is_full: bool) -> str:
    """Return the last lines of a comparison, which a newcomer understands.

    Args:
        records: of the comparison.
        seconds: that it took.
        is_full: whether the option --full was used.
    """
    if not records:
        return "Nothing was graded."
    failures = [record for record in records if record["verdict"] != "correct"]
    if failures:
        list_of_failures = ", ".join(
            f"{record['problem']} {record['dtype']}: {record['verdict']}" for record in failures
        )
        lines = [f"NOT all correct: {list_of_failures}."]
    else:
        names = ", ".join(dict.fromkeys(record["problem"] for record in records))
        lines = [f"All correct: {names}."]
    lines += [_in_words(record, run) for record in records for run in record["runs"]]
    details = "--json FILE writes every sample; README.md and referee/README.md say what was done"
    longer = "" if is_full else "; --full times longer"
    lines.append(f"{seconds:.0f} s in all. Details: {details}{longer}.")
    return "\n".join(lines)


def _in_words(record: dict, run: dict) -> str:
    """Return a sentence on a run's time and torch's."""
    ours, eager = _forward_row(run, "solution"), _forward_row(run, "eager")
    setting = f", {run['setting']}" if run["setting"] else ""
    our_time = f"{record['problem']} {record['dtype']}{setting}: {milliseconds(ours)}"
    both_times = f"{our_time}, torch {milliseconds(eager)}"
    if run["time"] == TOO_NOISY:
        return f"{both_times}: {NOISY}."
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
        ratio_title = f"{_forward_row(run, 'eager')['name']} / this"
        titles = SWEEP_COLUMNS.format("median us", run["forward"]["unit"], ratio_title)
        title = f"\n{record['problem']:<{LABEL_WIDTH}}  {titles}\n"
    row = _forward_row(run, "solution")
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
        lines.append(f"{NOISY}.")
    has_several = len({(record["problem"], record["dtype"]) for record in records}) > 1
    if has_several and any(record["verdict"] == "left out" for record in records):
        lines.append("A sweep of one problem and one --dtype has more time for each size.")
    lines += [f"NOTHING of {name} was timed." for name in untimed(records)]
    return "\n".join(lines)


# --------------------------------------------------------------------------------- graded files


def line(record: dict) -> str:
    """Return the line of a graded file: its verdict, and the reason or the times."""
    if record["verdict"] != "correct":
        reason = f" ({record['reason']})" if record["reason"] else ""
        return f"{record['file']}: {record['verdict']}{reason}"
    facts = [record["accuracy"], f"{record['cases']} cases", *record["notes"]]
    if record["refused"]:
        facts.append(f"refuses {', '.join(record['refused'])}")
    run = record["runs"][0]
    time, ratio, word, share = _time_cells(run)
    times = f"{time} ms, eager / this {ratio}: {_explained(word)}; {share} of {_yardstick(run)}"
    step = _step_in_words(run) if run["step"] else ""
    return f"{record['file']}: correct ({'; '.join(facts)}), {times}'s speed{step}"


def _step_in_words(run: dict) -> str:
    """Return the part of a file's line on its training step."""
    ours, eager = _step_row(run, "solution"), _step_row(run, "eager")
    text = f"; training step {interval(ours, _step_rounds(run))}: {_explained(ours['said'])}"
    bytes_of = run["step"]["kept_bytes"]
    if ours["name"] in bytes_of:
        text += f", keeps {bytes_of[ours['name']]:,} bytes, eager {bytes_of[eager['name']]:,}"
    return text


def _explained(word: str) -> str:
    """Return the word for a time compared with eager's; "too noisy" with its explanation."""
    return NOISY if word == TOO_NOISY else word


def ranking(records: list[dict]) -> str:
    """Return a table of all graded files, the fastest first, and KernelBench's scores."""
    runs = [record["runs"][0] for record in records if record["runs"]]
    yardstick = _yardstick(runs[0]) if runs else "a copy"
    titles = ["file", "verdict", "accuracy", "median ms", "eager / this", "", f"of {yardstick}"]
    rows = [titles]
    for record in sorted(records, key=_speed_up, reverse=True):
        cells = _time_cells(record["runs"][0]) if record["runs"] else [""] * 4
        rows.append([record["file"], record["verdict"], record["accuracy"], *cells])
    noise = _explain_noise([run["time"] for run in runs])
    return "\n".join([table(rows), *noise, scores(records)])


def scores(records: list[dict]) -> str:
    """Return KernelBench's scores: how many are correct, fast_p, and the geometric mean.

    fast_p is the share of files that are correct and more than p times as fast as eager; a tie is
    not faster than 1.
    """
    count = len(records)
    correct = len([record for record in records if record["verdict"] == "correct"])
    timed = [record for record in records if _speed_up(record) > 0]
    ratios = [_speed_up(record) for record in timed]
    ratios_without_ties = [_speed_up(record) for record in timed if not _is_tie(record)]
    parts = [f"{correct} of {count} correct", f"fast_0 {correct / count:.2f}"]
    for p in (1, 2):
        faster = len([ratio for ratio in ratios_without_ties if ratio > p])
        parts.append(f"fast_{p} {faster / count:.2f}")
    if ratios:
        parts.append(f"geometric mean of {len(ratios)} ratios: {geometric_mean(ratios):.3f}")
    else:
        parts.append("no ratio to average")
    return "; ".join(parts)


def _yardstick(run: dict) -> str:
    """Return a run's yardstick of speed in words: "a copy" or "a product"."""
    return f"a {run['forward']['yardstick'].split()[0]}"


def _time_cells(run: dict) -> list[str]:
    """Return four cells on a run: time in ms, ratio, word, share of the yardstick's speed."""
    ours = _forward_row(run, "solution")
    share = f"{ours['percent_of_yardstick']:.1f}%"
    return [f"{ours['median_ms']:.3f}", interval(ours, _forward_rounds(run)), run["time"], share]


def _speed_up(record: dict) -> float:
    """Return the ratio of a record's first run; 0 if it does not count.

    It does not count if the file is not correct, not timed, or the time is too noisy.
    """
    if record["verdict"] != "correct" or not record["runs"]:
        return 0.0
    run = record["runs"][0]
    if run["time"] == TOO_NOISY:
        return 0.0
    return _forward_row(run, "solution")["ratio"]


def _is_tie(record: dict) -> bool:
    """Return whether the time of a record's first run is a tie with eager's. It must have a run."""
    return record["runs"][0]["time"] == TIE


# ------------------------------------------------------------------------------------- Markdown


def markdown(content: dict) -> str:
    """Return the text of `--markdown`: a line on the measurement, and a table as README has it.

    Args:
        content: of the JSON file, see `records.document`.
    """
    environment = content["environment"]
    cuda = f", CUDA {environment['cuda']}" if environment["cuda"] else ""
    state = "" if content["complete"] else " Interrupted: not all of it was measured."
    origin = f"{machine(environment)}, torch {environment['torch']}{cuda}; `{content['command']}`"
    if content["kind"] == "grading":
        titles, *rows = _grading_rows(content["records"])
    else:
        titles, *rows = _comparison_rows(content["records"])
    lines = [f"{origin}, {content['date']}.{state}", ""]
    lines += [_markdown_row(titles), "|" + "---|" * len(titles)]
    lines += [_markdown_row(row) for row in rows]
    return "\n".join([*lines, ""])


def _markdown_row(cells: list[str]) -> str:
    """Return a row of a Markdown table; a bar in a cell is escaped."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _comparison_rows(records: list[dict]) -> list[list[str]]:
    """Return the titles, and a row for each run. Yardsticks are only in the JSON file."""
    rows = [["module, x", "time", "eager's time", "eager / time", "training step: eager / time"]]
    for record in records:
        label = f"{record['problem']} `{record['shape']}` {record['dtype']}"
        if record["verdict"] != "correct":
            verdict = f"**{record['verdict']}** {record['reason']}".rstrip()
            rows.append([label, verdict, "", "", ""])
        for run in record["runs"]:
            setting = f", `{run['setting']}`" if run["setting"] else ""
            ours, eager = _forward_row(run, "solution"), _forward_row(run, "eager")
            ratio = f"**{ours['ratio']:.3f}** ({_range(run)})"
            step = f"{_step_row(run, 'solution')['ratio']:.3f}" if run["step"] else ""
            rows.append([label + setting, milliseconds(ours), milliseconds(eager), ratio, step])
    return rows


def _grading_rows(records: list[dict]) -> list[list[str]]:
    """Return the titles, and a row for each file, the fastest first."""
    rows = [["file", "verdict", "accuracy", "time", "ratio to eager", ""]]
    for record in sorted(records, key=_speed_up, reverse=True):
        reason = f": {record['reason']}" if record["reason"] else ""
        time, ratio, word = "", "", ""
        if record["runs"]:
            run = record["runs"][0]
            ours = _forward_row(run, "solution")
            time = f"{milliseconds(ours)}, {ours['rate']:.4g} {run['forward']['unit']}"
            ratio = f"{ours['ratio']:.3f} [{_range(run)}]"
            word = run["time"]
        verdict = record["verdict"] + reason
        rows.append([f"`{record['file']}`", verdict, record["accuracy"], time, ratio, word])
    return rows


def _range(run: dict) -> str:
    """Return the 95% interval of a run's ratio in words; one round alone has none."""
    ours = _forward_row(run, "solution")
    if _forward_rounds(run) == 1:
        return "one round"
    return f"{ours['ratio_low']:.3f} to {ours['ratio_high']:.3f}"
