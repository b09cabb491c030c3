"""Draws README's picture: `python -m problems.benchmark.bars RESULTS.json FILE.svg|FILE.png`.

It has bars of the speed over eager. RESULTS.json is what a comparison wrote by --json.
"""

import sys
from functools import partial

from referee.report import by_role, plot
from referee.report.tables import milliseconds
from referee.verdict_words import CORRECT

# The groups of bars: problem, dtype and setting.
GROUPS = [
    ("relu", "float32", ""),
    ("relu", "float16", ""),
    ("relu", "bfloat16", ""),
    ("linear_relu_divide", "float32", "highest"),
    ("linear_relu_divide", "float32", "high"),
    ("linear_relu_divide", "float16", ""),
]
# The bars of a group: the role, and its label in the legend.
BARS = {"eager": "eager", "compiled": "torch.compile", "solution": "this project"}
INCHES = (8.0, 2.9)  # width and height of the picture
BAR_WIDTH = 0.25  # groups are 1 apart
BAR_DISTANCE = 0.28


def draw(content: dict, suffix: str) -> bytes:
    """Return the picture of a comparison.

    Args:
        content: of the JSON file, see `records.document`.
        suffix: ".svg" or ".png"; the picture is the bytes of such a file.

    Raises:
        ValueError: a group has no correct result.
    """
    summaries = {
        (record["problem"], record["dtype"], run["setting"]): run["forward"]["summary"]
        for record in content["records"]
        for run in record["runs"]
        if record["verdict"] == CORRECT
    }
    if missing := [" ".join(filter(None, key)) for key in GROUPS if key not in summaries]:
        raise ValueError(f"no correct result of {', '.join(missing)}")
    title = f"Speed over eager on {plot.machine_and_torch(content)}"
    return plot.render(partial(_draw_bars, summaries), title, suffix)


def _draw_bars(summaries: dict[tuple, list[dict]], figure: object) -> None:
    """Draw the bars of all groups, with the ratio to eager above each bar."""
    figure.set_size_inches(*INCHES)
    axes = figure.subplots()
    for i, (role, label) in enumerate(BARS.items()):
        # A contestant that was not timed has no bar: its height is 0.
        ratios = [by_role(summaries[key], role).get("ratio", 0.0) for key in GROUPS]
        # The middle bar of a group is at the group's place, the others to its left and right.
        centers = [group + BAR_DISTANCE * (i - 1) for group in range(len(GROUPS))]
        color = plot.STYLES[role]["color"]
        bars = axes.bar(centers, ratios, BAR_WIDTH, color=color, label=label)
        texts = [f"{ratio:.3f}" if ratio > 0 else "" for ratio in ratios]
        axes.bar_label(bars, texts, padding=1, fontsize=7)
    axes.set_xticks(range(len(GROUPS)), [_group_title(key, summaries[key]) for key in GROUPS])
    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.legend(ncols=len(BARS), loc="upper left")


def _group_title(key: tuple[str, str, str], summary: list[dict]) -> str:
    """Return the text below a group of bars: the solution's name, setting or dtype, and time."""
    _problem, dtype, setting = key
    row = by_role(summary, "solution")
    return f"{row['name']}\n{setting or dtype}, {milliseconds(row)}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return plot.draw_file(arguments, "problems.benchmark.bars", __doc__.split("\n")[0], draw)


if __name__ == "__main__":
    sys.exit(main())
