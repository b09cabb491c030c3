"""Makes the file of `--markdown`: a line on the measurement, and a table of the results."""

from referee.message_lines import printable
from referee.report import machine_and_versions
from referee.report.graded_files import counted_ratio
from referee.report.tables import forward_rounds, forward_row, milliseconds, step_row
from referee.verdict_words import CORRECT, TIE, TOO_NOISY


def as_markdown(content: dict) -> str:
    """Return the text of `--markdown`: a line on the measurement, and a table of the results.

    Args:
        content: of the JSON file, see `records.document`.
    """
    command = printable(content["command"])
    origin = f"{machine_and_versions(content['environment'])}; `{command}`"
    state = "" if content["complete"] else " Interrupted: not all of it was measured."
    if content["kind"] == "grading":
        rows = _grading_rows(content["records"])
    else:
        rows = comparison_rows(content["records"])
    return f"{origin}, {content['date']}.{state}\n\n{table(rows)}"


def table(rows: list[list[str]]) -> str:
    """Return rows of cells as a Markdown table; the first row has the columns' titles."""
    titles, *others = rows
    lines = [_markdown_row(titles), "|" + "---|" * len(titles)]
    lines += [_markdown_row(row) for row in others]
    return "\n".join([*lines, ""])


def _markdown_row(cells: list[str]) -> str:
    """Return a row of a Markdown table; a bar in a cell is escaped."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def comparison_rows(records: list[dict]) -> list[list[str]]:
    """Return the titles, and a row for each run. Yardsticks are only in the JSON file."""
    rows = [["module, x", "time", "eager's time", "eager / time", "training step: eager / time"]]
    for record in records:
        label = f"{record['problem']} `{record['shape']}` {record['dtype']}"
        if record["verdict"] != CORRECT:
            verdict = f"**{record['verdict']}** {record['reason']}".rstrip()
            rows.append([label, verdict, "", "", ""])
        for run in record["runs"]:
            setting = f", `{run['setting']}`" if run["setting"] else ""
            ours, eager = forward_row(run, "solution"), forward_row(run, "eager")
            ratio = f"**{ours['ratio']:.3f}** ({_range(run)}){note_if_no_gain(run['time'])}"
            rows.append(
                [label + setting, milliseconds(ours), milliseconds(eager), ratio, _step_cell(run)]
            )
    return rows


def _step_cell(run: dict) -> str:
    """Return the ratio of a training step, and "a tie" or "too noisy"; "" if none was timed."""
    if not run["step"]:
        return ""
    ours = step_row(run, "solution")
    return f"{ours['ratio']:.3f}{note_if_no_gain(ours['time'])}"


def note_if_no_gain(time: str) -> str:
    """Return a note for a ratio that is no gain and no loss: ", a tie" or ", too noisy"."""
    return f", {time}" if time in (TIE, TOO_NOISY) else ""


def _grading_rows(records: list[dict]) -> list[list[str]]:
    """Return the titles, and a row for each file, the fastest first."""
    rows = [["file", "verdict", "accuracy", "time", "ratio to eager", ""]]
    for record in sorted(records, key=counted_ratio, reverse=True):
        reason = f": {record['reason']}" if record["reason"] else ""
        time, ratio, word = "", "", ""
        if record["runs"]:
            run = record["runs"][0]
            ours = forward_row(run, "solution")
            time = f"{milliseconds(ours)}, {ours['rate']:.4g} {run['forward']['unit']}"
            ratio = f"{ours['ratio']:.3f} [{_range(run)}]"
            word = run["time"]
        verdict = record["verdict"] + reason
        rows.append(
            [f"`{printable(record['file'])}`", verdict, record["accuracy"], time, ratio, word]
        )
    return rows


def _range(run: dict) -> str:
    """Return the 95% interval of a run's ratio in words; one round alone has none."""
    ours = forward_row(run, "solution")
    if forward_rounds(run) == 1:
        return "one round"
    return f"{ours['ratio_low']:.3f} to {ours['ratio_high']:.3f}"
