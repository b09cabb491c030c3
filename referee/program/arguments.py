"""The arguments and options of the command: a parser for them, and checks of their combinations.

A project's command also uses the functions without an underscore, see `project_arguments`.
"""

import argparse
from pathlib import Path
from typing import NoReturn

from referee import console
from referee.grading import TIMEOUT
from referee.program import folders
from referee.report import files
from referee.times.round_limit import CPU_SECONDS, FULL_CPU_SECONDS, MAX_ROUNDS, MIN_CPU_ROUNDS

DESCRIPTION = "Compares solutions with a reference: first the results, then the time."
MAX_PROGRAM_BYTES = 64 << 20  # of a solution or reference


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def print_help(self, file: object = None) -> None:
        """Print the help to stdout."""
        console.show(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        """Print an error, and end the program with status 2."""
        console.say(message)
        self.exit(2)


def make_parser() -> Parser:
    """Return the parser of `python -m referee`."""
    parser = Parser(prog=console.program, description=DESCRIPTION)
    add = parser.add_argument
    reference = "a problem's file, or a folder of them"
    add("reference", type=readable, metavar="REFERENCE", help=reference)
    solution = "files that define ModelNew, or a folder of them"
    add("solution", type=readable, nargs="+", metavar="SOLUTION", help=solution)
    full = f"on a CPU, time for up to {FULL_CPU_SECONDS:g} s instead of {CPU_SECONDS:g}"
    add_common_options(parser, rounds_on_gpu=str(MAX_ROUNDS["cuda"]), full=full)
    return parser


def add_common_options(parser: Parser, rounds_on_gpu: str, full: str) -> None:
    """Add the options that `python -m referee` and a project's command have.

    Args:
        parser: takes the options.
        rounds_on_gpu: how many rounds are timed on a GPU by default, for --help.
        full: the help on --full.
    """
    add = parser.add_argument
    add("--device", metavar="D", help="cpu, cuda or cuda:N (default: the best)")
    on_cpu = f"{MIN_CPU_ROUNDS} to {MAX_ROUNDS['cpu']}"
    rounds = f"timed rounds (default: {rounds_on_gpu}; on a CPU {on_cpu})"
    add("--trials", type=positive, metavar="N", help=rounds)
    add("--full", action="store_true", help=full)
    verbose = "print tracebacks, and what solutions print; has no effect on folders"
    add("--verbose", action="store_true", help=verbose)
    file = {"type": files.writable_path, "metavar": "FILE"}
    add("--json", **file, help="write everything as JSON too")
    add("--markdown", **file, help="write tables for a README too")
    limit = f"seconds for each solution, its compilation included (default: {TIMEOUT})"
    add("--timeout", type=positive, metavar="S", help=limit)
    add = parser.add_argument_group("options if the reference is a folder").add_argument
    add("--devices", metavar="D,D", type=_devices, help="grade on these devices at the same time")
    out = "append a line of JSON for each verdict, and grade only files that have no line yet"
    add("--out", **file, help=out)
    add("--csv", **file, help="write the table as CSV too")


def check_options(args: argparse.Namespace, parser: Parser) -> None:
    """End the program with status 2 if options contradict each other."""
    check_folders(args, parser)
    check_files(
        [args.reference, *args.solution], [args.json, args.markdown, args.out, args.csv], parser
    )


def check_folders(args: argparse.Namespace, parser: Parser) -> None:
    """Check that options for folders come with folders, and other options without."""
    if folders.are_named(args):
        if args.device and args.devices:
            parser.error("--device is for one device, --devices for several: choose one")
        if args.markdown:
            parser.error("--markdown is not for folders: --csv writes their table")
        return
    for option, value, instead in (
        ("--out", args.out, "--json"),
        ("--devices", args.devices, "--device"),
        ("--csv", args.csv, "--markdown"),
    ):
        if value:
            parser.error(f"{option} is for folders of references; for a file use {instead}")
    for path in args.solution or ():
        if path.is_dir():
            parser.error(f"{path} is a folder; then the reference has to be a folder, too")


def check_files(read_paths: list[Path], written_paths: list[Path | None], parser: Parser) -> None:
    """Check that no file is both read and written.

    Args:
        read_paths: the references and solutions.
        written_paths: the results; None for those that are not asked for.
        parser: ends the program.
    """
    resolved = {path.resolve() for path in read_paths}
    for path in filter(None, written_paths):
        if path.resolve() in resolved:
            parser.error(f"{path} is read by this command: write the results to another file")


def readable(text: str) -> Path:
    """Return the path of a file that can be read, or of a folder with Python files.

    Raises:
        argparse.ArgumentTypeError: there is no such file or folder.
    """
    path = Path(text)
    try:
        size = path.stat().st_size
        if path.is_dir() and any(path.glob("**/*.py")):
            return path
        if not path.is_file():  # the open below would wait for a FIFO's writer
            raise argparse.ArgumentTypeError(
                f"{path} is neither a file nor a folder with Python files"
            )
        path.open("rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:  # the name contains a NUL
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file") from None
    if size > MAX_PROGRAM_BYTES:
        raise argparse.ArgumentTypeError(
            f"{path} has {size:,} bytes; a program has at most {MAX_PROGRAM_BYTES:,}"
        )
    return path


def _devices(text: str) -> list[str]:
    """Return the names in "cuda:0,cuda:1"; raise ArgumentTypeError if one is empty."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name; expected cuda:0,cuda:1")
    return names


def positive(text: str) -> int:
    """Return a positive number; raise ArgumentTypeError for anything else."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]} is not a whole number from 1 to 999999999")
    return int(text)
