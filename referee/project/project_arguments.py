"""The arguments and options of a project's command, and checks of their combinations."""

import argparse
from pathlib import Path

from referee import console
from referee.program.arguments import (
    Parser,
    add_common_options,
    check_files,
    check_folders,
    positive,
    readable,
)
from referee.project.project import Project
from referee.reference.dtypes import DTYPES
from referee.report import files, plot
from referee.times.round_limit import CPU_SECONDS, FULL_CPU_SECONDS, MAX_ROUNDS

QUICK_ROUNDS = 5  # of a quick check on a GPU


def make_parser(project: Project) -> Parser:
    """Return the parser of a project's command."""
    parser = Parser(prog=console.program, description=project.description)
    add = parser.add_argument
    add("problem", nargs="?", choices=project.problems, help="default: all")
    dtypes = f"one or more of {', '.join(DTYPES)} (default: float32)"
    add("--dtype", type=_dtypes, metavar="T[,T]", help=dtypes)
    add("--rows", type=positive, metavar="N", help="rows of the input (default: what fits)")
    add("--sweep", action="store_true", help="time many sizes and dtypes, forwards alone")
    file = {"type": files.writable_path, "metavar": "FILE"}
    add("--plot", **file, help="draw what --sweep measures as .svg or .png; needs matplotlib")
    add("--bundle", **file, help="write the solution as one file, and stop")
    solution = "grade these files, each of which defines ModelNew, instead of this project's; "
    solution += "results may have other strides, but elements of a result may not share memory"
    add("--solution", type=_solution, nargs="+", metavar="FILE", help=solution)
    reference = "grade them against this file's Model, get_inputs and get_init_inputs"
    add("--reference", type=readable, metavar="FILE", help=reference)
    on_gpu = f"{QUICK_ROUNDS}, with --full or --solution {MAX_ROUNDS['cuda']}"
    full = f"on a CPU, time for up to {FULL_CPU_SECONDS:g} s instead of {CPU_SECONDS:g} "
    full += "and compare large gradients; on a GPU, also time torch.compile"
    add_common_options(parser, rounds_on_gpu=on_gpu, full=full)
    return parser


def _solution(text: str) -> Path:
    """Return the path of a solution, as `readable` does.

    In "run.py --solution a.py relu" the problem's name is taken for a second file. The error then
    says what to do.
    """
    try:
        return readable(text)
    except argparse.ArgumentTypeError as error:
        path = Path(text)
        if path.suffix or path.exists():
            raise
        hint = "if it is the name of a problem, write it first"
        raise argparse.ArgumentTypeError(f"{error} ({hint})") from None


def _dtypes(text: str) -> list[str]:
    """Return the names in "float32,float16", each once; raise ArgumentTypeError for others."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(DTYPES)}")
    return names


def check_options(args: argparse.Namespace, parser: Parser, project: Project) -> None:
    """End the program with status 2 if options contradict each other."""
    _check_kind_of_work(args, parser)
    check_folders(args, parser)
    _check_sizes(args, parser, project)
    read_paths = [*(args.solution or ()), args.reference or project.own_solution]
    results = [args.json, args.markdown, args.out, args.csv, args.plot, args.bundle]
    check_files(read_paths, results, parser)
    if args.plot:
        try:
            plot.check(args.plot)
        except ValueError as error:
            parser.error(f"argument --plot: {error}")


def _check_kind_of_work(args: argparse.Namespace, parser: Parser) -> None:
    """Check that the options ask for one kind of work."""
    for option, value in (("--bundle", args.bundle), ("--solution", args.solution)):
        if value and args.sweep:
            parser.error(f"--sweep and --plot are not for {option}")
        if value and not args.problem and not args.reference:
            parser.error(f"{option} is for one problem: name the problem first")
    if args.bundle and args.solution:
        parser.error("--bundle writes this project's solution, --solution grades files: choose one")
    if args.timeout and not args.solution:
        parser.error("--timeout is for the files of --solution: name them, too")
    if args.reference and (args.problem or not args.solution or args.bundle):
        parser.error("--reference goes with --solution, and without the name of a problem")


def _check_sizes(args: argparse.Namespace, parser: Parser, project: Project) -> None:
    """Check the options for sizes and dtypes."""
    if args.sweep and args.problem and args.problem not in project.sweep_problems:
        having_one = " and ".join(project.sweep_problems)
        parser.error(f"{args.problem} has no sweep; {having_one} have one")
    if args.rows and args.sweep:
        parser.error("--rows is for one size, --sweep takes many: choose one")
    if args.solution and args.dtype and len(args.dtype) > 1:
        parser.error("--solution grades files in one dtype: give one to --dtype")
    if args.reference and (args.rows or args.dtype):
        parser.error("--rows and --dtype are for this project's problems, not for --reference")
