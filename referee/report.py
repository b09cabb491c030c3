"""The table on stdout, the JSON file, and files that appear whole or not at all."""

import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from referee.stats import speed_up, spread
from referee.step import Step
from referee.timing import AGAIN, COPY, EAGER, SOLUTION, Timings

LEFT_ALIGNED = 1  # the first column holds names


def environment(device: torch.device) -> dict[str, str | int | None]:
    """What the numbers depend on."""
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


def headline(about: dict, shape: tuple[int, ...], dtype: str) -> str:
    """One line: the device, the versions, the input."""
    threads = f" ({about['threads']} threads)" if about["threads"] else ""
    cuda = f"CUDA {about['cuda']}" if about["cuda"] else "no CUDA"
    return f"{about['device']}{threads}, torch {about['torch']}, {cuda}, {list(shape)} {dtype}"


def summary(timed: dict[str, list[float]]) -> list[dict[str, float | str]]:
    """One row a contestant out of its seconds; times in ms, ratios to eager's."""
    rows = []
    for name, seconds in timed.items():
        low, high = spread(seconds)
        ratio, ratio_low, ratio_high = speed_up(timed[EAGER], seconds)
        rows.append(
            {
                "name": name,
                "median_ms": median(seconds) * 1e3,
                "p10_ms": low * 1e3,
                "p90_ms": high * 1e3,
                "ratio": ratio,
                "ratio_low": ratio_low,
                "ratio_high": ratio_high,
            }
        )
    return rows


def bandwidths(timings: Timings) -> list[dict[str, float | str]]:
    """`summary` with the bandwidth, in 1e9 bytes a second and in percent of the copy's."""
    copy = median(timings.seconds[COPY]) * 1e3
    return [
        {
            **row,
            "gb_per_s": timings.moved_bytes / row["median_ms"] / 1e6,
            "percent_of_copy": 100 * copy / row["median_ms"],
        }
        for row in summary(timings.seconds)
    ]


def table(rows: list[list[str]]) -> str:
    """Aligned columns under the first row; names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < LEFT_ALIGNED else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def results(timings: Timings) -> str:
    """The table, and how to read it."""
    rows = [["forward", "median ms", "p10 - p90 ms", "GB/s", "of copy", f"{EAGER} / this"]]
    by_name = {row["name"]: row for row in bandwidths(timings)}
    for name, row in by_name.items():
        bandwidth = [f"{row['gb_per_s']:.1f}", f"{row['percent_of_copy']:.1f}%"]
        rows.append([name, *_times(row), *bandwidth, _ratio(row)])
    rounds = len(timings.seconds[EAGER])
    lines = [
        table(rows),
        f"{rounds} rounds; ratios are medians over rounds with a 95% interval, and the same code "
        f"timed twice gave {_ratio(by_name[AGAIN])}",
        *timings.notes,
    ]
    return "\n".join(lines)


def step_results(step: Step) -> str:
    """The table of the training step, and what was kept for its backward."""
    rows = [["training step", "median ms", "p10 - p90 ms", f"{EAGER} / this"]]
    for half, timed in step.seconds().items():
        for row in summary(timed):
            rows.append([f"{half}, {row['name']}", *_times(row), _ratio(row)])
    ours, eager = step.kept[SOLUTION], step.kept[EAGER]
    part = f" (1/{eager / ours:.4g})" if ours else ""
    lines = [
        table(rows),
        f"{len(step.forward.seconds[EAGER])} rounds; a step is the forward and backward of a round",
        f"kept for backward: {SOLUTION} {ours:,} bytes, {EAGER} {eager:,} bytes{part}",
        *step.forward.notes,
    ]
    return "\n".join(lines)


def _times(row: dict) -> list[str]:
    return [f"{row['median_ms']:.3f}", f"{row['p10_ms']:.3f} - {row['p90_ms']:.3f}"]


def _ratio(row: dict) -> str:
    return f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"


def json_text(facts: dict, timings: Timings | None, step: Step | None) -> str:
    """`facts` and all timings, raw ones included, as JSON; what was not timed is absent."""
    whole = dict(facts)
    if timings:
        whole["timings"] = {
            "summary": bandwidths(timings),
            "seconds": timings.seconds,
            "wall_seconds": timings.wall,
            "moved_bytes": timings.moved_bytes,
            "problems": timings.problems,
            "notes": timings.notes,
        }
    if step:
        seconds = step.seconds()
        whole["step"] = {
            "summary": {half: summary(timed) for half, timed in seconds.items()},
            "seconds": seconds,
            "wall_seconds": {"forward": step.forward.wall, "backward": step.backward.wall},
            "kept_bytes": step.kept,
            "problems": step.problems,
            "notes": step.forward.notes,
        }
    return json.dumps(whole, indent=1) + "\n"


def write(path: Path, text: str) -> None:
    """Writes a file that is never seen half written.

    Raises:
        OSError: it cannot be written.
    """
    part = _part(path)
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Finds out before the work begins.

    Raises:
        OSError: `write` would fail.
    """
    if path.is_dir():
        raise IsADirectoryError(21, "Is a directory", str(path))
    part = _part(path)
    part.touch()
    part.unlink()


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return platform.processor() or platform.machine()
