"""README's picture: bars of the speed over eager, of eager, `torch.compile` and this project."""

from html import escape

from referee.report.markdown import by_role, milliseconds

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
<title>{title}</title>"""
BOLD, START = 'font-weight="bold"', 'text-anchor="start"'


def draw(content: dict) -> str:
    """The picture as SVG.

    Args:
        content: `records.Document.content` of comparisons.

    Raises:
        ValueError: a figure is missing or wrong.
    """
    found = {
        (record["problem"], record["dtype"], run["setting"]): (record, run["forward"]["summary"])
        for record in content["records"]
        for run in record["runs"]
        if content["kind"] == "comparison" and record["verdict"] == "correct"
    }
    if missing := [" ".join(filter(None, key)) for key in FIGURES if key not in found]:
        raise ValueError(f"no correct result of {', '.join(missing)}")
    summaries = [found[key][1] for key in FIGURES]
    scale = HEIGHT / max(row["ratio"] for s in summaries for row in s if row["role"] in BARS)
    about = content["environment"]
    what = f"Speed over eager on {about['device']}, torch {about['torch']}"
    width, bottom = 2 * LEFT + GROUP * len(FIGURES), TOP + HEIGHT
    parts = [HEAD.format(width=width, height=bottom + 62, ink=INK, title=escape(what))]
    parts.append(_text(LEFT, 18, what, f"{START} {BOLD}"))
    for i, (colour, name) in enumerate(BARS.values()):
        x = LEFT + 110 * i
        parts.append(f'<rect x="{x}" y="29" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 16, 39, name, START))
    starts: dict[str, int] = {}
    for i, ((problem, dtype, setting), summary) in enumerate(zip(FIGURES, summaries, strict=True)):
        left = LEFT + GROUP * i
        parts += _bars(left, summary, scale)
        ours = milliseconds(by_role(summary, "solution")["median_ms"])
        parts.append(_text(left + GROUP // 2, bottom + 16, f"{setting or dtype}, {ours}"))
        starts.setdefault(problem, i)
    for problem, start in starts.items():
        count = sum(key[0] == problem for key in FIGURES)
        record, summary = found[FIGURES[start]]
        text = f"{by_role(summary, 'solution')['name']}, x {record['shape']}"
        middle = LEFT + GROUP * start + GROUP * count // 2
        parts.append(_text(middle, bottom + 40, text, BOLD))
    return "\n".join([*parts, "</svg>", ""])


def _bars(left: int, summary: list[dict], scale: float) -> list[str]:
    """One figure's bars, the ratio above each, with the digits that count; eager's is 1."""
    rows = [row for role in BARS for row in summary if row["role"] == role]
    x = left + (GROUP - len(rows) * (BAR + GAP) + GAP) // 2
    parts = []
    for row in rows:
        ratio, high = row["ratio"], row["ratio"] * scale
        y, size = TOP + HEIGHT - high, f'width="{BAR}" height="{high:.1f}"'
        parts.append(f'<rect x="{x}" y="{y:.1f}" {size} fill="{BARS[row["role"]][0]}"/>')
        digits = 0 if ratio == 1 else 3 if ratio < 2 else 2
        bold = BOLD * (row["role"] == "solution")
        parts.append(_text(x + BAR // 2, y - 4, f"{ratio:.{digits}f}", bold))
        x += BAR + GAP
    return parts


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:.4g}"{more and f" {more}"}>{escape(text)}</text>'
