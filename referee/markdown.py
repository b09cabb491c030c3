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
    make = {"comparison": _comparisons, "grading": _ranking, "sweep": _sizes}[content["kind"]]
    return "\n\n".join(parts + make(content["records"])) + "\n"


def _comparisons(records: list[dict]) -> list[str]:
    """A table for each problem and shape, with a column for each dtype and setting."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault((record["problem"], tuple(record["shape"])), []).append(record)
    return [_comparison(*key, group) for key, group in groups.items()]


def _comparison(problem: str, shape: tuple[int, ...], records: list[dict]) -> str:
    columns = [(record, run) for record in records for run in record["runs"]]
    wrong = [
        f"{record['dtype']}: **{record['verdict']}** {record['reason']}".rstrip()
        for record in records
        if record["verdict"] != "correct"
    ]
    title = f"{problem}, x `{list(shape)}`"
    if not columns:
        return "\n\n".join([title, *wrong])
    rows = [[title, *(f"`{r['setting']}`" if r["setting"] else d["dtype"] for d, r in columns)]]
    forwards = [run["forward"] for _, run in columns]
    names = dict.fromkeys(row["name"] for f in forwards for row in _shown(f["summary"]))
    for name in names:
        cells = [_cell(forward, name) for forward in forwards]
        rows.append([f"`{name}`", *cells])
    ratios = [by_role(forward["summary"], "solution") for forward in forwards]
    eager = by_role(forwards[0]["summary"], "eager")["name"]
    rows.append([f"**ratio to {eager}**", *(f"**{row['ratio']:.3f}**" for row in ratios)])
    rows.append(["95% interval", *(_interval(row) for row in ratios)])
    steps = [run["step"] and run["step"]["summary"]["step"] for _, run in columns]
    if any(steps):
        cells = [f"{by_role(rows_, 'solution')['ratio']:.3f}" if rows_ else "" for rows_ in steps]
        rows.append([f"training step, ratio to {eager}", *cells])
    return "\n\n".join([_table(rows), *wrong])


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


def _sizes(records: list[dict]) -> list[str]:
    """A table for each problem, a line for each size."""
    parts = []
    for problem in dict.fromkeys(record["problem"] for record in records):
        rows = [[problem, "ours", "eager", "ratio to eager", "95% interval"]]
        for record in (record for record in records if record["problem"] == problem):
            setting = " ".join(run["setting"] for run in record["runs"])
            label = f"`{record['shape']}` {record['dtype']} {setting}".rstrip()
            if not record["runs"]:
                rows.append([label, f"{record['verdict']}: {record['reason']}", "", "", ""])
            for run in record["runs"]:
                forward = run["forward"]
                ours, eager = (by_role(forward["summary"], role) for role in ("solution", "eager"))
                times = [_time(forward, ours), _time(forward, eager)]
                rows.append([label, *times, f"{ours['ratio']:.3f}", _interval(ours)])
        parts.append(_table(rows))
    return parts


def _table(rows: Rows) -> str:
    """In Markdown; the first row is the head."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _shown(summary: list[dict]) -> list[dict]:
    return [row for row in summary if row["role"] != "control"]


def _cell(forward: dict, name: str) -> str:
    for row in forward["summary"]:
        if row["name"] == name:
            return _time(forward, row)
    return ""


def _time(forward: dict, row: dict) -> str:
    """The median, and our speed."""
    speed = f", {row['rate']:.4g} {forward['unit']}" if row["role"] == "solution" else ""
    return f"{milliseconds(row['median_ms'])}{speed}"


def milliseconds(value: float) -> str:
    """With three digits behind the point, or three that count."""
    return f"{value:.3f} ms" if value >= 0.1 else f"{value:.3g} ms"


def _interval(row: dict) -> str:
    return f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"


def by_role(summary: list[dict], role: str) -> dict:
    """The row of the solution, of eager or of its control."""
    [row] = (row for row in summary if row["role"] == role)
    return row
