"""Draws results: `python -m referee.report.plot RESULTS.json FILE.svg|FILE.png`.

Of `run.py --sweep`, a column for each problem, dtype and setting: above the time of a call by its
size, below the speed, both beside the roofline. Its bandwidth is that of a large copy, its flat
part the highest rate that the referee's floor has at any size. On a CPU, sizes that fit into the
caches may lie above it, and kernels whose stores bypass them. Of comparisons, README's picture, as
SVG.
"""

import argparse
import importlib.util
import io
import math
import sys
from pathlib import Path

from referee import ending
from referee.report import files, picture
from referee.report.schema import load

SUFFIXES = (".svg", ".png")
# By role; a yardstick is a copy, or the product alone. Readable on light and on dark ground.
STYLES = {
    "solution": {"color": "#2f81f7", "marker": "o", "linewidth": 2, "zorder": 3},
    "eager": {"color": "#8b949e", "marker": "s"},
    "compiled": {"color": "#d29922", "marker": "^"},
    "yardstick": {"color": "#3fb950", "marker": "x", "linestyle": "--"},
}
ROOFLINE = {"color": "#f85149", "linestyle": "-", "linewidth": 1, "label": "roofline"}
COLOURED = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
PLAIN = {"svg.hashsalt": "sweep", "font.size": 8, "legend.framealpha": 0}
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
            title = f"{record['problem']} {run['setting'] or record['dtype']}"
            columns.setdefault(title, []).append(run["forward"])
    if not columns:
        raise ValueError("no size was timed")
    with mpl.rc_context(dict.fromkeys(COLOURED, picture.INK) | PLAIN):
        size = (INCHES[0] * len(columns), INCHES[1])
        figure = Figure(figsize=size, layout="constrained")
        rows = figure.subplots(2, len(columns), squeeze=False)
        for axes, (title, forwards) in zip(rows.T, columns.items(), strict=True):
            _column(*axes, title, sorted(forwards, key=lambda forward: forward["work"]))
        about = content["environment"]
        figure.suptitle(f"{about['device']}, torch {about['torch']}")
        out = io.BytesIO()
        dates = {"metadata": {"Date": None}} if suffix == ".svg" else {}
        figure.savefig(out, format=suffix[1:], transparent=True, dpi=120, **dates)
    return out.getvalue()


def _column(times: object, speeds: object, title: str, forwards: list[dict]) -> None:
    """Times above, speeds below; the axes are matplotlib's."""
    first, work = forwards[0], [forward["work"] for forward in forwards]
    yardstick, scale = first["yardstick"], {"GB/s": 1e9, "TFLOP/s": 1e12}[first["unit"]]

    def plot(seconds: list[float], style: dict) -> None:
        times.plot(work, seconds, **style)
        rates = [w / s / scale for w, s in zip(work, seconds, strict=True)]
        speeds.plot(work, rates, **style)

    for name, role in ((row["name"], row["role"]) for row in first["summary"]):
        if role == "control" or (role == "yardstick" and not name.startswith(yardstick)):
            continue
        style = {**STYLES[role], "label": name, "markersize": 3}
        if name != yardstick and role == "yardstick":
            style["linestyle"] = ":"
        medians = [{row["name"]: row["median_ms"] for row in f["summary"]} for f in forwards]
        plot([of.get(name, math.nan) * 1e-3 for of in medians], style)
    plot([forward["roofline_seconds"] or math.nan for forward in forwards], ROOFLINE)
    times.set(title=title, xscale="log", yscale="log", ylabel="seconds")
    unit = {"moved_bytes": "bytes moved by a call", "flops": "flops of a call"}
    speeds.set(xscale="log", yscale="log", ylabel=first["unit"], xlabel=unit[first["work_unit"]])
    times.legend()


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="referee.report.plot", description=__doc__.split("\n")[0])
    parser.add_argument("json", type=Path, help="what run.py --json wrote")
    parser.add_argument("picture", type=Path, help="the .svg or .png to write")
    args = parser.parse_args(arguments)
    try:
        content = load(args.json)
        if content["kind"] == "comparison":
            files.write(args.picture, picture.draw(content))
        else:
            check(args.picture)
            files.write(args.picture, draw(content, args.picture.suffix))
    except (OSError, ValueError) as error:
        ending.say(str(error), "referee.report.plot")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
