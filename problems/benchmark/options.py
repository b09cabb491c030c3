"""Speed figures beside the headline: `python -m problems.benchmark what [options]`.

To measure:

linear     times of LinearReluDivideNew and of eager, over numbers of rows and features
operands   times and errors of LinearReluDivideNew and of eager, on operands of many kinds
host       the host's time for small forwards and training steps: ReLU of 1,024 elements, and a
           linear module of 64 features on one row
import     seconds to import model_new.py, without the seconds for torch
paths      times of each path that can compute a product, for products near the limits of
           kernels/linear/operator/choose_path.h; needs an H200 or another GPU of compute capability
           9.0, and has no options but --json
path-grid  the same for products of many sizes, with a cold and with a warm L2

To renew README and docs/BENCHMARKS.md:

report        runs the commands behind their figures for this kind of device, and then `pages`
pages         makes their tables and README's picture from the results in docs/benchmarks/
choose-again  after a change of choose_path.h, writes its choices into the results of `path-grid`,
              docs/benchmarks/path-grid.json, and then runs `pages`. Nothing is measured.

A measurement prints a table of its results, and writes them to the file that --json names. The
file's keys:

benchmark, command, environment, date, commit
                   what was measured, how, where, when (UTC), and the commit of this tree
dtype, precision   of the linear module's and ReLU's tensors; the precision is "" unless the dtype
                   is float32. `import`, `paths` and `path-grid` have neither.
rows               a dictionary for each row of the measurement. Times are in seconds. "ratio" is
                   the median over the rounds of eager's time / ours. Errors are in the unit u of
                   problems/benchmark/measure_operands.py. The keys of `paths` are explained in
                   problems/benchmark/paths/measure_paths.py, and those of `path-grid` in
                   problems/benchmark/paths/grid_rows.py.
"""

import argparse

from referee.report import files

PROGRAM = "python -m problems.benchmark"
MEASUREMENTS = ["linear", "operands", "host", "import", "paths", "path-grid"]
# Commands that make the pages; all but the last do something else first.
MAKES_PAGES = ["report", "choose-again", "pages"]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. It needs no torch."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=[*MEASUREMENTS, *MAKES_PAGES])
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    add("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    add("--precision", choices=["highest", "high", "medium"], default="highest")
    add("--json", type=files.writable_path, metavar="FILE", help="write the results to this file")
    only = "report: run only commands that contain this, or whose file's name does"
    add("--only", default="", metavar="TEXT", help=only)
    return parser
