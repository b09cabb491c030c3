"""Times a project's own solution at many sizes, and prints a line on each.

A sweep has a time limit. Every problem gets an equal part of it, and the problem's sizes share that
part. A size that has no time or no memory left gets the verdict "left out".
"""

from contextlib import closing
from dataclasses import replace
from functools import partial
from time import monotonic

import torch

from referee import console, records
from referee.contestants.free_memory import BUFFERS, MAX_SHARE_OF_FREE, free_bytes
from referee.contestants.server import Server
from referee.eager_processes import KeptEagerProcess
from referee.engine import referee_at_work
from referee.program.file_grader import FileGrader
from referee.project.roofline import add_roofline, copy_bandwidth
from referee.records import Subject
from referee.reference.dtypes import DTYPES
from referee.report import sweep_lines
from referee.verdict import Verdict
from referee.verdict_words import CORRECT, LEFT_OUT

SWEEP_SECONDS = {"cpu": 100.0, "cuda": 300.0}  # for all sizes; the last size may exceed it


class Sweep:
    """Times the project's solution on every subject.

    Args:
        grader: its only file is the project's solution, and each subject is a size.
    """

    def __init__(self, grader: FileGrader) -> None:
        self._grader = grader
        self._records = grader.document["records"]
        self._start = 0.0  # when `run` began, by `monotonic`
        self._titles_shown: list[str] = []  # the problems whose title was printed

    def run(self) -> bool:
        """Time all sizes; return whether the sweep has succeeded.

        It has succeeded if each size is correct or left out, and at least one size of each problem
        was timed.
        """
        grader = self._grader
        self._start = monotonic()
        try:
            # The solution's own build is kept for the next time, so `separate_builds` is false.
            with (
                referee_at_work(separate_builds=False) as server,
                closing(KeptEagerProcess()) as kept_process,
            ):
                console.show(grader.headline)
                for index in range(len(grader.subjects)):
                    self._time_size(index, server, kept_process)
        finally:  # after an interrupt, too
            grader.progress.clear()
            if self._records:
                add_roofline(self._records, copy_bandwidth(grader.device))
        console.show(f"\n{sweep_lines.last_lines(self._records, monotonic() - self._start)}")
        are_right = all(record["verdict"] in (CORRECT, LEFT_OUT) for record in self._records)
        return are_right and not sweep_lines.untimed(self._records)

    def _time_size(self, index: int, server: Server, kept_process: KeptEagerProcess) -> None:
        """Time a size, unless it is left out.

        Args:
            index: the size's index in the grader's subjects.
            server: forks contestants.
            kept_process: keeps eager's process for the next size.
        """
        grader = self._grader
        subject, path = grader.subjects[index], grader.files[0].path
        seconds = self._seconds_for_size(index)
        if reason := self._why_left_out(subject, seconds):
            self._show(subject, Verdict(path, LEFT_OUT, reason))
            return
        grader.show_progress(index, "building the kernels" if index == 0 else "starting")
        # Rounds get half of the time. The other half is for everything else.
        round_limit = grader.options.round_limit._replace(cpu_seconds=seconds / 2)
        options = replace(grader.options, round_limit=round_limit)
        grader.grade(subject, options, partial(self._show, subject), server, kept_process)

    def _seconds_for_size(self, index: int) -> float:
        """Return the seconds that a size may take.

        Every problem gets an equal part of SWEEP_SECONDS, and its sizes share what is left of that.
        Example: two problems share 100 s. 10 s after the start, 4 sizes of the first problem are
        left. Each may take (50 - 10) / 4 = 10 s.

        Args:
            index: the size's index in the grader's subjects.
        """
        names = [subject.problem for subject in self._grader.subjects]
        problems = list(dict.fromkeys(names))
        name = names[index]
        sweep_seconds = SWEEP_SECONDS[self._grader.device.type]
        end_of_problem = sweep_seconds * (problems.index(name) + 1) / len(problems)
        sizes_left = names[index:].count(name)
        seconds_left = end_of_problem - (monotonic() - self._start)
        return seconds_left / sizes_left

    def _why_left_out(self, subject: Subject, seconds: float) -> str:
        """Return the reason why a size is not timed; "" if it is.

        Args:
            subject: the size.
            seconds: the time that it may take; not positive if the sweep's time is over.
        """
        device = self._grader.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        size = subject.elements * DTYPES[subject.dtype].itemsize
        needed = BUFFERS[device.type] * size / 2**30
        free = MAX_SHARE_OF_FREE * free_bytes(device) / 2**30
        if needed > free:
            return f"needs {needed:,.1f} GiB of memory, {free:,.1f} GiB can be used"
        if seconds > 0:
            return ""
        problem_count = len({each.problem for each in self._grader.subjects})
        limit = SWEEP_SECONDS[device.type] / problem_count
        of_problem = f" of {subject.problem}" if problem_count > 1 else ""
        return f"the {limit:.0f} s of a sweep{of_problem} are over"

    def _show(self, subject: Subject, verdict: Verdict) -> None:
        """Record a verdict and print the size's line.

        A title comes before the line of the problem's first size that was timed.
        """
        record = records.make_record(subject, verdict, None)
        self._records.append(record)
        needs_title = bool(record["runs"]) and subject.problem not in self._titles_shown
        if needs_title:
            self._titles_shown.append(subject.problem)
        console.show(sweep_lines.line(record, needs_title))
