"""What `--markdown` writes: tables as README has them, from what `--json` writes."""

Rows = list[list[str]]


def tables(content: dict) -> str:
    """All tables, below a line that says what was measured, where and how.

    Args:
        content: `records.Document.content`.
    """
    about = content["environment"]
    cuda = f", CUDA {about['cuda']}" if about["cuda"] else ""
    threads = f" ({about['threads']} threads)" if about["threads"] else ""
    state = "" if content["complete"] else " Interrupted: not all of it was measured."
    what = f"{about['device']}{threads}, torch {about['torch']}{cuda}; `{content['command']}`"
    parts = [f"{what}, {content['date']}.{state}"]
    make = {"comparison": _comparisons, "grading": _ranking, "sweep": _comparisons}[content["kind"]]
    return "\n\n".join(parts + make(content["records"])) + "\n"


def _comparisons(records: list[dict]) -> list[str]:
    """One table: a line for each problem, shape, dtype and setting."""
    titles = ["ours", "eager", "`torch.compile`", "fastest yardstick", "eager / ours"]
    rows = [["x", *titles, "training step"]]
    for record in records:
        label = f"{record['problem']} `{record['shape']}` {record['dtype']}"
        if record["verdict"] != "correct":
            what = f"**{record['verdict']}** {record['reason']}".rstrip()
            rows.append([label, what, *[""] * 5])
        for run in record["runs"]:
            setting = f", `{run['setting']}`" if run["setting"] else ""
            rows.append([label + setting, *_figures(run)])
    return [_table(rows)]


def _figures(run: dict) -> list[str]:
    """Times and ratios of a run."""
    summary = run["forward"]["summary"]
    ours, eager = by_role(summary, "solution"), by_role(summary, "eager")
    compiled, yardstick = (_fastest(summary, role) for role in ("compiled", "yardstick"))
    step = run["step"] and by_role(run["step"]["summary"]["step"], "solution")
    return [
        _time(run["forward"], ours),
        milliseconds(eager["median_ms"]),
        milliseconds(compiled["median_ms"]) if compiled else "",
        f"{milliseconds(yardstick['median_ms'])}, {yardstick['name']}" if yardstick else "",
        f"**{ours['ratio']:.3f}** ({_interval(ours)})",
        f"{step['ratio']:.3f}" if step else "",
    ]


def _fastest(summary: list[dict], role: str) -> dict | None:
    rows = (row for row in summary if row["role"] == role)
    return min(rows, key=lambda row: row["median_ms"], default=None)


def _ranking(records: list[dict]) -> list[str]:
    """One table of all files, the fastest first."""
    rows = [["file", "verdict", "accuracy", "time", "ratio to eager", ""]]
    found = []
    for record in records:
        reason = f": {record['reason']}" if record["reason"] else ""
        row = [f"`{record['file']}`", record["verdict"] + reason, record["accuracy"], "", "", ""]
        ratio = 0.0
        for run in record["runs"]:
            ours = by_role(run["forward"]["summary"], "solution")
            ratio, interval = ours["ratio"], f"{ours['ratio']:.3f} [{_interval(ours)}]"
            row[3:] = [_time(run["forward"], ours), interval, run["time"]]
        found.append((ratio, row))
    return [_table(rows + [row for _, row in sorted(found, key=lambda pair: -pair[0])])]


def _table(rows: Rows) -> str:
    """In Markdown; the first row is the head."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _time(forward: dict, row: dict) -> str:
    """The median and the speed."""
    return f"{milliseconds(row['median_ms'])}, {row['rate']:.4g} {forward['unit']}"


def milliseconds(value: float) -> str:
    """With three digits behind the point, or three that count."""
    return f"{value:.3f} ms" if value >= 0.1 else f"{value:.3g} ms"


def _interval(row: dict) -> str:
    return f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"


def by_role(summary: list[dict], role: str) -> dict:
    """The row of the solution, of eager or of its control."""
    [row] = (row for row in summary if row["role"] == role)
    return row
