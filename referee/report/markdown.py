"""What `--markdown` writes: tables as README has them, from what `--json` writes."""

from referee.report import by_role, machine


def tables(content: dict) -> str:
    """The table of a `records.document`, below a line that says what was measured and where."""
    about = content["environment"]
    cuda = f", CUDA {about['cuda']}" if about["cuda"] else ""
    state = "" if content["complete"] else " Interrupted: not all of it was measured."
    what = f"{machine(about)}, torch {about['torch']}{cuda}; `{content['command']}`"
    make = _ranking if content["kind"] == "grading" else _comparisons
    head, *rows = make(content["records"])
    lines = [f"{what}, {content['date']}.{state}\n", _line(head), "|" + "---|" * len(head)]
    return "\n".join([*lines, *map(_line, rows), ""])


def _line(row: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _comparisons(records: list[dict]) -> list[list[str]]:
    """A row for each problem, shape, dtype and setting."""
    titles = ["ours", "eager", "`torch.compile`", "fastest yardstick", "eager / ours"]
    rows = [["x", *titles, "training step"]]
    for record in records:
        label = f"{record['problem']} `{record['shape']}` {record['dtype']}"
        if record["verdict"] != "correct":
            what = f"**{record['verdict']}** {record['reason']}".rstrip()
            rows.append([label, what, *[""] * 5])
        for run in record["runs"]:
            setting = run["setting"] and f", `{run['setting']}`"
            summary = run["forward"]["summary"]
            roles = ("eager", "compiled", "yardstick", "solution")
            eager, compiled, yardstick, ours = (by_role(summary, role) for role in roles)
            row = [label + setting, _time(run), milliseconds(eager)]
            row.append(milliseconds(compiled) if compiled else "")
            row.append(f"{milliseconds(yardstick)}, {yardstick['name']}")
            row.append("**{ratio:.3f}** ({ratio_low:.3f} to {ratio_high:.3f})".format(**ours))
            step = by_role(run["step"]["summary"]["step"], "solution") if run["step"] else {}
            rows.append([*row, f"{step['ratio']:.3f}" if step else ""])
    return rows


def _ranking(records: list[dict]) -> list[list[str]]:
    """A row for each file, the fastest first."""
    found = []
    for record in records:
        reason = f": {record['reason']}" if record["reason"] else ""
        row, ours = [f"`{record['file']}`", record["verdict"] + reason, record["accuracy"]], {}
        for run in record["runs"][:1]:
            ours = by_role(run["forward"]["summary"], "solution")
            ratio = "{ratio:.3f} [{ratio_low:.3f} to {ratio_high:.3f}]".format(**ours)
            row += [_time(run), ratio, run["time"]]
        found.append((ours.get("ratio", 0.0), row if ours else [*row, "", "", ""]))
    titles = ["file", "verdict", "accuracy", "time", "ratio to eager", ""]
    return [titles, *(row for _, row in sorted(found, key=lambda pair: -pair[0]))]


def _time(run: dict) -> str:
    """The solution's median and speed."""
    row = by_role(run["forward"]["summary"], "solution")
    return f"{milliseconds(row)}, {row['rate']:.4g} {run['forward']['unit']}"


def milliseconds(row: dict) -> str:
    """A row's median with three digits behind the point, or three that count."""
    value = row["median_ms"]
    return f"{value:.3f} ms" if value >= 0.1 else f"{value:.3g} ms"
