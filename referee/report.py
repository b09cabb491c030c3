"""The table on stdout, the JSON file, and files that appear whole or not at all."""

import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from referee.stats import speed_up, spread
from referee.timing import AGAIN, COPY, EAGER, Timings

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


def summary(timings: Timings) -> list[dict[str, float | str]]:
    """One row a contestant; times in ms, bandwidth in 1e9 bytes a second."""
    copy = median(timings.seconds[COPY])
    rows = []
    for name, seconds in timings.seconds.items():
        middle, (low, high) = median(seconds), spread(seconds)
        ratio, ratio_low, ratio_high = speed_up(timings.seconds[EAGER], seconds)
        rows.append(
            {
                "name": name,
                "median_ms": middle * 1e3,
                "p10_ms": low * 1e3,
                "p90_ms": high * 1e3,
                "gb_per_s": timings.moved_bytes / middle / 1e9,
                "percent_of_copy": 100 * copy / middle,
                "ratio": ratio,
                "ratio_low": ratio_low,
                "ratio_high": ratio_high,
            }
        )
    return rows


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
    rows = [["", "median ms", "p10 - p90 ms", "GB/s", "of copy", f"{EAGER} / this"]]
    by_name = {row["name"]: row for row in summary(timings)}
    for row in by_name.values():
        rows.append(
            [
                row["name"],
                f"{row['median_ms']:.3f}",
                f"{row['p10_ms']:.3f} - {row['p90_ms']:.3f}",
                f"{row['gb_per_s']:.1f}",
                f"{row['percent_of_copy']:.1f}%",
                f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]",
            ]
        )
    same = by_name[AGAIN]
    rounds = len(timings.seconds[EAGER])
    lines = [
        table(rows),
        f"{rounds} rounds; ratios are medians over rounds with a 95% interval, and the same code "
        f"timed twice gave {same['ratio']:.3f} [{same['ratio_low']:.3f}, {same['ratio_high']:.3f}]",
        *timings.notes,
    ]
    return "\n".join(lines)


def json_text(facts: dict, timings: Timings | None) -> str:
    """`facts` and all timings, raw ones included, as JSON; None if the checks failed."""
    whole = dict(facts)
    if timings:
        whole["timings"] = {
            "summary": summary(timings),
            "seconds": timings.seconds,
            "wall_seconds": timings.wall,
            "moved_bytes": timings.moved_bytes,
            "problems": timings.problems,
            "notes": timings.notes,
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
