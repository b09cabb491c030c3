"""Figures beside the headline, and the pages that show all figures: `python -m problems.benchmark`.

options.py            the command line, and the JSON that it writes
command.py            runs the command line
measure_*.py          one measurement each
modules.py            this project's module and eager's, with equal parameters
rounds.py             times calls in turn; the clocks are in clock.py
products.py, grid.py  the products that `paths` and `path-grid` time
paths.py              the paths that they compare
path_calls.py         the calls that they time
choice.py             asks kernels/linear/operator/choose_path.h for their paths, by print_paths.cpp
choose_again.py       writes these paths into the results of `path-grid`
tables.py             the tables of the results; those of `paths` and `path-grid` are in
                      paths_tables.py, grid_rows.py and grid_table.py
report.py             runs the commands whose results are in docs/benchmarks/, but for `paths` and
                      `path-grid`
pages.py              makes README and docs/BENCHMARKS.md anew from these results
views.py              the parts of these pages that show results
bars.py               draws README's picture
tree.py               this project's folder and its commit
"""
