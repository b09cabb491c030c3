"""Draw results: `python -m referee.report.plot RESULTS.json FILE.svg|FILE.png`.

For `run.py --sweep` it draws a column for each problem, dtype and setting: above the time of a call
by its size, below the speed, both beside the roofline. The roofline's bandwidth is that of a large
copy, and its flat part is the highest rate that the referee's floor has at any size. A CPU is
faster than a large copy at sizes that fit into its caches, and where stores bypass them. So the
line is called "large copy" there. For comparisons it draws README's picture: bars of the speed over
eager.
"""

import argparse
import importlib.util
import io
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from referee import console
from referee.names import COPY
from referee.report import SCALE, by_role, files, load
from referee.report.tables import milliseconds

# By role; a yardstick is a copy, or the product alone. Readable on light and on dark ground.
STYLES = {
    "solution": {"color": "#2f81f7", "marker": "o", "linewidth": 2, "zorder": 3},
    "eager": {"color": "#8b949e", "marker": "s"},
    "compiled": {"color": "#d29922", "marker": "^"},
    "yardstick": {"color": "#3fb950", "marker": "x", "linestyle": "--"},
}
ROOFLINE = {"color": "#f85149", "linestyle": "-", "linewidth": 1}
LARGE_COPY = "large copy"  # the roofline of a CPU's memory, which its caches exceed
INK = "#77818c"  # readable on both grounds
COLOURED = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
PLAIN = {"svg.hashsalt": "sweep", "font.size": 8, "legend.framealpha": 0}
INCHES, BARS_INCHES = (3.4, 6.0), (8.0, 2.9)  # of a column of a sweep, of the bars
WORK = {"moved_bytes": "bytes moved by a call", "flops": "flops of a call"}
# Problem, dtype and setting of README's bars, and the legend by role.
FIGURES = [("relu", dtype, "") for dtype in ("float32", "float16", "bfloat16")]
FIGURES += [("linear_relu_divide", "float32", setting) for setting in ("highest", "high")]
FIGURES += [("linear_relu_divide", "float16", "")]
BARS = {"eager": "eager", "compiled": "torch.compile", "solution": "this project"}


def check(path: Path) -> None:
    """Raise ValueError if the path is neither an SVG nor a PNG, or matplotlib is missing."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"{path} ends neither in .svg nor in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("drawing needs matplotlib: pip install matplotlib")


def draw(content: dict, suffix: str) -> bytes:
    """Return the picture as the bytes of a file with this suffix.

    Raises:
        ValueError: a bar has no result, or no size has one.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    what = "{device}, torch {torch}".format(**content["environment"])
    with mpl.rc_context(dict.fromkeys(COLOURED, INK) | PLAIN):
        figure = Figure(layout="constrained")
        if content["kind"] == "comparison":
            _bars(figure, content["records"])
            what = f"Speed over eager on {what}"
        else:
            is_cpu = bool(content["environment"]["threads"])
            _columns(figure, content["records"], is_cpu)
        figure.suptitle(what)
        out = io.BytesIO()
        dates = {"metadata": {"Date": None}} if suffix == ".svg" else {}
        figure.savefig(out, format=suffix[1:], transparent=True, dpi=120, **dates)
    return out.getvalue()


def _bars(figure: object, records: list[dict]) -> None:
    """Draw a group of bars for each of FIGURES, with the ratio above each bar."""
    found = {
        (record["problem"], record["dtype"], run["setting"]): run["forward"]["summary"]
        for record in records
        for run in record["runs"]
        if record["verdict"] == "correct"
    }
    if missing := [" ".join(filter(None, key)) for key in FIGURES if key not in found]:
        raise ValueError(f"no correct result of {', '.join(missing)}")
    figure.set_size_inches(*BARS_INCHES)
    axes = figure.subplots()
    for i, (role, label) in enumerate(BARS.items()):
        ratios = [by_role(found[key], role).get("ratio", 0.0) for key in FIGURES]
        at = [place + 0.28 * (i - 1) for place in range(len(FIGURES))]
        bars = axes.bar(at, ratios, 0.25, color=STYLES[role]["color"], label=label)
        axes.bar_label(bars, [f"{r:.3f}" * (r > 0) for r in ratios], padding=1, fontsize=7)
    ours = [(key[2] or key[1], by_role(found[key], "solution")) for key in FIGURES]
    titles = [f"{row['name']}\n{what}, {milliseconds(row)}" for what, row in ours]
    axes.set_xticks(range(len(FIGURES)), titles)
    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.legend(ncols=len(BARS), loc="upper left")


def _columns(figure: object, records: list[dict], is_cpu: bool) -> None:
    """Draw a sweep: a column for each series, times above, speeds below."""
    columns: dict[str, list[dict]] = {}
    for record in records:
        for run in record["runs"]:
            title = f"{record['problem']} {run['setting'] or record['dtype']}"
            columns.setdefault(title, []).append(run["forward"])
    if not columns:
        raise ValueError("no size was timed")
    figure.set_size_inches(INCHES[0] * len(columns), INCHES[1])
    rows = figure.subplots(2, len(columns), squeeze=False)
    for (times, speeds), (title, forwards) in zip(rows.T, columns.items(), strict=True):
        forwards.sort(key=lambda forward: forward["work"])
        first, work = forwards[0], [forward["work"] for forward in forwards]
        for seconds, style in _lines(forwards, is_cpu):
            times.plot(work, seconds, **style)
            rates = [w / s / SCALE[first["unit"]] for w, s in zip(work, seconds, strict=True)]
            speeds.plot(work, rates, **style)
        times.set(title=title, xscale="log", yscale="log", ylabel="seconds")
        speeds.set(xlabel=WORK[first["work_unit"]], ylabel=first["unit"])
        speeds.set(xscale="log", yscale="log")
        times.legend()


def _lines(forwards: list[dict], is_cpu: bool) -> Iterator[tuple[list[float], dict]]:
    """Yield the seconds of each line, and its style.

    The control and other yardsticks have no line; the roofline has.
    """
    yardstick = forwards[0]["yardstick"]
    for name, role in ((row["name"], row["role"]) for row in forwards[0]["summary"]):
        if role == "control" or (role == "yardstick" and not name.startswith(yardstick)):
            continue
        dotted = {"linestyle": ":"} if role == "yardstick" and name != yardstick else {}
        style = {**STYLES[role], **dotted, "label": name, "markersize": 3}
        medians = [{row["name"]: row["median_ms"] for row in f["summary"]} for f in forwards]
        yield [of.get(name, math.nan) * 1e-3 for of in medians], style
    label = LARGE_COPY if is_cpu and yardstick == COPY else "roofline"
    limits = [forward["roofline_seconds"] or math.nan for forward in forwards]
    yield limits, {**ROOFLINE, "label": label}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="referee.report.plot", description=__doc__.split("\n")[0])
    parser.add_argument("json", type=Path, help="what run.py --json wrote")
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
