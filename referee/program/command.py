"""The command line of `python -m referee REFERENCE SOLUTION...`.

`main` grades either files on a reference, see `grade_files`, or folders on a folder of references,
see `folders`. The command of a project with problems of its own is in `referee/project`.

Exit status: 0 if everything is correct; 1 if something is not, or a file could not be written; 2 if
the options make no sense, or the reference cannot be graded (1 in folders); 130 after Ctrl-C.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from referee import console, records
from referee.contestants.forms import dtype_name
from referee.devices import choose_device
from referee.engine import read_files
from referee.grading import TIMEOUT, Options
from referee.message_lines import first_error_line
from referee.program import folders
from referee.program.arguments import Parser, check_options, make_parser
from referee.program.file_grader import FileGrader
from referee.program.grade_files import grade_files
from referee.records import Subject
from referee.reference.file import BadReferenceError, load
from referee.reference.problem import Problem
from referee.report import files, markdown, tables
from referee.times.round_limit import CPU_SECONDS, FULL_CPU_SECONDS, RoundLimit

# Several files on one problem share a CPU's seconds, but each gets at least a quarter of them.
MAX_SHARES = 4


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: the command's; None for those of this process.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    parser = make_parser()
    args = parser.parse_args(arguments)
    check_options(args, parser)
    return grade(args, parser, shlex.join(["python", "-m", "referee", *arguments]))


def grade(args: argparse.Namespace, parser: Parser, command_line: str) -> int:
    """Grade files or folders on the reference that the options name; return the exit status.

    Args:
        args: the options.
        parser: ends the program if they cannot be followed.
        command_line: as the user can type it again in a shell.
    """
    progress = console.Progress()
    if folders.are_named(args):
        return _grade_folders(args, parser, command_line, progress)
    with _refusals_of(parser):
        device, why_no_gpu = choose_device(args.device)
        progress("running the reference")
        problem = Problem(args.reference.stem, load(args.reference), device)
        solutions = read_files(args.solution)
    progress.clear()
    document = records.document(command_line, "grading", records.environment(device))
    grader = FileGrader(
        files=solutions,
        subjects=[Subject(problem.name, dtype_name(problem.dtype), problem.shape)],
        make_problem=lambda _subject, _device: problem,
        device=device,
        options=make_options(args),
        headline=tables.headline(document["environment"], device, why_no_gpu),
        document=document,
        progress=progress,
        is_verbose=args.verbose,
    )
    return run(partial(grade_files, grader), partial(write_results, args), document)


@contextmanager
def _refusals_of(parser: Parser) -> Iterator[None]:
    """End the program with one line if the block cannot do what the options ask for."""
    try:
        yield
    except (BadReferenceError, ValueError) as error:
        parser.error(str(error))
    except torch.OutOfMemoryError as error:
        parser.error(f"no memory to prepare the problem: {first_error_line(str(error))}")
    except OSError as error:
        parser.error(f"cannot read {error.filename}: {error.strerror}")


def _grade_folders(
    args: argparse.Namespace, parser: Parser, command_line: str, progress: console.Progress
) -> int:
    """Grade folders; return the exit status.

    Args:
        args: the options.
        parser: as for `grade`.
        command_line: as the user can type it again, for the JSON file.
        progress: shows what is done now.
    """
    with _refusals_of(parser):
        device, why_no_gpu = choose_device(args.device)
        devices = _choose_devices(args.devices) if args.devices else [device]
        job = folders.find_work(args)
    document = records.document(command_line, "grading", records.environment(devices[0]))
    names = ", ".join(map(str, devices))
    console.show(tables.headline(document["environment"], names, why_no_gpu))
    return folders.grade(job, devices, make_options(args), document, progress)


def _choose_devices(names: list[str]) -> list[torch.device]:
    """Return the devices that `--devices` names, each GPU once: "cuda,cuda:0" is one GPU.

    The CPU may be named several times, for as many workers.
    """
    devices: list[torch.device] = []
    for name in names:
        device, _ = choose_device(name)
        if device.type == "cpu" or device not in devices:
            devices.append(device)
    return devices


def run(work: Callable[[], bool], write: Callable[[dict], bool], document: dict) -> int:
    """Do a command's work and write the results; return the exit status.

    After an interrupt, the results so far are written.

    Args:
        work: adds to the document; returns whether it has succeeded.
        write: writes the files that the options name; returns whether all could be written.
        document: the content of the JSON file.
    """
    try:
        is_success = work()
    except KeyboardInterrupt:
        document["complete"] = False
        if document["records"]:
            write(document)
        raise
    is_written = write(document)
    return 0 if is_written and is_success else 1


def make_options(args: argparse.Namespace) -> Options:
    """Return how the files that the user names are graded."""
    seconds = FULL_CPU_SECONDS if args.full else CPU_SECONDS
    if args.solution and not folders.are_named(args):  # files of folders share nothing
        seconds /= min(len(args.solution), MAX_SHARES)
    return Options(round_limit=RoundLimit(args.trials, seconds), timeout=args.timeout or TIMEOUT)


def write_results(args: argparse.Namespace, document: dict) -> bool:
    """Write the files that the options name; return whether all of them could be written."""
    are_written = []
    if args.json:
        are_written.append(files.try_to_write(args.json, records.as_json(document)))
    if args.markdown:
        are_written.append(files.try_to_write(args.markdown, markdown.as_markdown(document)))
    return all(are_written)
