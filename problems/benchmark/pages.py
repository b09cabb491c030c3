"""`pages`: makes README, docs/BENCHMARKS.md and README's picture anew from docs/benchmarks/*.json.

A file of results is what a command wrote by `--json`: either `python -m problems.benchmark`, whose
keys problems/benchmark/options.py explains, or `python run.py` (referee/RESULTS.md). `report` adds
the key "commit", which run.py does not write, and removes `--json` from "command".

A block of a page begins with a comment that names a view and one or more files of results,
`<!-- table: host.json -->`, and ends with `<!-- end -->`. `fill` puts the view's Markdown between
the two (problems/benchmark/views.py).
"""

import json
import re
from pathlib import Path

from problems.benchmark import bars
from problems.benchmark.tree import ROOT
from problems.benchmark.views import VIEWS
from referee.report import files, load, plot

RESULTS = ROOT / "docs" / "benchmarks"
PAGES = [ROOT / "README.md", ROOT / "docs" / "BENCHMARKS.md"]
PICTURE = ROOT / "docs" / "figures.svg"
HEADLINE = "headline.json"  # the file that the picture shows
PATH_GRID = "path-grid.json"  # the results of `path-grid`

# A block: its comment, whose groups are the view with its arguments and the names of the files, and
# the text below the comment.
BLOCK = re.compile(r"(<!-- ([\w ]+): ([\w. -]+\.json) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def make_pages() -> None:
    """Make README, docs/BENCHMARKS.md and the picture from the results.

    Raises:
        ValueError: the picture cannot be drawn. The pages have been written.
    """
    texts = {page: fill(page.read_text(), RESULTS) for page in PAGES}
    for page, text in texts.items():
        files.write(page, text)
    plot.check(PICTURE)
    files.write(PICTURE, bars.draw(load(RESULTS / HEADLINE), PICTURE.suffix))


def fill(page: str, folder: Path) -> str:
    """Return the page with every block made anew from the files of results in `folder`.

    A block stays the same as long as one of its files has not been measured and is missing.
    """

    def make_block(match: re.Match) -> str:
        comment, view_and_arguments, names = match.groups()
        paths = [folder / name for name in names.split()]
        if not all(path.exists() for path in paths):
            return match[0]
        view, *arguments = view_and_arguments.split()
        results = [json.loads(path.read_text()) for path in paths]
        return comment + VIEWS[view](results, *arguments)

    return BLOCK.sub(make_block, page)
