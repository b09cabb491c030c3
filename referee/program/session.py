"""Grades files on one problem after the other; prints and records each verdict when it comes."""

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from time import monotonic

import torch

from referee import console, records
from referee.bench import Reserve
from referee.contestants.memory import BUFFERS, LARGEST_SHARE, free_bytes
from referee.contestants.server import Server
from referee.engine import Engine, referee_at_work
from referee.grading import GradedFile, Options
from referee.messages import first_error_line
from referee.program.project import Project
from referee.program.roofline import add_roofline, copy_bandwidth
from referee.records import Subject
from referee.reference.dtypes import DTYPES
from referee.reference.file import BadReferenceError
from referee.reference.problem import Problem
from referee.report import graded_files, tables
from referee.times.timing import Rounds
from referee.verdict import Verdict
from referee.words import CORRECT, ERROR, LEFT_OUT

SWEEP_SECONDS = {"cpu": 100.0, "cuda": 300.0}  # for all sizes; the last size may exceed it


class UnimportableError(Exception):
    """The project's own solution cannot be imported; the message says why."""


@dataclass
class Session:
    """One run of the command: grades every file on every subject.

    Attributes:
        args: the command's options.
        project: the project whose command this is; None without a project.
        files: the files to grade.
        subjects: the problems, dtypes and sizes on which they are graded, in order.
        make_problem: makes the problem of a subject.
        device: where solutions compute.
        headline: the device and versions, printed above results.
        document: the content of the JSON file; the session appends to its "records".
        options: how files are graded.
        progress: shows what is done now.
    """

    args: argparse.Namespace
    project: Project | None
    files: list[GradedFile]
    subjects: list[Subject]
    make_problem: Callable[[Subject, torch.device], Problem]
    device: torch.device
    headline: str
    document: dict
    options: Options
    progress: console.Progress
    _start: float = 0.0  # when `run` began, by `monotonic`
    # These were printed already: subjects with a headline, and a sweep's problems with a title.
    _subjects_shown: list[Subject] = field(default_factory=list)
    _titles_shown: list[str] = field(default_factory=list)

    @property
    def _is_ours(self) -> bool:
        """Return whether the project's own solution is graded, and not files of the user's."""
        return not self.args.solution

    def run(self) -> bool:
        """Grade all files on all subjects; return whether the command has succeeded.

        It has if every verdict is "correct" or "left out". A sweep must also have timed at least
        one size of each problem.
        """
        self._start = monotonic()
        try:
            with (
                referee_at_work(own_builds=not self._is_ours) as server,
                closing(Reserve()) as reserve,
            ):
                if self.args.sweep:
                    console.show(self.headline)
                if self.options.is_quick:
                    self._announce_quick_check()
                for index, subject in enumerate(self.subjects):
                    self._grade_subject(subject, index, server, reserve)
        except UnimportableError as error:
            console.say(f"the solution cannot be imported: {error}")
            return False
        finally:  # after an interrupt, too
            self.progress.clear()
            self._summarize()
        return self._conclude()

    def _summarize(self) -> None:
        """Do what needs all records: print the ranking of files, add the roofline to a sweep."""
        records_so_far = self.document["records"]
        if self.args.solution:
            if len(records_so_far) > 1:
                console.show(f"\n{graded_files.ranking(records_so_far)}")
            for explanation in tables.explain_noise(tables.words_of_lines(records_so_far)):
                console.show(explanation)
        if self.args.sweep and records_so_far:
            add_roofline(records_so_far, copy_bandwidth(self.device))

    def _conclude(self) -> bool:
        """Print the last lines; return whether the command has succeeded, see `run`."""
        all_records = self.document["records"]
        seconds = monotonic() - self._start
        are_right = all(record["verdict"] in (CORRECT, LEFT_OUT) for record in all_records)
        if self.args.sweep:
            console.show(f"\n{tables.closing_of_sweep(all_records, seconds)}")
            return are_right and not tables.untimed(all_records)
        if self._is_ours:
            closing = tables.closing(all_records, seconds, self.args.full, self.project.documents)
            console.show(f"\n{closing}")
        return are_right

    def _announce_quick_check(self) -> None:
        """Print what the quick check grades and how long that takes."""
        names = ", ".join(dict.fromkeys(subject.problem for subject in self.subjects))
        seconds = self.project.quick_seconds[self.device.type] * len(self.subjects)
        built = "once the first run has built the kernels (up to a minute)"
        console.say(f"a quick check of {names}: about {seconds} s, {built}; --full times longer")

    def _grade_subject(
        self, subject: Subject, index: int, server: Server, reserve: Reserve
    ) -> None:
        """Grade all files on a subject.

        Args:
            subject: the problem, dtype and size.
            index: the subject's index in `subjects`.
            server: forks contestants.
            reserve: keeps eager's process for the next subject.
        """
        options = self.options
        if self.args.sweep:
            seconds = self._seconds_for_size(index)
            if reason := self._why_left_out(subject, seconds):
                self._report(subject, None, Verdict(self.files[0].path, LEFT_OUT, reason))
                return
            # Rounds get half of the time. The other half is for everything else.
            options = replace(options, rounds=Rounds(self.args.trials, seconds / 2))
        self._show_progress(subject, index)
        try:
            problem = self.make_problem(subject, self.device)
        except (BadReferenceError, torch.OutOfMemoryError) as error:
            word = LEFT_OUT if self.args.sweep else ERROR
            self._report_for_all(subject, word, first_error_line(str(error)))
            return
        engine = Engine(problem, server, options, self.progress, reserve)
        try:
            self._grade_files(subject, engine)
            engine.keep_eager()  # not after an interrupt, which may have come during a request
        finally:
            engine.close()

    def _grade_files(self, subject: Subject, engine: Engine) -> None:
        """Time eager alone, then grade all files on a subject."""
        reason = engine.why_unprepared()
        if reason:
            self._report_for_all(subject, ERROR, reason)
            return
        for file in self.files:
            self._grade_file(subject, file, engine)

    def _report_for_all(self, subject: Subject, word: str, reason: str) -> None:
        """Report the same verdict on every file because the problem cannot be graded."""
        self.progress.clear()
        for file in self.files:
            self._report(subject, file, Verdict(file.path, word, reason))

    def _seconds_for_size(self, index: int) -> float:
        """Return the seconds that a size of a sweep may take.

        Every problem gets an equal part of SWEEP_SECONDS, and its sizes share what is left of that.
        Example: two problems share 100 s. 10 s after the start, 4 sizes of the first problem are
        left. Each may take (50 - 10) / 4 = 10 s.

        Args:
            index: the size's index in `subjects`.
        """
        names = [subject.problem for subject in self.subjects]
        problems = list(dict.fromkeys(names))
        name = names[index]
        problems_end = SWEEP_SECONDS[self.device.type] * (problems.index(name) + 1) / len(problems)
        sizes_left = names[index:].count(name)
        seconds_left = problems_end - (monotonic() - self._start)
        return seconds_left / sizes_left

    def _show_progress(self, subject: Subject, index: int) -> None:
        """Show the next subject in the progress line."""
        position = f" ({index + 1} of {len(self.subjects)})" if len(self.subjects) > 1 else ""
        stage = "building the kernels" if self._is_ours and index == 0 else "starting"
        self.progress(f"{subject.problem}{position}: {stage}")

    def _grade_file(self, subject: Subject, file: GradedFile, engine: Engine) -> None:
        """Grade a file and report the verdict.

        Raises:
            UnimportableError: the file is the project's own, and cannot be imported.
        """
        try:
            verdict = engine.grade(file)
        except KeyboardInterrupt as interrupt:
            self.progress.clear()
            # `grade` sets the attribute, unless the interrupt came at its very start or end.
            if hasattr(interrupt, "verdict"):
                self._report(subject, file, interrupt.verdict)
            raise
        self.progress.clear()
        if self._is_ours and self._failed_in_import(verdict):
            raise UnimportableError(verdict.reason)
        self._report(subject, file, verdict)

    def _failed_in_import(self, verdict: Verdict) -> bool:
        """Return whether a file failed before its first case, so probably in its import.

        For a sweep this is not known, because a sweep compares no cases: the answer is False.
        """
        return verdict.word == ERROR and verdict.count == 0 and not self.args.sweep

    def _why_left_out(self, subject: Subject, seconds: float) -> str:
        """Return the reason why a size of a sweep is not timed; "" if it is.

        Args:
            subject: the size.
            seconds: the time that it may take; not positive if the sweep's time is over.
        """
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        size = subject.elements * DTYPES[subject.dtype].itemsize
        needed = BUFFERS[self.device.type] * size / 2**30
        free = LARGEST_SHARE * free_bytes(self.device) / 2**30
        if needed > free:
            return f"needs {needed:,.1f} GiB of memory, {free:,.1f} GiB can be used"
        if seconds > 0:
            return ""
        problem_count = len({each.problem for each in self.subjects})
        limit = SWEEP_SECONDS[self.device.type] / problem_count
        of_problem = f" of {subject.problem}" if problem_count > 1 else ""
        return f"the {limit:.0f} s of a sweep{of_problem} are over"

    def _report(self, subject: Subject, file: GradedFile | None, verdict: Verdict) -> None:
        """Record and print a verdict on a subject.

        Args:
            subject: the problem, dtype and size.
            file: the graded file; None for a size that is left out of a sweep.
            verdict: the verdict.
        """
        name = None if self._is_ours else str(file.path)
        record = records.make_record(subject, verdict, name)
        self.document["records"].append(record)
        if self.args.sweep:
            self._show_sweep_line(record)
            return
        self._show_headline(subject)
        if self._is_ours:
            is_first = len(self._subjects_shown) == 1
            ready = f"kernels ready in {verdict.import_seconds:.1f} s; " if is_first else ""
            console.show(f"{ready}{tables.details(record)}")
        else:
            console.show(graded_files.describe(record))
        if verdict.details and self.args.verbose:
            console.show(tables.indented(verdict.details))
        elif verdict.details and not self._is_ours:
            traceback = "its traceback and " if verdict.has_traceback else ""
            console.say(f"{file.path}: --verbose shows {traceback}what it printed")

    def _show_sweep_line(self, record: dict) -> None:
        """Print the line of a size, below a title if it is the problem's first that was timed."""
        needs_title = bool(record["runs"]) and record["problem"] not in self._titles_shown
        if needs_title:
            self._titles_shown.append(record["problem"])
        console.show(tables.sweep_line(record, needs_title))

    def _show_headline(self, subject: Subject) -> None:
        """Print what is measured, once for each subject."""
        if subject in self._subjects_shown:
            return
        blank_line = "\n" if self._subjects_shown else ""
        note = f"\n{subject.note}" if subject.note else ""
        shape = f"{list(subject.shape)} {subject.dtype}"
        console.show(f"{blank_line}{subject.problem}: {self.headline}; {shape}{note}")
        self._subjects_shown.append(subject)
