"""What `--markdown` writes: tables as README has them, from what `--json` writes."""

from referee.report.schema import by_role


def tables(content: dict) -> str:
    """All tables, below a line that says what was measured, where and how.

    Args:
        content: `records.document`.
    """
    about = content["environment"]
    cuda = f", CUDA {about['cuda']}" if about["cuda"] else ""
    threads = f" ({about['threads']} threads)" if about["threads"] else ""
    state = "" if content["complete"] else " Interrupted: not all of it was measured."
    what = f"{about['device']}{threads}, torch {about['torch']}{cuda}; `{content['command']}`"
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
            summary, step = run["forward"]["summary"], run["step"]
            yardstick, compiled = by_role(summary, "yardstick"), by_role(summary, "compiled")
            rows.append(
                [
                    label + setting,
                    _time(run),
                    milliseconds(by_role(summary, "eager")),
                    milliseconds(compiled) if compiled else "",
                    f"{milliseconds(yardstick)}, {yardstick['name']}" if yardstick else "",
                    "**{:.3f}** ({:.3f} to {:.3f})".format(*_ratio(run)),
                    f"{by_role(step['summary']['step'], 'solution')['ratio']:.3f}" if step else "",
                ]
            )
    return rows


def _ranking(records: list[dict]) -> list[list[str]]:
    """A row for each file, the fastest first."""
    rows = [["file", "verdict", "accuracy", "time", "ratio to eager", ""]]
    for record in sorted(records, key=lambda r: -_ratio(r["runs"][-1])[0] if r["runs"] else 0.0):
        reason = f": {record['reason']}" if record["reason"] else ""
        cells = ["", "", ""]
        for run in record["runs"][-1:]:
            cells = [_time(run), "{:.3f} [{:.3f} to {:.3f}]".format(*_ratio(run)), run["time"]]
        rows.append([f"`{record['file']}`", record["verdict"] + reason, record["accuracy"], *cells])
    return rows


def _time(run: dict) -> str:
    """The solution's median and speed."""
    row = by_role(run["forward"]["summary"], "solution")
    return f"{milliseconds(row)}, {row['rate']:.4g} {run['forward']['unit']}"


def _ratio(run: dict) -> list[float]:
    row = by_role(run["forward"]["summary"], "solution")
    return [row["ratio"], row["ratio_low"], row["ratio_high"]]


def milliseconds(row: dict) -> str:
    """A row's median with three digits behind the point, or three that count."""
    value = row["median_ms"]
    return f"{value:.3f} ms" if value >= 0.1 else f"{value:.3g} ms"
