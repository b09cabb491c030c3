"""A command's work: files graded on problems, printed and recorded as verdicts come."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter

import torch

from referee import console, records
from referee.cases import DTYPES
from referee.engine import Engine, referee_at_work
from referee.grading import GradedFile, Options
from referee.memory import BUFFERS, LARGEST_SHARE, free_bytes
from referee.problem import Problem
from referee.records import Subject
from referee.reference_file import BadReferenceError, first_error_line
from referee.report import tables
from referee.timing import Rounds
from referee.verdict import CORRECT, ERROR, LEFT_OUT, FoundError, Verdict

SWEEP_SECONDS = {"cpu": 100.0, "cuda": 300.0}  # for all sizes; the last one may take longer
QUICK_SECONDS = {"cpu": 17, "cuda": 15}  # about, of a problem in one dtype
COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}  # bytes, beyond the caches
COPIES = 10


class UnimportableError(Exception):
    """This project's own solution cannot be imported; the message says why."""


@dataclass
class Session:
    """Grades files, and prints and records what is found.

    Attributes:
        args: the command's options.
        files: to be graded.
        subjects: the problems, dtypes and sizes on which they are graded, in order.
        make: returns the problem of a subject.
        device: where solutions compute.
        headline: of all records.
        document: where records go.
        options: the conditions.
        progress: says what is being done.
    """

    args: argparse.Namespace
    files: list[GradedFile]
    subjects: list[Subject]
    make: Callable[[Subject, torch.device], Problem]
    device: torch.device
    headline: str
    document: dict
    options: Options
    progress: console.Progress
    _headlines: list[Subject] = field(default_factory=list)  # whose headline is printed
    _titles: list[str] = field(default_factory=list)  # problems whose title of a sweep is printed

    @property
    def _is_ours(self) -> bool:
        """Return whether this project's own solution is graded."""
        return not self.args.solution

    def run(self) -> bool:
        """Grade all files on all subjects; return whether every verdict is correct or left out."""
        found = self.document["records"]
        started = monotonic()
        try:
            compiled = self.options.compiled
            with referee_at_work(own_builds=not self._is_ours, compiled=compiled) as server:
                if self.args.sweep:
                    console.show(self.headline)
                if self.options.is_quick:
                    self._say_how_long()
                for index, subject in enumerate(self.subjects):
                    self._grade_all(subject, index, server, started)
        except UnimportableError as failed:
            console.say(f"the solution cannot be imported: {failed}")
            return False
        finally:
            self.progress.clear()
            if len(found) > 1 and self.args.solution:
                console.show(f"\n{tables.ranking(found)}")
            if self.args.sweep and found:
                add_limits(found, copy_bandwidth(self.device))
        if self._is_ours and not self.args.sweep:
            console.show(f"\n{tables.closing(found, monotonic() - started, self.args.full)}")
        are_right = all(record["verdict"] in (CORRECT, LEFT_OUT) for record in found)
        if self.args.sweep:
            console.show(f"\n{tables.closing_of_sweep(found, monotonic() - started)}")
            return are_right and not tables.untimed(found)
        return are_right

    def _say_how_long(self) -> None:
        """Say how long the quick check takes."""
        names = ", ".join(dict.fromkeys(subject.problem for subject in self.subjects))
        seconds = QUICK_SECONDS[self.device.type] * len(self.subjects)
        built = "once the first run has built the kernels (up to two minutes)"
        console.say(f"a quick check of {names}: about {seconds} s, {built}; --full times longer")

    def _grade_all(self, subject: Subject, index: int, server: object, started: float) -> None:
        """Grade all files on a subject."""
        options = self.options
        if self.args.sweep:
            seconds = self._share(index, monotonic() - started)
            if reason := self._why_left_out(subject, seconds):
                self._report(subject, None, Verdict(self.files[0].path, LEFT_OUT, reason))
                return
            options = replace(options, rounds=Rounds(self.args.trials, seconds / 2))
        self._announce(subject, index)
        try:
            problem = self.make(subject, self.device)
        except (BadReferenceError, torch.OutOfMemoryError) as bad:
            word = LEFT_OUT if self.args.sweep else ERROR
            self._report_for_all(subject, word, first_error_line(str(bad)))
            return
        engine = Engine(problem, server, options, self.progress)
        try:
            self._grade_on(subject, engine)
        finally:
            engine.close()

    def _grade_on(self, subject: Subject, engine: Engine) -> None:
        """Grade all files on a subject, once eager could be timed alone."""
        try:
            engine.prepare()
        except (FoundError, BadReferenceError, torch.OutOfMemoryError) as found:
            self._report_for_all(subject, ERROR, first_error_line(str(found.args[-1])))
            return
        for file in self.files:
            self._grade_one(subject, file, engine)

    def _report_for_all(self, subject: Subject, word: str, reason: str) -> None:
        """Report the same verdict on every file: the problem could not be prepared."""
        self.progress.clear()
        for file in self.files:
            self._report(subject, file, Verdict(file.path, word, reason))

    def _share(self, index: int, passed: float) -> float:
        """Return the seconds that a size of a sweep may take: each problem has as much time.

        Args:
            index: which of the subjects.
            passed: seconds since the sweep began.
        """
        names = [subject.problem for subject in self.subjects]
        problems = list(dict.fromkeys(names))
        name = names[index]
        end = SWEEP_SECONDS[self.device.type] * (problems.index(name) + 1) / len(problems)
        return (end - passed) / names[index:].count(name)

    def _announce(self, subject: Subject, index: int) -> None:
        """Show the next problem in the progress line."""
        of_all = f" ({index + 1} of {len(self.subjects)})" if len(self.subjects) > 1 else ""
        what = "building the kernels" if self._is_ours and index == 0 else "starting"
        self.progress(f"{subject.problem}{of_all}: {what}")

    def _grade_one(self, subject: Subject, file: GradedFile, engine: Engine) -> None:
        """Grade a file, and report the verdict."""
        try:
            verdict = engine.grade(file)
        except KeyboardInterrupt as stopped:
            self.progress.clear()
            if verdict := getattr(stopped, "verdict", None):  # none between two steps of `grade`
                self._report(subject, file, verdict)
            raise
        self.progress.clear()
        is_imported = verdict.count or self.args.sweep
        if self._is_ours and verdict.word == ERROR and not is_imported:
            raise UnimportableError(verdict.reason)
        self._report(subject, file, verdict)

    def _why_left_out(self, subject: Subject, seconds: float) -> str:
        """Return why there is no memory or time for a size, or ""."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        size = subject.elements * DTYPES[subject.dtype].itemsize
        needed = BUFFERS[self.device.type] * size / 2**30
        free = LARGEST_SHARE * free_bytes(self.device) / 2**30
        if needed > free:
            return f"needs {needed:,.1f} GiB of memory, {free:,.1f} GiB can be used"
        if seconds > 0:
            return ""
        problems = len({one.problem for one in self.subjects})
        limit = SWEEP_SECONDS[self.device.type] / problems
        of = f" of {subject.problem}" if problems > 1 else ""
        return f"the {limit:.0f} s of a sweep{of} are over"

    def _report(self, subject: Subject, file: GradedFile | None, verdict: Verdict) -> None:
        """Print and record a verdict on a subject."""
        is_ours = self._is_ours
        name = None if is_ours else str(file.path)
        found = records.record(subject, verdict, name)
        self.document["records"].append(found)
        if self.args.sweep:
            is_first = bool(verdict.runs) and subject.problem not in self._titles
            if is_first:
                self._titles.append(subject.problem)
            console.show(tables.sweep_line(found, is_first))
            return
        self._show_headline(subject)
        if is_ours:
            is_first = len(self._headlines) == 1
            ready = f"kernels ready in {verdict.import_seconds:.1f} s; " if is_first else ""
            console.show(f"{ready}{tables.details(found)}")
        else:
            console.show(tables.line(found))
        if verdict.details and self.args.verbose:
            console.show(tables.indented(verdict.details))
        elif verdict.details and not is_ours:
            traceback = "its traceback and " if verdict.word == ERROR else ""
            console.say(f"{file.path}: --verbose shows {traceback}what it printed")

    def _show_headline(self, subject: Subject) -> None:
        """Print what is measured, once for each subject."""
        if subject in self._headlines:
            return
        start = "\n" if self._headlines else ""
        note = f"\n{subject.note}" if subject.note else ""
        shape = f"{list(subject.shape)} {subject.dtype}"
        console.show(f"{start}{subject.problem}: {self.headline}; {shape}{note}")
        self._headlines.append(subject)


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes a second that a copy reads and writes, beyond the caches."""
    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    target = source.clone()
    return 2 * source.nbytes / min(_seconds_of_a_copy(target, source) for _ in range(COPIES))


def _seconds_of_a_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    if source.device.type == "cpu":
        start = perf_counter()
        target.copy_(source)
        return perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def add_limits(found: list[dict], bandwidth: float) -> None:
    """Add to each record of a sweep its time on the roofline.

    The peak rate is the highest in the record's series: its problem, dtype and setting.
    """
    series: dict[tuple, list[dict]] = {}
    for record in found:
        for run in record["runs"]:
            if run["forward"]["floor_seconds"]:  # an interrupt came before it was known
                key = record["problem"], record["dtype"], run["setting"]
                series.setdefault(key, []).append(run["forward"])
    for forwards in series.values():
        peak = max(forward["work"] / forward["floor_seconds"] for forward in forwards)
        for forward in forwards:
            limits = forward["work"] / peak, forward["moved_bytes"] / bandwidth
            forward["roofline_seconds"] = max(limits)
