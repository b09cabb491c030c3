"""Figures beside the headline, and the pages that show all figures: `python -m problems.benchmark`.

options.py            the command line, and the JSON that it writes
command.py            runs the command line
measure_*.py          one measurement each
modules.py            this project's module and eager's, with equal parameters
rounds.py             times calls in turn; the clocks are in clock.py
paths/                the measurements `paths` and `path-grid`, and `choose-again`
tables.py             the tables of the results of the other measurements
report.py             runs the commands whose results are in docs/benchmarks/, but for `paths` and
                      `path-grid`
pages.py              makes README and docs/BENCHMARKS.md anew from these results
views.py              the parts of these pages that show results
bars.py               draws README's picture
tree.py               this project's folder and its commit
"""
