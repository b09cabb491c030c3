"""Draws what `run.py --sweep` measured: `python -m referee.plot SWEEP.json FILE.svg|FILE.png`.

A column for each problem, dtype and setting: above the time of a call by its size, below the
speed, both beside the roofline. Its bandwidth is that of a large copy, its flat part the highest
rate that the referee's floor has at any size. On a CPU, sizes that fit into the caches may lie
above it, and kernels whose stores bypass them.
"""

import argparse
import importlib.util
import io
import math
import sys
from pathlib import Path

from referee import ending, files
from referee.schema import load

SUFFIXES = (".svg", ".png")
# By role; a yardstick is a copy, or the product alone. Readable on light and on dark ground.
STYLES = {
    "solution": {"color": "#2f81f7", "marker": "o", "linewidth": 2, "zorder": 3},
    "eager": {"color": "#8b949e", "marker": "s"},
    "compiled": {"color": "#d29922", "marker": "^"},
    "yardstick": {"color": "#3fb950", "marker": "x", "linestyle": "--"},
}
ROOFLINE = {"color": "#f85149", "linestyle": "-", "linewidth": 1, "label": "roofline"}
INK = "#77818c"  # readable on both grounds
INCHES = 3.4, 6.0  # of a column


def check(path: Path) -> None:
    """Finds out before the work begins.

    Raises:
        ValueError: it is neither an SVG nor a PNG, or matplotlib is missing.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends neither in .svg nor in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("drawing needs matplotlib: pip install matplotlib")


def draw(content: dict, suffix: str) -> bytes:
    """The picture.

    Args:
        content: `records.Document.content` of a sweep.
        suffix: of the file, .svg or .png.

    Raises:
        ValueError: no size was timed.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns: dict[str, list[dict]] = {}
    for record in content["records"]:
        for run in record["runs"]:
            title = " ".join([record["problem"], run["setting"] or record["dtype"]])
            columns.setdefault(title, []).append(run["forward"])
    if not columns:
        raise ValueError("no size was timed")
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK)
    colours |= dict.fromkeys(("xtick.color", "ytick.color"), INK)
    plain = {"svg.hashsalt": "sweep", "font.size": 8, "legend.framealpha": 0}
    with mpl.rc_context({**colours, **plain}):
        size = (INCHES[0] * len(columns), INCHES[1])
        figure = Figure(figsize=size, layout="constrained")
        for axes, (title, forwards) in zip(
            figure.subplots(2, len(columns), squeeze=False).T, columns.items(), strict=True
        ):
            _column(axes, title, forwards)
        about = content["environment"]
        figure.suptitle(f"{about['device']}, torch {about['torch']}")
        out = io.BytesIO()
        dates = {"metadata": {"Date": None}} if suffix == ".svg" else {}
        figure.savefig(out, format=suffix[1:], transparent=True, dpi=120, **dates)
    return out.getvalue()


def _column(axes: list, title: str, forwards: list[dict]) -> None:
    """Times above, speeds below."""
    times, speeds = axes
    forwards = sorted(forwards, key=lambda forward: forward["work"])
    first, work = forwards[0], [forward["work"] for forward in forwards]
    yardstick = first["yardstick"]
    scale = {"GB/s": 1e9, "TFLOP/s": 1e12}[first["unit"]]
    names = {row["name"]: row["role"] for row in first["summary"]}
    for name, role in names.items():
        if role == "control" or (role == "yardstick" and not name.startswith(yardstick)):
            continue
        medians = [_median(forward, name) for forward in forwards]
        style = {**STYLES[role], "label": name, "markersize": 3}
        if name != yardstick and role == "yardstick":
            style["linestyle"] = ":"
        for ax, values in ((times, medians), (speeds, _rates(work, medians, scale))):
            ax.plot(work, values, **style)
    limits = [forward["roofline_seconds"] or math.nan for forward in forwards]
    times.plot(work, limits, **ROOFLINE)
    speeds.plot(work, _rates(work, limits, scale), **ROOFLINE)
    times.set(title=title, xscale="log", yscale="log", ylabel="seconds")
    unit = {"moved_bytes": "bytes moved by a call", "flops": "flops of a call"}
    speeds.set(xscale="log", yscale="log", ylabel=first["unit"], xlabel=unit[first["work_unit"]])
    times.legend()


def _median(forward: dict, name: str) -> float:
    for row in forward["summary"]:
        if row["name"] == name:
            return row["median_ms"] * 1e-3
    return math.nan


def _rates(work: list[int], seconds: list[float], scale: float) -> list[float]:
    return [w / s / scale for w, s in zip(work, seconds, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="referee.plot", description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="what run.py --sweep --json wrote")
    parser.add_argument("picture", type=Path, help="the .svg or .png to write")
    args = parser.parse_args(arguments)
    try:
        check(args.picture)
        files.write(args.picture, draw(load(args.json), args.picture.suffix))
    except (OSError, ValueError) as error:
        ending.say(str(error), "referee.plot")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
