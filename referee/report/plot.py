"""Draws results: `python -m referee.report.plot RESULTS.json FILE.svg|FILE.png`.

A comparison gives README's picture: bars of the speed over eager.

A sweep gives a picture with a column for each problem, dtype and setting. A column has two
diagrams: the upper one shows the seconds of a call, the lower one its speed, both over the work of
a call. In each there is a line for each contestant, and one for the roofline.

The roofline is the larger of two times: that of the moved bytes at the bandwidth of a large copy,
and that of the work at the highest rate that the referee's floors reach (`roofline.add_roofline`).
A CPU exceeds a large copy's speed where data fits into its caches, or stores bypass them. So the
line is then labelled "large copy".
"""

import argparse
import importlib.util
import io
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from referee.names import COPY
from referee.program import console
from referee.report import SCALE, by_role, files, load
from referee.report.tables import milliseconds
from referee.words import CORRECT

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
BARS_INCHES = (8.0, 2.9)  # width and height of the picture of bars
WORK_LABELS = {"moved_bytes": "bytes moved by a call", "flops": "flops of a call"}
# The groups of README's bars: problem, dtype and setting.
BAR_GROUPS = [
    ("relu", "float32", ""),
    ("relu", "float16", ""),
    ("relu", "bfloat16", ""),
    ("linear_relu_divide", "float32", "highest"),
    ("linear_relu_divide", "float32", "high"),
    ("linear_relu_divide", "float16", ""),
]
# The bars of a group: the role, and its label in the legend.
BARS = {"eager": "eager", "compiled": "torch.compile", "solution": "this project"}
BAR_WIDTH = 0.25  # groups are 1 apart
BAR_DISTANCE = 0.28


def check(path: Path) -> None:
    """Raise ValueError if the path is neither an SVG nor a PNG, or matplotlib is missing."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"{path} ends neither in .svg nor in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("drawing needs matplotlib: pip install matplotlib")


def draw(content: dict, suffix: str) -> bytes:
    """Return the picture of a JSON file's content.

    Args:
        content: see `records.document`.
        suffix: ".svg" or ".png"; the picture is the bytes of such a file.

    Raises:
        ValueError: a bar has no result, or no size of a sweep has one.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    title = "{device}, torch {torch}".format(**content["environment"])
    with mpl.rc_context(dict.fromkeys(COLOUR_SETTINGS, TEXT_COLOUR) | OTHER_SETTINGS):
        figure = Figure(layout="constrained")
        if content["kind"] == "comparison":
            _draw_bars(figure, content["records"])
            title = f"Speed over eager on {title}"
        else:
            is_cpu = bool(content["environment"]["threads"])
            _draw_sweep(figure, content["records"], is_cpu)
        figure.suptitle(title)
        picture = io.BytesIO()
        # Without a date, the same results give the same file.
        metadata = {"metadata": {"Date": None}} if suffix == ".svg" else {}
        figure.savefig(picture, format=suffix[1:], transparent=True, dpi=120, **metadata)
    return picture.getvalue()


def _draw_bars(figure: object, records: list[dict]) -> None:
    """Draw the bars of all BAR_GROUPS, with the ratio to eager above each bar."""
    summaries = {
        (record["problem"], record["dtype"], run["setting"]): run["forward"]["summary"]
        for record in records
        for run in record["runs"]
        if record["verdict"] == CORRECT
    }
    if missing := [" ".join(filter(None, key)) for key in BAR_GROUPS if key not in summaries]:
        raise ValueError(f"no correct result of {', '.join(missing)}")
    figure.set_size_inches(*BARS_INCHES)
    axes = figure.subplots()
    for i, (role, label) in enumerate(BARS.items()):
        ratios = [by_role(summaries[key], role).get("ratio", 0.0) for key in BAR_GROUPS]
        # The middle bar of a group is at the group's place, the others to its left and right.
        centers = [group + BAR_DISTANCE * (i - 1) for group in range(len(BAR_GROUPS))]
        bars = axes.bar(centers, ratios, BAR_WIDTH, color=STYLES[role]["color"], label=label)
        texts = [f"{ratio:.3f}" if ratio > 0 else "" for ratio in ratios]
        axes.bar_label(bars, texts, padding=1, fontsize=7)
    axes.set_xticks(range(len(BAR_GROUPS)), [_group_title(*key, summaries) for key in BAR_GROUPS])
    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.legend(ncols=len(BARS), loc="upper left")


def _group_title(problem: str, dtype: str, setting: str, summaries: dict) -> str:
    """Return the text below a group of bars: the solution's name, setting or dtype, and time."""
    row = by_role(summaries[problem, dtype, setting], "solution")
    return f"{row['name']}\n{setting or dtype}, {milliseconds(row)}"


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
        # A contestant that is missing at some size leaves a gap in its line.
        yield [median_of.get(name, math.nan) * 1e-3 for median_of in medians], style
    label = LARGE_COPY if is_cpu and yardstick == COPY else "roofline"
    roofline = [forward["roofline_seconds"] or math.nan for forward in forwards]
    yield roofline, {**ROOFLINE, "label": label}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="referee.report.plot", description=__doc__.split("\n")[0])
    parser.add_argument("json", type=Path, help="what --json wrote")
    parser.add_argument("picture", type=Path, help="the .svg or .png to write")
    args = parser.parse_args(arguments)
    try:
        check(args.picture)
        files.write(args.picture, draw(load(args.json), args.picture.suffix))
    except (OSError, ValueError) as error:
        console.say(str(error), "referee.report.plot")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
