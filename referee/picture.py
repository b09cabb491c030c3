"""Draws README's picture: `python -m referee.picture RESULTS.json [RESULTS.json ...] FILE.svg`.

The files are what `run.py --dtype float32,float16,bfloat16 --json RESULTS.json` wrote. Bars show
the speed over eager: of eager, of `torch.compile` where it was measured, and of this project.
"""

import argparse
import sys
from html import escape
from pathlib import Path

from referee import ending, files
from referee.markdown import by_role, milliseconds
from referee.schema import load

# Problem, dtype and setting of the headline figures.
FIGURES = (
    ("relu", "float32", ""),
    ("relu", "float16", ""),
    ("relu", "bfloat16", ""),
    ("linear_relu_divide", "float32", "highest"),
    ("linear_relu_divide", "float32", "high"),
    ("linear_relu_divide", "float16", ""),
)
# By role, with the legend's text. Readable on light and on dark ground, as INK is.
BARS = {
    "eager": ("#8b949e", "eager"),
    "compiled": ("#d29922", "torch.compile"),
    "solution": ("#2f81f7", "this project"),
}
INK = "#77818c"
BAR, GAP, GROUP = 32, 4, 124  # widths of a bar, between bars, of a figure
LEFT, TOP, HEIGHT = 14, 62, 150  # of the area of the bars
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
font-family="system-ui, sans-serif" font-size="12" fill="{ink}" text-anchor="middle">
<title>{title}</title>
"""


def draw(contents: list[dict]) -> str:
    """The picture as SVG.

    Args:
        contents: `records.Document.content` of comparisons; later ones replace earlier ones.

    Raises:
        ValueError: a figure is missing or wrong, or not all are of one device and torch.
    """
    found = {
        (record["problem"], record["dtype"], run["setting"]): (record, run["forward"])
        for content in contents
        for record in content["records"]
        for run in record["runs"]
        if content["kind"] == "comparison" and record["verdict"] == "correct"
    }
    if missing := [" ".join(filter(None, key)) for key in FIGURES if key not in found]:
        raise ValueError(f"no correct result of {', '.join(missing)}")
    devices = {f"{c['environment']['device']}, torch {c['environment']['torch']}" for c in contents}
    if len(devices) > 1:
        raise ValueError(f"results of different machines: {'; '.join(sorted(devices))}")
    summaries = [found[key][1]["summary"] for key in FIGURES]
    scale = HEIGHT / max(row["ratio"] for s in summaries for row in s if row["role"] in BARS)

    what = f"Speed over eager on {devices.pop()}"
    width = 2 * LEFT + GROUP * len(FIGURES)
    parts = [HEAD.format(width=width, height=TOP + HEIGHT + 62, ink=INK, title=escape(what))]
    parts += [_text(LEFT, 18, what, 'text-anchor="start" font-weight="bold"'), *_legend()]
    starts: dict[str, int] = {}
    for i, ((problem, dtype, setting), summary) in enumerate(zip(FIGURES, summaries, strict=True)):
        left = LEFT + GROUP * i
        parts += _bars(left, summary, scale)
        ours = milliseconds(by_role(summary, "solution")["median_ms"])
        parts.append(_text(left + GROUP // 2, TOP + HEIGHT + 16, f"{setting or dtype}, {ours}"))
        starts.setdefault(problem, i)
    for problem, start in starts.items():
        count = sum(key[0] == problem for key in FIGURES)
        middle = LEFT + GROUP * start + GROUP * count // 2
        record, forward = found[FIGURES[start]]
        name = by_role(forward["summary"], "solution")["name"]
        text = f"{name}, x {record['shape']}"
        parts.append(_text(middle, TOP + HEIGHT + 40, text, 'font-weight="bold"'))
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    parts, x = [], LEFT
    for colour, name in BARS.values():
        parts.append(f'<rect x="{x}" y="29" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 16, 39, name, 'text-anchor="start"'))
        x += 110
    return parts


def _bars(left: int, summary: list[dict], scale: float) -> list[str]:
    """One figure's bars, the ratio above each."""
    rows = [row for role in BARS for row in summary if row["role"] == role]
    x = left + (GROUP - len(rows) * (BAR + GAP) + GAP) // 2
    parts = []
    for row in rows:
        high = row["ratio"] * scale
        y, colour = TOP + HEIGHT - high, BARS[row["role"]][0]
        parts.append(
            f'<rect x="{x}" y="{y:.1f}" width="{BAR}" height="{high:.1f}" fill="{colour}"/>'
        )
        bold = 'font-weight="bold"' if row["role"] == "solution" else ""
        parts.append(_text(x + BAR // 2, y - 4, _ratio(row["ratio"]), bold))
        x += BAR + GAP
    return parts


def _ratio(value: float) -> str:
    """With the digits that count; eager's is 1."""
    if value == 1:
        return "1"
    return f"{value:.3f}" if value < 2 else f"{value:.2f}"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:.4g}"{more and f" {more}"}>{escape(text)}</text>'


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="referee.picture", description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, nargs="+", help="what run.py --json wrote")
    parser.add_argument("picture", type=Path, help="the .svg to write")
    args = parser.parse_args(arguments)
    try:
        files.write(args.picture, draw([load(path) for path in args.json]))
    except (OSError, ValueError) as error:
        ending.say(str(error), "referee.picture")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
