"""The tables, and what the JSON file holds."""

import platform
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from referee.judge.verdict import CORRECT, INTERRUPTED, Run, Verdict
from referee.stats import speed_up, spread
from referee.timing import Step, Timings

TIMES = ["median ms", "p10 - p90 ms"]


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Device, versions and all else that the numbers depend on."""
    if device.type == "cuda":
        name, threads = torch.cuda.get_device_name(device), None
    else:
        name, threads = _processor(), torch.get_num_threads()
    return {
        "device": name,
        "threads": threads,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def headline(
    about: dict, device: torch.device, why: str, shape: tuple[int, ...] = (), dtype: str = ""
) -> str:
    """One line: the device, and why it is not a GPU, or ""; the versions, the input if one."""
    threads = f" ({about['threads']} threads)" if about["threads"] else ""
    measured = f"{device}: {about['device']}{threads}{why and f'; {why}'}"
    cuda = f"CUDA {about['cuda']}" if about["cuda"] else "no CUDA"
    taken = f"; {list(shape)} {dtype}" if dtype else ""
    return f"{measured}; torch {about['torch']}, {cuda}{taken}"


def summary(timed: dict[str, list[float]], eager: str) -> list[dict[str, float | str]]:
    """One row a contestant out of its seconds; times in ms, ratios to eager's."""
    keys = ("name", "median_ms", "p10_ms", "p90_ms", "ratio", "ratio_low", "ratio_high")
    rows = []
    for name, seconds in timed.items():
        times = (value * 1e3 for value in (median(seconds), *spread(seconds)))
        values = (name, *times, *speed_up(timed[eager], seconds))
        rows.append(dict(zip(keys, values, strict=True)))
    return rows


def rates(timings: Timings) -> list[dict[str, float | str]]:
    """`summary` with the speed, in the rate's unit and in percent of the yardstick's."""
    rate = timings.rate
    yardstick = median(timings.seconds[rate.yardstick]) * 1e3
    return [
        {
            **row,
            "rate": timings.work / (row["median_ms"] * 1e-3) / rate.scale,
            "percent_of_yardstick": 100 * yardstick / row["median_ms"],
        }
        for row in summary(timings.seconds, timings.names.eager)
    ]


def table(rows: list[list[str]]) -> str:
    """Aligned columns under the first row; names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.rjust, row[1:], widths[1:]) for row in rows)
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *line]).rstrip()
        for row, line in zip(rows, lines, strict=True)
    )


def details(verdict: Verdict) -> str:
    """How many cases were compared, the tables, and what is wrong."""
    is_fine = verdict.word in (CORRECT, INTERRUPTED)
    lines = [f"{verdict.count} cases compared with the reference, {'none' if is_fine else 1} wrong"]
    if verdict.errors:
        lines.append(f"\n{_errors(verdict.errors)}")
    lines += [f"\n{results(run)}" for run in verdict.runs] or ["nothing was timed"]
    # Where a dispatch mode looks on, as for the note on calls, our modules leave it to torch.
    lines += [f"\n{note}" for note in verdict.notes if not note.startswith("calls ")]
    return "\n".join(lines + ([] if is_fine else [f"{verdict.word.upper()}  {verdict.reason}"]))


def _errors(errors: list[dict]) -> str:
    """Those of both sides against float64."""
    rows = [["error against float64", "ours: max", "mean", "relF", "eager: max", "mean", "relF"]]
    rows += [[name, *(f"{v:.2g}" for v in values)] for name, *values in map(dict.values, errors)]
    return table(rows)


def results(run: Run) -> str:
    """The tables of one setting, and how to read them."""
    parts = [_forward(run.timings, run.setting)]
    return "\n\n".join(parts + ([_step(run.step, run.setting)] if run.step else []))


def _forward(timings: Timings, setting: str) -> str:
    names, rate = timings.names, timings.rate
    title = f"forward, {setting}" if setting else "forward"
    speeds = [rate.unit, f"of {rate.yardstick.split()[0]}"]
    rows = [[title, *TIMES, *speeds, f"{names.eager} / this", ""]]
    by_name = {row["name"]: row for row in rates(timings)}
    for name, row in by_name.items():
        speed = [f"{row['rate']:.{rate.digits}f}", f"{row['percent_of_yardstick']:.1f}%"]
        rows.append([name, *_times(row), *speed, *_ratio(row, names.eager)])
    about = (
        f"{len(timings.seconds[names.eager])} rounds; ratios are medians over rounds with a 95% "
        f"interval, and the same code timed twice gave {interval(by_name[names.again])}"
    )
    return "\n".join([table(rows), about, *timings.notes])


def _step(step: Step, setting: str) -> str:
    """The table of the training step, and what was kept for its backward."""
    names = step.forward.names
    title = f"training step, {setting}" if setting else "training step"
    rows = [[title, *TIMES, f"{names.eager} / this", ""]]
    for half, timed in step.seconds().items():
        for row in summary(timed, names.eager):
            rows.append([f"{half}, {row['name']}", *_times(row), *_ratio(row, names.eager)])
    ours, eager = (step.kept.get(name, 0) for name in (names.solution, names.eager))
    part = f" (1/{eager / ours:.4g})" if ours else ""
    rounds = len(step.forward.seconds[names.eager])
    about = [
        f"{rounds} rounds; a step is the forward and backward of a round",
        f"kept for backward: {names.solution} {ours:,} bytes, {names.eager} {eager:,} bytes{part}",
    ]
    return "\n".join([table(rows), *about, *step.notes])


def _times(row: dict) -> list[str]:
    return [f"{row['median_ms']:.3f}", f"{row['p10_ms']:.3f} - {row['p90_ms']:.3f}"]


def is_tie(row: dict) -> bool:
    """Whether the interval of a row's ratio includes 1."""
    return row["ratio_low"] <= 1 <= row["ratio_high"]


def _ratio(row: dict, eager: str) -> list[str]:
    return [interval(row), "a tie" * (row["name"] != eager and is_tie(row))]


def interval(row: dict) -> str:
    """A row's ratio, and its 95% interval."""
    return f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return platform.processor() or platform.machine()
