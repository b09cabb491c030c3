"""This project's replacements: imported, compared with their references, timed over sizes."""

import importlib
import sys
from time import perf_counter

import torch
from torch import nn

from model import PROBLEMS
from referee import correctness, ending, records, sweep
from referee.cases import DTYPES
from referee.outcome import Outcome, Task
from referee.progress import Progress
from referee.records import Document
from referee.report import tables as report
from referee.timing import CPU_SECONDS, Rounds

# Each problem's is the module of its name, with the functions `choose_shape`, `grade` and `sweep`.
GRADERS = {name: importlib.import_module(f"referee.{name}") for name in PROBLEMS}

# The shape of x, and why it is not the headline's, or "", by the names of problem and dtype.
Shapes = dict[tuple[str, str], tuple[tuple[int, ...], str]]


def compare(
    shapes: Shapes, device: torch.device, why: str, trials: int | None, document: Document
) -> bool:
    """Checks and times all of them, prints and records what is found; whether all is right.

    Args:
        why: the device is no GPU, or "".
    """
    progress, fine = Progress(), True
    state = correctness.global_state()
    imported = _import({name for name, _ in shapes}, progress)
    if imported is None:
        return False
    kinds, seconds = imported
    wanted = Rounds(trials, CPU_SECONDS / len(shapes))
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
                is_first = not document.records
                facts = {"problem": name, "shape": shape, "dtype": dtype}
                document.records.append(records.of_outcome(facts, outcome, seconds, complete))
                start = "\n" * (not is_first) + f"{name}: " * (len(shapes) > 1)
                head = report.headline(document.environment, device, why, shape, dtype)
                ready = f"kernels ready in {seconds:.1f} s; " * is_first
                lines = [start + head] + [note] * bool(note) + [ready + report.outcome(outcome)]
                ending.show("\n".join(lines))
        fine &= not outcome.problems
    return fine


def sweep_sizes(
    shapes: Shapes, device: torch.device, why: str, trials: int | None, document: Document
) -> bool:
    """Times them over sizes, prints and records that; whether all is right. As `compare`."""
    progress = Progress()
    imported = _import({name for name, _ in shapes}, progress)
    if imported is None:
        return False
    kinds, seconds = imported
    series = {
        (name, dtype): GRADERS[name].sweep(
            Task(PROBLEMS[name], kinds[name], (), DTYPES[dtype], device, Rounds(trials), progress)
        )
        for name, dtype in shapes
    }
    progress.clear()
    ending.show(report.headline(document.environment, device, why))
    sizes: list[sweep.Size] = []
    try:
        for size in sweep.sweep(series, device, trials, progress):
            progress.clear()
            sizes.append(size)
            ending.show(sweep.lines(size, sizes[:-1]))
    finally:
        progress.clear()
        document.records += [records.of_size(size, seconds) for size in sizes]
    return not any(size.problems for size in sizes)


def _import(names: set[str], progress: Progress) -> tuple[dict[str, type[nn.Module]], float] | None:
    """The solutions, and the seconds that their import, which builds the kernels, took.

    None if they cannot be imported: a line says why.
    """
    progress("building the kernels")
    start = perf_counter()
    try:
        if len(names) > 1 and "model_new" not in sys.modules:  # at the same time
            importlib.import_module("kernels").build_together(*sorted(names))
        kinds = importlib.import_module("model_new").SOLUTIONS
        if missing := names - kinds.keys():
            raise ImportError(f"it has none for {', '.join(sorted(missing))}")
    except Exception as error:  # whatever the solution raises
        progress.clear()
        ending.say(f"the solution cannot be imported: {type(error).__name__}: {error}")
        return None
    return kinds, perf_counter() - start
