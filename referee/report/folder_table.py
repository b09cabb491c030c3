"""Makes the table of graded folders: as CSV, and as text with the scores below it."""

import csv
import io
from statistics import geometric_mean

from referee.message_lines import printable
from referee.report import by_role, graded_files, tables

NOT_GRADED = "not graded"  # the verdict on a file whose reference cannot be graded
CSV_COLUMNS = (
    "problem",
    "file",
    "verdict",
    "ms",  # the solution's median time
    "speedup",  # eager's time divided by the solution's
    "low",  # the speedup's 95% interval
    "high",
    "time",  # "faster", "slower", "a tie" or "too noisy"
    "of_light",  # the share of the speed of light, see `_share_of_light`
    "step_speedup",  # the speedup of a training step
    "reason",
)
PRINTED_COLUMNS = (
    "file",
    "problem",
    "verdict",
    "ms",
    "speedup",
    "time",
    "of_light",
    "step_speedup",
)
LEGEND = (
    f"speedup: torch's time divided by the file's; {tables.LEGEND}; of_light: share of the speed "
    "of light, at which a call would only write its outputs, as fast as a copy"
)


def as_csv(all_records: list[dict]) -> str:
    """Return the table of all records as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS)
    writer.writeheader()
    writer.writerows(_make_rows(all_records))
    return text.getvalue()


def summary(all_records: list[dict]) -> str:
    """Return the printed table of all records, its legend, and the scores below it."""
    rows = _make_rows(all_records)
    cells = [[printable(str(row[column])) for column in PRINTED_COLUMNS] for row in rows]
    lines = [tables.table([list(PRINTED_COLUMNS), *cells]), LEGEND]
    lines += tables.explain_noise(tables.words_of_forwards(all_records))
    count_without_walls = len([record for record in all_records if record.get("walls") is False])
    if count_without_walls:
        lines.append(f"{count_without_walls} of {len(all_records)} files had no walls")
    graded = [record for record in all_records if record["verdict"] != NOT_GRADED]
    if graded:
        lines.append(graded_files.scores(graded))
    all_shares = [_share_of_light(record["runs"][0]) for record in all_records if record["runs"]]
    shares = [share for share in all_shares if share > 0]
    if shares:
        mean = 100 * geometric_mean(shares)
        lines.append(f"share of the speed of light, geometric mean of {len(shares)}: {mean:.1f}%")
    count_not_graded = len(all_records) - len(graded)
    if count_not_graded:
        lines.append(f"{count_not_graded} files were not graded: their references cannot be graded")
    return "\n".join(lines)


def _make_rows(all_records: list[dict]) -> list[dict]:
    """Return a row for each record, sorted by problem and file; its keys are CSV_COLUMNS."""
    rows = []
    for record in sorted(all_records, key=lambda record: (record["problem"], str(record["file"]))):
        row = dict.fromkeys(CSV_COLUMNS, "")
        row |= {key: record[key] for key in ("problem", "file", "verdict", "reason")}
        if record["runs"]:
            row |= _time_cells(record["runs"][0])
        rows.append(row)
    return rows


def _time_cells(run: dict) -> dict:
    """Return the cells of a row that come from a run."""
    ours = by_role(run["forward"]["summary"], "solution")
    cells = {
        "ms": f"{ours['median_ms']:.4g}",
        "speedup": f"{ours['ratio']:.3f}",
        "low": f"{ours['ratio_low']:.3f}",
        "high": f"{ours['ratio_high']:.3f}",
        "time": run["time"],
    }
    share = _share_of_light(run)
    if share:
        cells["of_light"] = f"{100 * share:.1f}%"
    if run["step"]:
        step_row = by_role(run["step"]["summary"]["step"], "solution")
        cells["step_speedup"] = f"{step_row['ratio']:.3f}"
    return cells


def _share_of_light(run: dict) -> float:
    """Return the floor's time divided by the solution's; 0 if the floor is not known.

    The floor is the time in which the outputs could be written at the rate of the fastest copy.
    """
    ours = by_role(run["forward"]["summary"], "solution")
    return run["forward"]["floor_seconds"] / (ours["median_ms"] * 1e-3)
