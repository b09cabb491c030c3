"""Compares the replacements with their references: first the outputs, then the time.

Without a problem's name it does so for all of them, one after the other.

Exit status: 0 if everything is right, 1 if something is wrong or could not be written, 2 for a
request that makes no sense, 130 after an interrupt.
"""

from referee import ending  # first: the imports that follow take seconds

if __name__ == "__main__":
    ending.end_on_interrupt()

# isort: split
import argparse
import importlib
import shlex
import stat
import sys
from pathlib import Path
from time import perf_counter
from typing import NoReturn

from referee import correctness, files, report  # before torch, of whose warnings it silences one

# isort: split
import torch

from model import PROBLEMS
from referee import devices, linear, markdown, plot, ranking, records, relu, solutions, sweep
from referee.cases import DTYPES
from referee.outcome import Outcome, Task
from referee.progress import Progress
from referee.records import Document
from referee.timing import CPU_SECONDS, Rounds

# Not of the docstring, which `python -OO` removes.
DESCRIPTION = "Compares the replacements with their references: first the outputs, then the time."
GRADERS = {"relu": relu, "linear_relu_divide": linear}
LARGEST_SOLUTION = 64 << 20  # bytes
TIMEOUT = 300  # s for a solution
MOST_SHARES = 4  # of a CPU's seconds that several files share

# The shape of x, and why it is not the headline's, by the names of problem and dtype.
Shapes = dict[tuple[str, str], tuple[tuple[int, ...], str]]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def print_help(self, file: object = None) -> None:
        ending.show(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        ending.say(message)
        self.exit(2)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    _check(args, parser)
    if args.bundle:
        return _bundle(args.problem, args.bundle)
    names = [args.problem] if args.problem else list(PROBLEMS)
    dtypes = args.dtype or (sweep.DTYPES if args.sweep else ["float32"])
    try:
        device, why = devices.choose(args.device)
        buffers = solutions.BUFFERS[device.type] if args.solution else None
        shapes: Shapes = {
            (name, dtype): GRADERS[name].choose_shape(
                PROBLEMS[name], args.rows, DTYPES[dtype], device, buffers
            )
            for name in names
            for dtype in dtypes
        }
    except ValueError as error:
        parser.error(str(error))

    measure, kind = _compare, "comparison"
    if args.solution:
        measure, kind = _solutions, "grading"
    elif args.sweep:
        measure, kind = _sweep, "sweep"
    command = shlex.join(["run.py", *(sys.argv[1:] if arguments is None else arguments)])
    document = Document(f"python {command}", kind, report.environment(device))
    try:
        fine = measure(args, device, why, shapes, document)
    except KeyboardInterrupt:
        document.complete = False
        if document.records:
            _write_results(args, document)
        raise
    return 0 if _write_results(args, document) and fine else 1


def _compare(
    args: argparse.Namespace,
    device: torch.device,
    why: str,
    shapes: Shapes,
    document: Document,
) -> bool:
    """Compares this project's replacements with their references; whether all is right."""
    progress, fine = Progress(), True
    state = correctness.global_state()
    imported = _import({name for name, _ in shapes}, progress)
    if imported is None:
        return False
    kinds, seconds = imported
    wanted = Rounds(args.trials, CPU_SECONDS / len(shapes))
    for (name, dtype), (shape, note) in shapes.items():
        outcome, complete = Outcome(), False
        task = Task(PROBLEMS[name], kinds[name], shape, DTYPES[dtype], device, wanted, progress)
        try:
            GRADERS[name].grade(task, outcome)
            now = correctness.global_state()
            outcome.checks.failures += [
                f"the solution changed {what}" for what in now if now[what] != state[what]
            ]
            complete = True
        finally:  # after an interrupt too, with what there is
            progress.clear()
            outcome.trim()
            if complete or outcome.runs:
                start = "\n" * bool(document.records) + f"{name}: " * (len(shapes) > 1)
                head = report.headline(document.environment, device, why, shape, dtype)
                lines = [start + head] + [note] * bool(note)
                ready = f"kernels ready in {seconds:.1f} s; " * (not document.records)
                ending.show("\n".join([*lines, ready + report.outcome(outcome)]))
            facts = {"problem": name, "shape": shape, "dtype": dtype}
            document.records.append(records.of_outcome(facts, outcome, seconds, complete))
        fine &= not outcome.problems
    return fine


def _sweep(
    args: argparse.Namespace,
    device: torch.device,
    why: str,
    shapes: Shapes,
    document: Document,
) -> bool:
    """Times this project's replacements over sizes; whether all is right."""
    progress = Progress()
    imported = _import({name for name, _ in shapes}, progress)
    if imported is None:
        return False
    kinds, seconds = imported
    wanted = Rounds(args.trials)
    series = {
        (name, dtype): GRADERS[name].sweep(
            Task(PROBLEMS[name], kinds[name], (), DTYPES[dtype], device, wanted, progress)
        )
        for name, dtype in shapes
    }
    progress.clear()
    ending.show(report.headline(document.environment, device, why))
    sizes = []
    try:
        for size in sweep.sweep(series, device, args.trials, progress):
            progress.clear()
            ending.show(sweep.lines(size, sizes))
            sizes.append(size)
    finally:
        progress.clear()
        document.records += [records.of_size(size, seconds) for size in sizes]
    return not any(size.problems for size in sizes)


def _check(args: argparse.Namespace, parser: Parser) -> None:
    """Ends with status 2 where options contradict each other."""
    args.sweep |= args.plot is not None
    for option, value in (("--bundle", args.bundle), ("--solution", args.solution)):
        if value and args.sweep:
            parser.error(f"--sweep and --plot are not for {option}")
        if value and not args.problem:
            parser.error(f"{option} is for one problem: which?")
    if args.bundle and args.solution:
        parser.error("--bundle writes this project's solution, --solution grades files: which?")
    if args.timeout and not args.solution:
        parser.error("--timeout is for --solution")
    if args.rows and args.sweep:
        parser.error("--rows is for one size, --sweep takes many: which?")
    if args.solution and args.dtype and len(args.dtype) > 1:
        parser.error("--solution grades files in one dtype: which?")


def _parser() -> Parser:
    parser = Parser(prog="run.py", description=DESCRIPTION)
    parser.add_argument("problem", nargs="?", choices=list(PROBLEMS), help="default: all")
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: the best)")
    parser.add_argument(
        "--dtype",
        type=_dtypes,
        metavar="T[,T]",
        help=f"one or more of {', '.join(DTYPES)} (default: float32)",
    )
    parser.add_argument(
        "--rows", type=_positive, metavar="N", help="rows of the input (default: what fits)"
    )
    parser.add_argument(
        "--trials", type=_positive, metavar="N", help="timed rounds (default: 50, on a CPU 3 to 50)"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="time many sizes and dtypes, forwards alone"
    )
    parser.add_argument(
        "--json", type=_writable, metavar="FILE", help="write everything as JSON too"
    )
    parser.add_argument(
        "--markdown", type=_writable, metavar="FILE", help="write tables for a README too"
    )
    parser.add_argument(
        "--plot",
        type=_drawable,
        metavar="FILE",
        help="draw what --sweep measures as .svg or .png; needs matplotlib",
    )
    parser.add_argument(
        "--bundle", type=_writable, metavar="FILE", help="write the solution as one file, and stop"
    )
    parser.add_argument(
        "--solution",
        type=_solution_file,
        nargs="+",
        metavar="FILE",
        help="grade these files, each of which defines ModelNew, instead of this project's",
    )
    parser.add_argument(
        "--timeout",
        type=_positive,
        metavar="S",
        help=f"seconds for each of them, its compilation included (default: {TIMEOUT})",
    )
    return parser


def _solution_file(text: str) -> Path:
    path = Path(text)
    try:
        there = path.stat()
        if stat.S_ISREG(there.st_mode):  # a FIFO's opening would wait
            path.open("rb").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise argparse.ArgumentTypeError(f"cannot read {path}: {reason}") from None
    if not stat.S_ISREG(there.st_mode):
        raise argparse.ArgumentTypeError(f"{path} is no file")
    if there.st_size > LARGEST_SOLUTION:
        raise argparse.ArgumentTypeError(f"{path} has {there.st_size:,} bytes: no program")
    return path


def _dtypes(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(DTYPES)}")
    return names


def _drawable(text: str) -> Path:
    try:
        plot.check(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return _writable(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def _writable(text: str) -> Path:
    path = Path(text)
    try:
        files.check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    return path


def _import(
    names: set[str], progress: Progress
) -> tuple[dict[str, type[torch.nn.Module]], float] | None:
    """The solutions, and the seconds that their import, which builds the kernels, took.

    None if they cannot be imported: a line says why.
    """
    progress("building the kernels")
    start = perf_counter()
    try:
        kinds = importlib.import_module("model_new").SOLUTIONS
        if missing := names - kinds.keys():
            raise ImportError(f"it has none for {', '.join(sorted(missing))}")
    except Exception as error:  # whatever the solution raises
        progress.clear()
        ending.say(f"the solution cannot be imported: {type(error).__name__}: {error}")
        return None
    return kinds, perf_counter() - start


def _solutions(
    args: argparse.Namespace,
    device: torch.device,
    why: str,
    shapes: Shapes,
    document: Document,
) -> bool:
    """Grades files; whether all are right."""
    [((name, dtype), (shape, note))] = shapes.items()
    wanted = Rounds(args.trials, CPU_SECONDS / min(len(args.solution), MOST_SHARES))
    task = solutions.Task(
        name,
        PROBLEMS[name],
        shape,
        DTYPES[dtype],
        device,
        wanted,
        args.timeout or TIMEOUT,
        Progress(),
    )
    head = report.headline(document.environment, device, why, shape, dtype)
    ending.show(f"{name}: {head}" + f"\n{note}" * bool(note))
    facts = {"problem": name, "shape": shape, "dtype": dtype}
    verdicts = []

    def add(verdict: solutions.Verdict) -> None:
        verdicts.append(verdict)
        document.records.append(records.of_verdict(facts, verdict))
        ending.show(ranking.line(verdict))

    try:
        solutions.grade_files(args.solution, task, add)
    finally:
        if len(verdicts) > 1:
            ending.show(f"\n{ranking.ranking(verdicts)}")
    return all(verdict.word == solutions.CORRECT for verdict in verdicts)


def _bundle(problem: str, path: Path) -> int:
    text = importlib.import_module("kernels.bundle").bundle(problem)
    if not _write(path, text):
        return 1
    ending.show(f"wrote {path}: {problem} in one file of {len(text.splitlines()):,} lines")
    return 0


def _write_results(args: argparse.Namespace, document: Document) -> bool:
    """Whether every file that was asked for could be written."""
    fine, content = True, document.content()
    if args.json:
        fine &= _write(args.json, document.json())
    if args.markdown:
        fine &= _write(args.markdown, markdown.tables(content))
    if args.plot:
        fine &= _write(args.plot, plot.draw(content, args.plot.suffix))
    return fine


def _write(path: Path, text: str | bytes) -> bool:
    """Whether it could be written; says on stderr how it could not."""
    try:
        note = files.write(path, text)
    except OSError as error:
        ending.say(f"cannot write {path}: {error.strerror}")
        return False
    if note:
        ending.say(note)
    return True


if __name__ == "__main__":
    sys.exit(ending.run(main))
