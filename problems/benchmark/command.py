"""Runs the command line of `python -m problems.benchmark`; options.py explains it."""

import argparse
import shlex
import sys
from collections.abc import Callable
from datetime import datetime, timezone

import torch

from problems.benchmark import pages, report, tree
from problems.benchmark.measure_host import measure_host
from problems.benchmark.measure_import import measure_import
from problems.benchmark.measure_linear import measure_linear
from problems.benchmark.measure_operands import measure_operands
from problems.benchmark.options import MEASUREMENTS, PROGRAM, make_parser
from problems.benchmark.paths.choose_again import choose_again
from problems.benchmark.paths.measure_path_grid import measure_path_grid
from problems.benchmark.paths.measure_paths import measure_paths
from problems.benchmark.paths.path_calls import check_device
from problems.benchmark.paths.products_table import summary
from problems.benchmark.tables import TABLES
from problems.benchmark.views import dtype_and_setting
from referee.records import as_json, environment
from referee.report import files, machine_and_versions, tables

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


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: the command's; None for those of this process.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    args = parse_options(arguments)
    if args.what in MEASUREMENTS:
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
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
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
        "command": f"{PROGRAM} {shlex.join(arguments)}",
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
