"""A command's work: files graded on problems, printed and recorded as verdicts come."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch

from model import PROBLEMS
from referee import console, sweep
from referee.cases import DTYPES
from referee.child.yardsticks import COMPILED, COPY
from referee.console import Progress
from referee.judge import grade
from referee.judge.baselines import Baselines
from referee.judge.oracle import Oracle
from referee.judge.verdict import CORRECT, ERROR, LEFT_OUT, FoundError, Task, Verdict
from referee.records import record
from referee.reference_file import of_problem
from referee.report import tables
from referee.timing import CPU_SECONDS, Rounds

TIMEOUT = 300  # s for a solution, in each dtype
MOST_SHARES = 4  # of a CPU's seconds that several files share


class Subject(NamedTuple):
    """What files are graded on.

    Attributes:
        note: why the shape is not the headline's, or "".
    """

    problem: str
    dtype: str
    shape: tuple[int, ...]
    note: str = ""


@dataclass
class Session:
    """Grades files, and prints and records what is found.

    Attributes:
        why: the device is no GPU, or "".
        shown: subjects with a headline; of a sweep, problems with a title.
        seconds: that building took.
    """

    args: argparse.Namespace
    files: list[Path]
    device: torch.device
    why: str
    document: dict
    progress: Progress
    shown: list[Subject | str] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, subjects: list[Subject], oracle: Oracle | None) -> bool:
        """Does the work; whether all is right."""
        baselines, found = Baselines(self.device), self.document["records"]
        names = list(dict.fromkeys(subject.problem for subject in subjects))
        try:
            if not self.args.solution:
                self.progress("building the kernels")
                self.seconds = grade.build(names, baselines)
                self.progress.clear()
            tasks = partial(self._sweep if self.args.sweep else self._tasks, subjects, oracle)
            grade.grade_files(self.files, tasks, baselines, self._report)
        except FoundError as failed:
            self.progress.clear()
            console.say(f"the solution cannot be imported: {failed.args[1]}")
            return False
        finally:
            baselines.close()
            if len(found) > 1 and self.args.solution:
                console.show(f"\n{tables.ranking(found)}")
            if self.args.sweep and found:
                sweep.add_limits(found, sweep.copy_bandwidth(self.device))
        return all(record["verdict"] in (CORRECT, LEFT_OUT) for record in found)

    def _tasks(self, subjects: list[Subject], oracle: Oracle | None) -> Iterable[Task]:
        shares = min(len(self.files) * len(subjects), MOST_SHARES)
        for subject in subjects:
            self.subject = subject
            self.progress("running the reference")
            yield self._task(CPU_SECONDS / shares, oracle)

    def _sweep(self, subjects: list[Subject], oracle: None) -> Iterable[Task]:
        """The tasks of the sizes that fit in memory and time."""
        console.show(tables.headline(self.document["environment"], self.device, self.why))
        sizes = [
            (Subject(name, dtype, shape), setting)
            for name, dtype, *_ in subjects
            for setting in grade.PROBLEMS[name].settings(DTYPES[dtype], self.device)[:2]
            for shape in grade.PROBLEMS[name].sweep(PROBLEMS[name], self.device)
        ]
        end = monotonic() + sweep.SECONDS[self.device.type]
        for done, (subject, setting) in enumerate(sizes):
            self.subject, seconds = subject, end - monotonic()
            name, dtype, shape, _ = subject
            elements = grade.PROBLEMS[name].elements(PROBLEMS[name], shape)
            needed = elements * DTYPES[dtype].itemsize
            if reason := sweep.why_left_out(needed, seconds, self.device):
                self._report(None, Verdict(Path(), LEFT_OUT, reason))
            else:
                yield self._task(seconds / (len(sizes) - done), settings=(setting,))

    def _task(self, seconds: float, oracle: Oracle | None = None, settings: tuple = ()) -> Task:
        name, dtype, shape, _ = self.subject
        oracle = oracle or Oracle(of_problem(PROBLEMS[name], shape, DTYPES[dtype]), self.device)
        own = grade.PROBLEMS.get(name) if oracle.file.is_ours else None
        yardsticks = own.YARDSTICKS[self.device.type] if own else (COPY,)
        if self.device.type == "cuda" and not self.args.solution:
            yardsticks += (COMPILED,)
        return Task(
            name,
            oracle,
            settings or (own.settings(oracle.dtype, self.device) if own else ("",)),
            Rounds(self.args.trials, seconds),
            yardsticks,
            self.args.timeout or TIMEOUT,
            self.progress,
            only_times=self.args.sweep,
        )

    def _report(self, task: Task | None, verdict: Verdict) -> None:
        """Prints and records a verdict on the subject at hand."""
        subject, is_ours = self.subject, not self.args.solution
        if is_ours and verdict.word == ERROR and not verdict.count:
            raise FoundError(ERROR, verdict.reason)
        verdict.import_seconds += self.seconds
        file = None if is_ours else str(verdict.file)
        found = record(subject.problem, subject.shape, subject.dtype, verdict, file)
        self.document["records"].append(found)
        if self.args.sweep:
            is_first = bool(verdict.runs) and subject.problem not in self.shown
            self.shown += [subject.problem] * is_first
            console.show(tables.sweep_line(found, is_first))
            return
        ready = f"kernels ready in {verdict.import_seconds:.1f} s; " * (not self.shown)
        if subject not in self.shown:
            about, shape = self.document["environment"], subject.shape
            head = tables.headline(about, self.device, self.why, shape, subject.dtype)
            start = "\n" * bool(self.shown) + f"{subject.problem}: "
            console.show("\n".join([start + head] + [subject.note] * bool(subject.note)))
            self.shown.append(subject)
        console.show(ready + tables.details(found) if is_ours else tables.line(found))
