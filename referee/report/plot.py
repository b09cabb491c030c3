"""Draws a sweep: `python -m referee.report.plot SWEEP.json FILE.svg|FILE.png`.

The picture has a column for each problem, dtype and setting. A column has two diagrams: the upper
one shows the seconds of a call, the lower one its speed, both over the work of a call. In each
there is a line for each timed call, and one for the roofline, see `roofline.add_roofline`.

Where the roofline is the speed of a large copy, a CPU can exceed it: its caches hold small inputs,
and stores that bypass the caches are faster. The line of such a column is labelled "large copy".
"""

import argparse
import importlib.util
import io
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from referee import console
from referee.call_names import COPY
from referee.report import SCALE, files, load

# The styles of lines and bars by role, readable on white and on black. A yardstick is a copy, or a
# product of matrices.
STYLES = {
    "solution": {"color": "#2f81f7", "marker": "o", "linewidth": 2, "zorder": 3},
    "eager": {"color": "#8b949e", "marker": "s"},
    "compiled": {"color": "#d29922", "marker": "^"},
    "yardstick": {"color": "#3fb950", "marker": "x", "linestyle": "--"},
}
ROOFLINE = {"color": "#f85149", "linestyle": "-", "linewidth": 1}
LARGE_COPY = "large copy"  # the roofline's label where caches can exceed it
# matplotlib's settings.
TEXT_COLOUR = "#77818c"  # readable on white and on black
COLOUR_SETTINGS = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
OTHER_SETTINGS = {"svg.hashsalt": "sweep", "font.size": 8, "legend.framealpha": 0}
COLUMN_INCHES = (3.4, 6.0)  # width and height of a column of a sweep
WORK_LABELS = {"moved_bytes": "bytes moved by a call", "flops": "flops of a call"}


def check(path: Path) -> None:
    """Raise ValueError if the path is neither an SVG nor a PNG, or matplotlib is missing."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"{path} ends neither in .svg nor in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("drawing needs matplotlib: pip install matplotlib")


def draw(content: dict, suffix: str) -> bytes:
    """Return the picture of a sweep.

    Args:
        content: of the JSON file, see `records.document`.
        suffix: ".svg" or ".png"; the picture is the bytes of such a file.

    Raises:
        ValueError: the content is no sweep's, or no size was timed.
    """
    if content["kind"] != "sweep":
        raise ValueError("these are no results of --sweep")

    def draw_sweep(figure: object) -> None:
        _draw_sweep(figure, content["records"], is_cpu=bool(content["environment"]["threads"]))

    return render(draw_sweep, machine_and_torch(content), suffix)


def machine_and_torch(content: dict) -> str:
    """Return the device and the version of torch, for a picture's title."""
    return "{device}, torch {torch}".format(**content["environment"])


def render(draw_on: Callable[[object], None], title: str, suffix: str) -> bytes:
    """Return a picture as the bytes of a file.

    Args:
        draw_on: draws on matplotlib's `Figure`.
        title: of the picture.
        suffix: of the file: ".svg" or ".png".
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(dict.fromkeys(COLOUR_SETTINGS, TEXT_COLOUR) | OTHER_SETTINGS):
        figure = Figure(layout="constrained")
        draw_on(figure)
        figure.suptitle(title)
        picture = io.BytesIO()
        # Without a date, the same results give the same file.
        metadata = {"metadata": {"Date": None}} if suffix == ".svg" else {}
        figure.savefig(picture, format=suffix[1:], transparent=True, dpi=120, **metadata)
    return picture.getvalue()


def _draw_sweep(figure: object, records: list[dict], is_cpu: bool) -> None:
    """Draw a sweep: a column for each problem, dtype and setting."""
    columns: dict[str, list[dict]] = {}
    for record in records:
        for run in record["runs"]:
            title = f"{record['problem']} {run['setting'] or record['dtype']}"
            columns.setdefault(title, []).append(run["forward"])
    if not columns:
        raise ValueError("no size was timed")
    width, height = COLUMN_INCHES
    figure.set_size_inches(width * len(columns), height)
    axes = figure.subplots(2, len(columns), squeeze=False)
    for (upper, lower), (title, forwards) in zip(axes.T, columns.items(), strict=True):
        _draw_column(upper, lower, forwards, is_cpu)
        upper.set_title(title)


def _draw_column(upper: object, lower: object, forwards: list[dict], is_cpu: bool) -> None:
    """Draw a column of a sweep.

    Args:
        upper: the axes for times.
        lower: the axes for speeds.
        forwards: of the records of all sizes.
        is_cpu: whether the device is a CPU.
    """
    forwards.sort(key=lambda forward: forward["work"])
    unit, work_unit = forwards[0]["unit"], forwards[0]["work_unit"]
    work = [forward["work"] for forward in forwards]
    for seconds, style in _lines(forwards, is_cpu):
        upper.plot(work, seconds, **style)
        speeds = [w / s / SCALE[unit] for w, s in zip(work, seconds, strict=True)]
        lower.plot(work, speeds, **style)
    upper.set(xscale="log", yscale="log", ylabel="seconds")
    lower.set(xscale="log", yscale="log", ylabel=unit, xlabel=WORK_LABELS[work_unit])
    upper.legend()


def _lines(forwards: list[dict], is_cpu: bool) -> Iterator[tuple[list[float], dict]]:
    """Yield the seconds and the style of each line of a column; the roofline comes last.

    The control has no line. The forwards' own yardstick has a dashed line ("copy", for example),
    and a variant of it has a dotted one ("copy, fresh memory"). Other yardsticks have none.
    """
    yardstick = forwards[0]["yardstick"]
    medians = [{row["name"]: row["median_ms"] for row in f["summary"]} for f in forwards]
    for row in forwards[0]["summary"]:
        name, role = row["name"], row["role"]
        if role == "control" or (role == "yardstick" and not name.startswith(yardstick)):
            continue
        style = {**STYLES[role], "label": name, "markersize": 3}
        if role == "yardstick" and name != yardstick:
            style["linestyle"] = ":"
        # A timed call that is missing at some size leaves a gap in its line.
        yield [median_of.get(name, math.nan) * 1e-3 for median_of in medians], style
    label = LARGE_COPY if is_cpu and yardstick == COPY else "roofline"
    roofline = [forward["roofline_seconds"] or math.nan for forward in forwards]
    yield roofline, {**ROOFLINE, "label": label}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return draw_file(arguments, "referee.report.plot", __doc__.split("\n")[0], draw)


def draw_file(
    arguments: list[str] | None,
    program: str,
    description: str,
    draw_content: Callable[[dict, str], bytes],
) -> int:
    """Run a command line that draws the content of a JSON file; return the exit status.

    Args:
        arguments: the command's; None for those of this process.
        program: its name, with which messages begin.
        description: the first line of --help.
        draw_content: makes the picture, as `draw` does.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("json", type=Path, help="what --json wrote")
    parser.add_argument("picture", type=Path, help="the .svg or .png to write")
    args = parser.parse_args(arguments)
    try:
        check(args.picture)
        files.write(args.picture, draw_content(load(args.json), args.picture.suffix))
    except (OSError, ValueError) as error:
        console.say(str(error), program)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
