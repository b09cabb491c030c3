"""The text that the command prints and `--markdown` writes, made from the records of `--json`."""

from statistics import geometric_mean

from referee.names import COPY
from referee.report import by_role, machine

TIMES = ["median ms", "p10 - p90 ms"]
ERRORS = ["error against float64", "ours: max", "mean", "relF", "eager: max", "mean", "relF"]
DIGITS = {"GB/s": 1, "TFLOP/s": 2}  # behind the point
WIDTH, NUMBERS = 30, "{:>12}  {:>10}  {}"  # columns of a sweep
NOTHING_TOLD = ("a tie", "too noisy")
LEGEND = "a tie: it may be the same speed"
NO_LIMIT = "a copy is no limit: stores that bypass the caches are faster"
NOISY = "too noisy to tell, for torch's own time varied; an idle machine or more --trials help"
LEGEND_OF_ERRORS = "relF: the Frobenius norm of the errors, in parts of the result's"


def headline(about: dict, device: object, why: str) -> str:
    """Return the device, why it is no GPU ("; ..." or ""), and the versions."""
    cuda = f"CUDA {about['cuda']}" if about["cuda"] else "no CUDA"
    return f"{device}: {machine(about)}{why}; torch {about['torch']}, {cuda}"


def table(rows: list[list[str]]) -> str:
    """Return aligned columns under the first row: names to the left, numbers to the right."""
    first, *others = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        numbers = [cell.rjust(width) for cell, width in zip(cells, others, strict=True)]
        lines.append([name.ljust(first), *numbers])
    return "\n".join("  ".join(line).rstrip() for line in lines)


def details(record: dict) -> str:
    """Return how many cases were compared, the tables, and what is wrong."""
    is_fine = record["verdict"] in ("correct", "interrupted")
    count = "1" if record["verdict"] == "wrong" else "none"
    lines = [f"{record['cases']} cases compared with the reference, {count} wrong"]
    if record["errors"]:
        errors = (row.values() for row in record["errors"])
        rows = [[name, *(f"{value:.2g}" for value in values)] for name, *values in errors]
        lines.append(f"\n{table([ERRORS, *rows])}\n{LEGEND_OF_ERRORS}")
    lines += [f"\n{results(run)}" for run in record["runs"]] or ["nothing was timed"]
    lines += [f"\n{note}" for note in record["notes"]]
    if not is_fine:
        lines.append(f"{record['verdict'].upper()}  {record['reason']}")
    return "\n".join(lines)


def results(run: dict) -> str:
    """Return the tables of one setting, and how to read them."""
    forward, step = run["forward"], run["step"]
    setting = run["setting"] and f", {run['setting']}"
    roles = ("solution", "eager", "control")
    ours, eager, control = (by_role(forward["summary"], role) for role in roles)
    title, digits = f"{eager['name']} / this", DIGITS[forward["unit"]]
    rounds = len(forward["seconds"][eager["name"]])
    speeds = [forward["unit"], f"of {forward['yardstick'].split()[0]}"]
    rows = [[f"forward{setting}", *TIMES, *speeds, title, ""]]
    for row in forward["summary"]:
        speed = [f"{row['rate']:.{digits}f}", f"{row['percent_of_yardstick']:.1f}%"]
        rows.append(_row("", row, rounds, *speed))
    about = [
        f"{rounds} rounds; a ratio is the median over rounds, with a 95% interval",
        LEGEND,
        f"the same code timed twice gave {interval(control, rounds)}",
    ]
    if forward["yardstick"] == COPY and ours["percent_of_yardstick"] > 100:
        about.append(NO_LIMIT)
    parts = [table(rows), "; ".join(about), *_noise(forward["summary"]), *forward["notes"]]
    if step:
        parts += _step_results(step, setting, title)
    return "\n".join(parts)


def _noise(rows: list[dict]) -> list[str]:
    """Return the line that explains "too noisy", if a table of these rows has it."""
    return [NOISY] if any(row["said"] == "too noisy" for row in rows) else []


def _step_results(step: dict, setting: str, title: str) -> list[str]:
    """Return the table of training steps, and how to read it."""
    whole = step["summary"]["step"]
    ours, eager = (by_role(whole, role) for role in ("solution", "eager"))
    rounds = len(step["seconds"]["step"][eager["name"]])
    rows = [[f"training step{setting}", *TIMES, title, ""]]
    for half, summary in step["summary"].items():
        rows += [_row(f"{half}, ", row, rounds) for row in summary]
    kept, theirs = (step["kept_bytes"].get(row["name"], 0) for row in (ours, eager))
    part = f" (1/{theirs / kept:.4g})" if kept else ""
    return [
        f"\n{table(rows)}",
        f"{rounds} rounds; a step is the forward and backward of a round",
        *_noise([row for summary in step["summary"].values() for row in summary]),
        f"kept for backward: {ours['name']} {kept:,} bytes, {eager['name']} {theirs:,} bytes{part}",
        *step["notes"],
    ]


def _row(half: str, row: dict, rounds: int, *speed: str) -> list[str]:
    """Return the cells of a contestant.

    Args:
        half: of a training step, before the contestant's name.
        row: of the summary.
        rounds: that were timed.
        *speed: more cells, before the ratio.
    """
    times = [f"{row['median_ms']:.3f}", f"{row['p10_ms']:.3f} - {row['p90_ms']:.3f}"]
    said = row["said"] if row["role"] != "eager" and row["said"] in NOTHING_TOLD else ""
    return [half + row["name"], *times, *speed, interval(row, rounds), said]


def interval(row: dict, rounds: int = 0) -> str:
    """Return a row's ratio and its 95% interval; one round alone has no interval."""
    if rounds == 1:
        return f"{row['ratio']:.3f} (one round)"
    return f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"


def closing(records: list[dict], seconds: float, is_full: bool) -> str:
    """Return the last lines of a comparison, for somebody who sees them for the first time."""
    bad = [record for record in records if record["verdict"] != "correct"]
    names = ", ".join(dict.fromkeys(record["problem"] for record in records))
    if not records:
        return "Nothing was graded."
    if bad:
        wrong = ", ".join(f"{r['problem']} {r['dtype']}: {r['verdict']}" for r in bad)
        lines = [f"NOT all correct: {wrong}."]
    else:
        lines = [f"All correct: {names}."]
    lines += [_in_words(record, run) for record in records for run in record["runs"]]
    details = "--json FILE writes every sample; README.md and referee/README.md say what was done"
    longer = "" if is_full else "; --full times longer"
    lines.append(f"{seconds:.0f} s in all. Details: {details}{longer}.")
    return "\n".join(lines)


def _in_words(record: dict, run: dict) -> str:
    """Return a sentence on how fast a run is beside torch."""
    ours, eager = (by_role(run["forward"]["summary"], role) for role in ("solution", "eager"))
    setting = f", {run['setting']}" if run["setting"] else ""
    what = f"{record['problem']} {record['dtype']}{setting}: {milliseconds(ours)}"
    beside = f"torch {milliseconds(eager)}"
    if run["time"] == "too noisy":
        return f"{what}, {beside}: {NOISY}."
    if run["time"] == "a tie":
        return f"{what}, {beside}: as fast as torch, within what the same code varies."
    return f"{what}, {beside}: {ours['ratio']:.2f} times torch's speed."


def untimed(records: list[dict]) -> list[str]:
    """Return the problems of a sweep of which no size was timed."""
    timed = {record["problem"] for record in records if record["runs"]}
    return [name for name in dict.fromkeys(r["problem"] for r in records) if name not in timed]


def closing_of_sweep(records: list[dict], seconds: float) -> str:
    """Return the last lines of a sweep: how many sizes were timed, and what helps otherwise."""
    count = len([record for record in records if record["runs"]])
    lines = [f"{count} of {len(records)} sizes were timed, in {seconds:.0f} s."]
    words = {run["time"] for record in records for run in record["runs"]}
    lines += [
        f"{told}."
        for word, told in zip(NOTHING_TOLD, (LEGEND, NOISY), strict=True)
        if word in words
    ]
    has_several = len({(record["problem"], record["dtype"]) for record in records}) > 1
    if has_several and any(record["verdict"] == "left out" for record in records):
        lines.append("A sweep of one problem and one --dtype has more time for each size.")
    lines += [f"NOTHING of {name} was timed." for name in untimed(records)]
    return "\n".join(lines)


def indented(text: str) -> str:
    """Indent a traceback, or what a file printed, below its line."""
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


def sweep_line(record: dict, is_first: bool) -> str:
    """Return the line of a size, below a title if it is the first of its problem with times."""
    settings = [run["setting"] for run in record["runs"]]
    label = " ".join(filter(None, [str(record["shape"]), record["dtype"], *settings]))
    if not settings:
        return f"{label:<{WIDTH}}  {record['verdict']}: {record['reason']}"
    [forward], title = [run["forward"] for run in record["runs"]], ""
    if is_first:
        eager = by_role(forward["summary"], "eager")["name"]
        titles = NUMBERS.format("median us", forward["unit"], f"{eager} / this")
        title = f"\n{record['problem']:<{WIDTH}}  {titles}\n"
    row = by_role(forward["summary"], "solution")
    numbers = f"{row['median_ms'] * 1e3:.2f}", f"{row['rate']:.4g}", interval(row)
    said = f"  {settled}" if (settled := record["runs"][0]["time"]) in NOTHING_TOLD else ""
    return f"{title}{label:<{WIDTH}}  {NUMBERS.format(*numbers)}{said}"


def line(record: dict) -> str:
    """Return the line of a graded file: the verdict, and the reason or the times."""
    if record["verdict"] != "correct":
        reason = f" ({record['reason']})" if record["reason"] else ""
        return f"{record['file']}: {record['verdict']}{reason}"
    facts = [record["accuracy"], f"{record['cases']} cases", *record["notes"]]
    if record["refused"]:
        facts.append(f"refuses {', '.join(record['refused'])}")
    time, ratio, said, share = _cells(record)
    said = NOISY if said == "too noisy" else said
    times = f"{time} ms, eager / this {ratio}: {said}; {share} of {_yardstick(record)}'s speed"
    if step := record["runs"][0]["step"]:
        ours, eager = (by_role(step["summary"]["step"], role) for role in ("solution", "eager"))
        rounds = len(step["seconds"]["step"][eager["name"]])
        said_of_step = NOISY if ours["said"] == "too noisy" else ours["said"]
        times += f"; training step {interval(ours, rounds)}: {said_of_step}"
        if ours["name"] in (kept := step["kept_bytes"]):
            times += f", keeps {kept[ours['name']]:,} bytes, eager {kept[eager['name']]:,}"
    return f"{record['file']}: correct ({'; '.join(facts)}), {times}"


def ranking(records: list[dict]) -> str:
    """Return a table of all graded files, the fastest first, and KernelBench's scores."""
    of = f"of {_yardstick(next((r for r in records if r['runs']), None))}"
    rows = [["file", "verdict", "accuracy", "median ms", "eager / this", "", of]]
    for record in sorted(records, key=_speed_up, reverse=True):
        cells = _cells(record) if record["runs"] else [""] * 4
        rows.append([record["file"], record["verdict"], record["accuracy"], *cells])
    runs = [record["runs"][0] for record in records if record["runs"]]
    noise = [NOISY] if any(run["time"] == "too noisy" for run in runs) else []
    return "\n".join([table(rows), *noise, scores(records)])


def scores(records: list[dict]) -> str:
    """Return the summary that the field reads.

    fast_p is the share of files that are correct and more than p times as fast as eager; a tie is
    not faster than 1.
    """
    correct = sum(record["verdict"] == "correct" for record in records)
    ratios = [_speed_up(record) for record in records if _speed_up(record)]
    untied = [_speed_up(r) for r in records if r["runs"] and r["runs"][0]["time"] != "a tie"]
    parts = [f"{correct} of {len(records)} correct", f"fast_0 {correct / len(records):.2f}"]
    parts += [f"fast_{p} {sum(r > p for r in untied) / len(records):.2f}" for p in (1, 2)]
    if ratios:
        parts.append(f"geometric mean of {len(ratios)} ratios: {geometric_mean(ratios):.3f}")
    else:
        parts.append("no ratio to average")
    return "; ".join(parts)


def _yardstick(record: dict | None) -> str:
    """Return the yardstick of the device's speed in words: "a copy", "a product"."""
    name = record["runs"][0]["forward"]["yardstick"] if record else "copy"
    return f"a {name.split()[0]}"


def _cells(record: dict) -> list[str]:
    """Return four cells on the first setting: time, ratio, word, part of the yardstick's speed."""
    run = record["runs"][0]
    forward = run["forward"]
    ours = by_role(forward["summary"], "solution")
    rounds = len(forward["seconds"][ours["name"]])
    share = f"{ours['percent_of_yardstick']:.1f}%"
    return [f"{ours['median_ms']:.3f}", interval(ours, rounds), run["time"], share]


def _speed_up(record: dict) -> float:
    """Return the ratio of the first setting; 0 if the file is not correct or the time too noisy."""
    for run in record["runs"][:1]:
        if record["verdict"] == "correct" and run["time"] != "too noisy":
            return by_role(run["forward"]["summary"], "solution")["ratio"]
    return 0.0


def markdown(content: dict) -> str:
    """Return the text of `--markdown`: a table as README has it, below a line on its origin."""
    about = content["environment"]
    cuda = f", CUDA {about['cuda']}" if about["cuda"] else ""
    state = "" if content["complete"] else " Interrupted: not all of it was measured."
    what = f"{machine(about)}, torch {about['torch']}{cuda}; `{content['command']}`"
    make = _ranking_rows if content["kind"] == "grading" else _comparison_rows
    head, *rows = make(content["records"])
    lines = [f"{what}, {content['date']}.{state}\n", _line(head), "|" + "---|" * len(head)]
    return "\n".join([*lines, *map(_line, rows), ""])


def _line(row: list[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _comparison_rows(records: list[dict]) -> list[list[str]]:
    """Return a row for each problem, shape, dtype and setting. The JSON has the yardsticks."""
    rows = [["module, x", "time", "eager's time", "eager / time", "training step: eager / time"]]
    for record in records:
        label = f"{record['problem']} `{record['shape']}` {record['dtype']}"
        if record["verdict"] != "correct":
            reason = f"**{record['verdict']}** {record['reason']}".rstrip()
            rows.append([label, reason, "", "", ""])
        for run in record["runs"]:
            setting = f", `{run['setting']}`" if run["setting"] else ""
            eager = by_role(run["forward"]["summary"], "eager")
            ours = by_role(run["forward"]["summary"], "solution")
            ratio = f"**{ours['ratio']:.3f}** ({_range(run)})"
            step = ""
            if run["step"]:
                step = f"{by_role(run['step']['summary']['step'], 'solution')['ratio']:.3f}"
            rows.append([label + setting, milliseconds(ours), milliseconds(eager), ratio, step])
    return rows


def _ranking_rows(records: list[dict]) -> list[list[str]]:
    """Return a row for each file, the fastest first."""
    rows = [["file", "verdict", "accuracy", "time", "ratio to eager", ""]]
    for record in sorted(records, key=_speed_up, reverse=True):
        reason = f": {record['reason']}" if record["reason"] else ""
        cells = [""] * 3
        for run in record["runs"][:1]:
            ours = by_role(run["forward"]["summary"], "solution")
            ratio = f"{ours['ratio']:.3f} [{_range(run)}]"
            cells = [_median_and_speed(run), ratio, run["time"]]
        rows.append([f"`{record['file']}`", record["verdict"] + reason, record["accuracy"], *cells])
    return rows


def _range(run: dict) -> str:
    """Return the 95% interval of a run's ratio in words; one round alone has none."""
    ours = by_role(run["forward"]["summary"], "solution")
    if len(run["forward"]["seconds"][ours["name"]]) == 1:
        return "one round"
    return f"{ours['ratio_low']:.3f} to {ours['ratio_high']:.3f}"


def _median_and_speed(run: dict) -> str:
    """Return the solution's median time, and its speed in the problem's unit."""
    row = by_role(run["forward"]["summary"], "solution")
    return f"{milliseconds(row)}, {row['rate']:.4g} {run['forward']['unit']}"


def milliseconds(row: dict) -> str:
    """Return a row's median with three decimals, or below 0.1 ms with three significant digits."""
    value = row["median_ms"]
    return f"{value:.3f} ms" if value >= 0.1 else f"{value:.3g} ms"
