"""The parts of printed reports: tables, ratios, and the words on times.

`comparison_tables`, `sweep_lines`, `graded_files`, `folder_table` and `markdown` use them.
`referee/records.py` explains records, runs, summaries and rows.
"""

from referee.message_lines import printable
from referee.report import by_role, machine
from referee.verdict_words import TIE, TOO_NOISY

LEGEND = f"{TIE}: it may be the same speed"
NOISY = f"{TOO_NOISY}: torch's own time varied too much; an idle machine or more --trials help"
UNDECIDED = (TIE, TOO_NOISY)  # the words that tables print beside a ratio


def headline(environment: dict, device: object, why_no_gpu: str) -> str:
    """Return the line on the device and the versions.

    Args:
        environment: see `records.environment`.
        device: its name, "cuda:0" for example.
        why_no_gpu: "; no GPU: ..." or "".
    """
    cuda = f"CUDA {environment['cuda']}" if environment["cuda"] else "no CUDA"
    return f"{device}: {machine(environment)}{why_no_gpu}; torch {environment['torch']}, {cuda}"


def walls_in_words(has_walls: bool | None) -> str:
    """Return "; walls", "; no walls", or "" where no solution was started, for a headline."""
    if has_walls is None:
        return ""
    return "; walls" if has_walls else "; no walls"


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
    lines = text.rstrip().expandtabs().splitlines()
    return "\n".join(f"    {printable(line)}" for line in lines)


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
