"""Makes the text on graded files: verdicts, a ranking, KernelBench's scores."""

from statistics import geometric_mean

from referee.message_lines import printable
from referee.report.tables import (
    forward_rounds,
    forward_row,
    indented,
    interval,
    step_rounds,
    step_row,
    table,
)
from referee.verdict_words import CORRECT, TIE, TOO_NOISY


def describe(record: dict) -> str:
    """Return the text on a graded file: a line with its verdict, and indented lines with more.

    For example:

        mine.py: correct (exact; 7 cases), 1.5 ms, 2.0 [1.9, 2.1] times eager's speed: faster; ...
            training step 1.8 [1.7, 1.9]: faster; keeps 32 bytes, eager 1,024
            get_inputs draws the same inputs every time
    """
    file = printable(record["file"])
    if record["verdict"] != CORRECT:
        reason = f" ({record['reason']})" if record["reason"] else ""
        return f"{file}: {record['verdict']}{reason}"
    run = record["runs"][0]
    time, ratio, word, share = _time_cells(run)
    judged = f"{CORRECT} ({record['accuracy']}; {record['cases']} cases)"
    beside_eager = f"{ratio} times eager's speed: {word}"
    beside_yardstick = f"{share} of {_yardstick(run)}'s speed"
    first_line = f"{file}: {judged}, {time} ms, {beside_eager}; {beside_yardstick}"
    more = [_describe_step(run)] if run["step"] else []
    more += record["notes"]
    if record["refused"]:
        more.append(f"refuses {', '.join(record['refused'])}")
    return "\n".join([first_line, *(indented(text) for text in more)])


def _describe_step(run: dict) -> str:
    """Return the line on a file's training step."""
    ours, eager = step_row(run, "solution"), step_row(run, "eager")
    text = f"training step {interval(ours, step_rounds(run))}: {ours['time']}"
    bytes_of = run["step"]["kept_bytes"]
    if ours["name"] in bytes_of and eager["name"] in bytes_of:
        text += f"; keeps {bytes_of[ours['name']]:,} bytes, eager {bytes_of[eager['name']]:,}"
    return text


def ranking(records: list[dict]) -> str:
    """Return a table of all graded files, the fastest first, and KernelBench's scores."""
    runs = [record["runs"][0] for record in records if record["runs"]]
    yardstick = _yardstick(runs[0]) if runs else "a copy"
    titles = ["file", "verdict", "accuracy", "median ms", "speedup", "", f"of {yardstick}"]
    rows = [titles]
    for record in sorted(records, key=counted_ratio, reverse=True):
        cells = _time_cells(record["runs"][0]) if record["runs"] else [""] * 4
        file = printable(record["file"])
        rows.append([file, record["verdict"], record["accuracy"], *cells])
    return f"{table(rows)}\n{scores(records)}"


def scores(records: list[dict]) -> str:
    """Return KernelBench's scores: how many are correct, fast_p, and the geometric mean.

    fast_p is the share of files that are correct and more than p times as fast as eager.
    """
    count = len(records)
    correct = len([record for record in records if record["verdict"] == CORRECT])
    ratios = [ratio for ratio in map(counted_ratio, records) if ratio > 0]
    parts = [f"{correct} of {count} correct", f"fast_0 {correct / count:.2f}"]
    for p in (1, 2):
        faster = len([ratio for ratio in ratios if ratio > p])
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
    ours = forward_row(run, "solution")
    share = f"{ours['percent_of_yardstick']:.1f}%"
    return [f"{ours['median_ms']:.3f}", interval(ours, forward_rounds(run)), run["time"], share]


def counted_ratio(record: dict) -> float:
    """Return the ratio of a record's first run as scores and the ranking count it.

    A tie counts as 1, because its ratio is noise. A file that is not correct or not timed, or whose
    time is too noisy, counts as 0.
    """
    if record["verdict"] != CORRECT or not record["runs"]:
        return 0.0
    run = record["runs"][0]
    if run["time"] == TOO_NOISY:
        return 0.0
    if run["time"] == TIE:
        return 1.0
    return forward_row(run, "solution")["ratio"]
