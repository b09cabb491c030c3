"""Speed figures beside the headline: `python -m problems.benchmark what [options]`.

linear     times of LinearReluDivideNew and of eager, over numbers of rows and features
operands   times and errors of LinearReluDivideNew and of eager, on operands of many kinds
host       the host's time for small forwards and training steps: ReLU of 1,024 elements, and a
           linear module of 64 features on one row
import     seconds to import model_new.py, without the seconds for torch
paths      times of each path that can compute a product, for products near the limits of
           kernels/linear/operator/choose_path.h; needs an H200 or another GPU of compute capability
           9.0, and has no options but --json
path-grid  the same for products of many sizes, with a cold and with a warm L2

report        runs the commands behind the figures of README and docs/BENCHMARKS.md for this kind of
              device, and renews these documents
pages         renews these documents from the results in docs/benchmarks/, without measuring
choose-again  after a change of choose_path.h, writes its choices into the results of `path-grid`,
              docs/benchmarks/path-grid.json, and renews these documents, without measuring

The first group measures. It prints a table of the results, and writes them to the file that --json
names. Its keys:

benchmark, command, environment, date, commit
                   what was measured, how, where, when (UTC), and the commit of this tree
dtype, precision   of the linear module's and ReLU's tensors; the precision is "" unless the dtype
                   is float32. `import`, `paths` and `path-grid` have neither.
rows               a dictionary for each row of the measurement. Times are in seconds. "ratio" is
                   the median over the rounds of eager's time / ours. Errors are in the unit u of
                   problems/benchmark/measure_operands.py. The keys of `paths` are explained in
                   problems/benchmark/measure_paths.py, and those of `path-grid` in
                   problems/benchmark/grid_rows.py.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch

from problems.benchmark import pages, report, tree
from problems.benchmark.choose_again import choose_again
from problems.benchmark.measure_host import measure_host
from problems.benchmark.measure_import import measure_import
from problems.benchmark.measure_linear import measure_linear
from problems.benchmark.measure_operands import measure_operands
from problems.benchmark.measure_path_grid import measure_path_grid
from problems.benchmark.measure_paths import measure_paths
from problems.benchmark.path_calls import check_device
from problems.benchmark.paths_tables import summary
from problems.benchmark.tables import TABLES
from problems.benchmark.views import dtype_and_setting
from referee.records import as_json, environment
from referee.report import files, machine_and_versions, tables

COMMAND = ["python", "-m", "problems.benchmark"]

# The measurements on a device and in a dtype, and those that have neither option. Each returns the
# rows of its results.
WITH_DTYPE: dict[str, Callable[[str, torch.dtype], list[dict]]] = {
    "linear": measure_linear,
    "operands": measure_operands,
    "host": measure_host,
}
WITHOUT_OPTIONS: dict[str, Callable[[], list[dict]]] = {
    "import": measure_import,
    "paths": measure_paths,
    "path-grid": measure_path_grid,
}
NEEDS_HOPPER = ["paths", "path-grid"]
# Commands that make the pages; all but the last do something else first.
MAKES_PAGES = ["report", "choose-again", "pages"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: the command's; None for those of this process.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    args = parse_options(arguments)
    if args.what in WITH_DTYPE or args.what in WITHOUT_OPTIONS:
        _measure(args, arguments)
        return 0
    failed = []
    if args.what == "report":
        failed = report.measure(args.device, args.only)
    elif args.what == "choose-again":
        choose_again(pages.RESULTS / pages.PATH_GRID)
    pages.make_pages()
    return 1 if failed else 0


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Return the command line's options; a wrong one ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog=" ".join(COMMAND),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=[*WITH_DTYPE, *WITHOUT_OPTIONS, *MAKES_PAGES])
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default_device)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    only = "report: run only commands that contain this, or whose file's name does"
    parser.add_argument("--only", default="", metavar="TEXT", help=only)
    args = parser.parse_args(arguments)
    if args.json:
        try:
            files.check_writable(args.json)
        except OSError as error:
            parser.error(f"cannot write {args.json}: {error.strerror}")
    if args.what in NEEDS_HOPPER:
        try:
            check_device(args.what, args.device)
        except ValueError as error:
            parser.error(str(error))
    return args


def _measure(args: argparse.Namespace, arguments: list[str]) -> None:
    """Measure; print the results as a table, and write them to the file of --json.

    Args:
        args: the options.
        arguments: the command line, from which the options come.
    """
    torch.set_float32_matmul_precision(args.precision)
    results = {
        "benchmark": args.what,
        "command": shlex.join([*COMMAND, *arguments]),
        "environment": environment(torch.device(args.device)),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": tree.commit(),
    }
    print(f"{machine_and_versions(results['environment'])}\n", flush=True)
    if args.what in WITH_DTYPE:
        results |= {"dtype": args.dtype, "precision": ""}
        if args.dtype == "float32":
            results["precision"] = args.precision
        print(f"{dtype_and_setting(args.dtype, results['precision'])}\n", flush=True)
        results["rows"] = WITH_DTYPE[args.what](args.device, getattr(torch, args.dtype))
    else:
        results["rows"] = WITHOUT_OPTIONS[args.what]()
    print(tables.table(TABLES[args.what](results["rows"])))
    if args.what == "paths":
        print(f"\n{summary(results['rows'])}")
    if args.json:
        files.write(args.json, as_json(results))
