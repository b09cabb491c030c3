"""A command's work: files graded on problems, printed and recorded as verdicts come."""

import argparse
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from model import PROBLEMS
from referee import ending, records, sweep
from referee.cases import DTYPES
from referee.child.yardsticks import COMPILED, COPY
from referee.judge import grade
from referee.judge.baselines import Baselines
from referee.judge.oracle import Oracle
from referee.judge.verdict import CORRECT, ERROR, LEFT_OUT, FoundError, Task, Verdict
from referee.progress import Progress
from referee.records import Document
from referee.reference_file import of_problem
from referee.report import ranking
from referee.report import tables as report
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


class Session:
    """Grades files, and prints and records what is found."""

    def __init__(
        self,
        args: argparse.Namespace,
        ours: Path,
        device: torch.device,
        why: str,
        document: Document,
        progress: Progress,
    ) -> None:
        self.args, self.device, self.why, self.document = args, device, why, document
        self.progress, self.verdicts = progress, []
        self.shown: list[Subject | str] = []
        self.seconds = 0.0  # that building took
        self.files = args.solution or [ours]
        self.timeout = args.timeout or TIMEOUT

    def run(self, subjects: list[Subject], oracle: Oracle | None) -> bool:
        """Does the work; whether all is right."""
        baselines = Baselines(self.device)
        names = list(dict.fromkeys(subject.problem for subject in subjects))
        try:
            if not self.args.solution:
                self.progress("building the kernels")
                self.seconds = grade.build(names, baselines)
                self.progress.clear()
            make = self._sweep if self.args.sweep else self._tasks
            tasks = partial(make, subjects, oracle)
            grade.grade_files(self.files, tasks, baselines, self._report)
        except FoundError as failed:
            self.progress.clear()
            ending.say(f"the solution cannot be imported: {failed.args[1]}")
            return False
        finally:
            baselines.close()
            if len(self.verdicts) > 1 and self.args.solution:
                ending.show(f"\n{ranking.ranking(self.verdicts)}")
            if self.args.sweep and self.document.records:
                sweep.add_limits(self.document.records, sweep.copy_bandwidth(self.device))
        return all(verdict.word in (CORRECT, LEFT_OUT) for verdict in self.verdicts)

    def _task(self, name: str, oracle: Oracle, seconds: float, **more: object) -> Task:
        own = grade.PROBLEMS.get(name) if oracle.file.is_ours else None
        yardsticks = own.yardsticks[self.device.type] if own else (COPY,)
        if self.device.type == "cuda" and not self.args.solution:
            yardsticks += (COMPILED,)
        settings = own.settings(oracle.dtype, self.device) if own else ("",)
        return Task(
            name,
            oracle,
            more.pop("settings", settings),
            Rounds(self.args.trials, seconds),
            yardsticks,
            self.timeout,
            self.progress,
            **more,
        )

    def _tasks(self, subjects: list[Subject], oracle: Oracle | None) -> Iterable[Task]:
        shares = min(len(self.files) * len(subjects), MOST_SHARES)
        for subject in subjects:
            self.progress("running the reference")
            known = oracle or self._oracle(subject)
            self.subject = subject
            yield self._task(subject.problem, known, CPU_SECONDS / shares)

    def _oracle(self, subject: Subject) -> Oracle:
        name, dtype, shape, _ = subject
        return Oracle(of_problem(PROBLEMS[name], shape, DTYPES[dtype]), self.device)

    def _sweep(self, subjects: list[Subject], oracle: None) -> Iterable[Task]:
        sizes = []
        for name, dtype, *_ in subjects:
            own = grade.PROBLEMS[name]
            for setting in own.settings(DTYPES[dtype], self.device)[:2]:
                for shape, count in own.sweep(PROBLEMS[name], self.device):
                    subject = Subject(name, dtype, shape)

                    def make(seconds: float, subject=subject, setting=setting) -> Task:
                        self.subject, about = subject, {"settings": (setting,), "only_times": True}
                        return self._task(subject.problem, self._oracle(subject), seconds, **about)

                    sizes.append((subject, count * DTYPES[dtype].itemsize, make))
        ending.show(report.headline(self.document.environment, self.device, self.why))
        return sweep.sweep(sizes, self.device, self._leave_out)

    def _leave_out(self, subject: Subject, verdict: Verdict) -> None:
        self.subject = subject
        self._report(None, verdict)

    def _report(self, task: Task | None, verdict: Verdict) -> None:
        """Prints and records a verdict on the subject at hand."""
        subject, is_ours = self.subject, not self.args.solution
        if is_ours and verdict.word == ERROR and not verdict.count:
            raise FoundError(ERROR, verdict.reason)
        verdict.import_seconds += self.seconds
        self.verdicts.append(verdict)
        facts = {"problem": subject.problem, "shape": subject.shape, "dtype": subject.dtype}
        file = None if is_ours else str(verdict.file)
        self.document.records.append(record := records.record(facts, verdict, file))
        if self.args.sweep:
            is_first = bool(verdict.runs) and subject.problem not in self.shown
            self.shown += [subject.problem] if verdict.runs else []
            ending.show(sweep.line(record, verdict, is_first))
            return
        if subject not in self.shown:
            environment, shape = self.document.environment, subject.shape
            head = report.headline(environment, self.device, self.why, shape, subject.dtype)
            start = "\n" * bool(self.shown) + f"{subject.problem}: "
            ending.show("\n".join([start + head] + [subject.note] * bool(subject.note)))
        is_first = not self.shown
        self.shown.append(subject)
        if is_ours:
            ready = f"kernels ready in {verdict.import_seconds:.1f} s; " * is_first
            ending.show(ready + report.details(verdict))
        else:
            ending.show(ranking.line(verdict))
