"""Whether two runs of one comparison agree: `python -m referee.agreement A.json B.json`.

A line for each ratio to eager that both of the files have, of `run.py --json` each: the two 95%
intervals, by how much the medians differ, and whether that is agreement: the intervals overlap, or
the medians differ by at most 0.5%, since a GPU's intervals are narrower than what the addresses
that a process gets change. Exit status: 0 if all agree, 1 if one does not, 2 if there is nothing to
compare.
"""

import argparse
import sys
from pathlib import Path

from referee import ending
from referee.markdown import by_role
from referee.report import interval, table
from referee.schema import load

WITHIN = 0.005  # by which medians may differ although their intervals do not overlap


def compare(first: dict, second: dict) -> tuple[str, bool]:
    """A table of all ratios that both have, and whether all agree.

    Args:
        first, second: `records.Document.content`.

    Raises:
        ValueError: they have none in common.
    """
    ratios = [_ratios(content) for content in (first, second)]
    rows = [["ratio to eager", "first", "second", "difference", ""]]
    agree = True
    for key, one in ratios[0].items():
        if other := ratios[1].get(key):
            difference = other["ratio"] / one["ratio"] - 1
            word = "differ"
            if overlaps(one, other):
                word = "overlap"
            elif abs(difference) <= WITHIN:
                word = f"within {WITHIN:.1%}"
            agree &= word != "differ"
            rows.append([key, interval(one), interval(other), f"{difference:+.2%}", word])
    if len(rows) == 1:
        raise ValueError("the files have no comparison in common")
    return table(rows), agree


def overlaps(one: dict, other: dict) -> bool:
    """Whether the intervals of two rows have a point in common."""
    return one["ratio_low"] <= other["ratio_high"] and other["ratio_low"] <= one["ratio_high"]


def _ratios(content: dict) -> dict[str, dict]:
    """The solution's rows, of forwards and of whole steps, by what was measured."""
    rows = {}
    for record in content["records"]:
        for run in record["runs"]:
            words = [record["file"] or record["problem"], str(record["shape"]), record["dtype"]]
            label = " ".join(filter(None, [*words, run["setting"]]))
            rows[label] = by_role(run["forward"]["summary"], "solution")
            if run["step"]:
                rows[f"{label}, step"] = by_role(run["step"]["summary"]["step"], "solution")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="referee.agreement", description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path, help="what run.py --json wrote")
    parser.add_argument("second", type=Path, help="what it wrote another time")
    args = parser.parse_args(arguments)
    try:
        text, agree = compare(load(args.first), load(args.second))
    except (OSError, ValueError) as error:
        ending.say(str(error), "referee.agreement")
        return 2
    ending.show(text)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
