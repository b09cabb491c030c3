"""A command's work: files graded on problems, printed and recorded as verdicts come."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import torch

from model import PROBLEMS
from referee import console, records
from referee.cases import DTYPES
from referee.child.yardsticks import COMPILED
from referee.clock import CpuClock, CudaClock
from referee.judge import grade
from referee.judge.baselines import Baselines
from referee.judge.oracle import Oracle
from referee.judge.problem import OfProject
from referee.judge.verdict import CORRECT, ERROR, LEFT_OUT, FoundError, Task, Verdict
from referee.memory import BUFFERS, LARGEST_SHARE, free_bytes
from referee.reference_file import of_problem
from referee.report import tables
from referee.timing import CPU_SECONDS, Rounds

TIMEOUT = 300  # s for a solution, in each dtype
MOST_SHARES = 4  # of a CPU's seconds that several files share
SWEEP_DTYPES = ("float32", "float16", "bfloat16")  # unless others are asked for
SWEEP_SECONDS = {"cpu": 80.0, "cuda": 300.0}  # for all sizes; the last one may take longer
COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}  # bytes, beyond the caches
COPIES = 10


@dataclass
class Session:
    """Grades files, and prints and records what is found."""

    args: argparse.Namespace
    files: list[Path]
    device: torch.device
    headline: str  # of all records
    document: dict
    progress: console.Progress
    subjects: list[records.Subject]
    oracle: Oracle | None  # of a reference file
    shown: list = field(default_factory=list)  # subjects with a headline; of a sweep, problems
    seconds: float = 0.0  # that building took

    def run(self) -> bool:
        """Does the work; whether all is right."""
        baselines, found = Baselines(self.device), self.document["records"]
        try:
            if not self.args.solution:
                self.progress("building the kernels")
                names = list(dict.fromkeys(subject.problem for subject in self.subjects))
                self.seconds = grade.build(names, baselines)
                self.progress.clear()
            if self.args.sweep:
                console.show(self.headline)
            grade.grade_files(self.files, self._tasks, baselines, self._report)
        except FoundError as failed:
            console.say(f"the solution cannot be imported: {failed.args[1]}")
            return False
        finally:
            baselines.close()
            if len(found) > 1 and self.args.solution:
                console.show(f"\n{tables.ranking(found)}")
            if self.args.sweep and found:
                add_limits(found, copy_bandwidth(self.device))
        return all(record["verdict"] in (CORRECT, LEFT_OUT) for record in found)

    def _tasks(self) -> Iterable[Task]:
        """Those of a sweep that fit in memory and time."""
        shares = min(len(self.files) * len(self.subjects), MOST_SHARES)
        end = monotonic() + SWEEP_SECONDS[self.device.type]
        for done, subject in enumerate(self.subjects):
            self.subject, seconds = subject, CPU_SECONDS / shares
            if self.args.sweep:
                seconds = (end - monotonic()) / (len(self.subjects) - done)
                if reason := self._why_left_out(seconds):
                    self._report(None, Verdict(Path(), LEFT_OUT, reason))
                    continue
            else:
                self.progress("running the reference")
            yield self._task(seconds)

    def _why_left_out(self, seconds: float) -> str:
        """Why there is no memory or time for a size, or ""."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        size = self.subject.elements * DTYPES[self.subject.dtype].itemsize
        needed = BUFFERS[self.device.type] * size / 2**30
        free = LARGEST_SHARE * free_bytes(self.device) / 2**30
        if needed > free:
            return f"needs {needed:,.1f} GiB of memory, {free:,.1f} GiB can be used"
        limit = SWEEP_SECONDS[self.device.type]
        return f"the {limit:.0f} s of a sweep are over" if seconds <= 0 else ""

    def _task(self, seconds: float) -> Task:
        name, dtype, shape, settings, *_ = self.subject
        if not (oracle := self.oracle):
            oracle = Oracle(of_problem(PROBLEMS[name], shape, DTYPES[dtype]), self.device)
        own = OfProject if self.oracle else grade.PROBLEMS.get(name, OfProject)
        settings = settings or own.settings(oracle.dtype, self.device)
        yardsticks = own.yardsticks[self.device.type]
        if self.device.type == "cuda" and not self.args.solution:
            yardsticks += (COMPILED,)
        wanted, timeout = Rounds(self.args.trials, seconds), self.args.timeout or TIMEOUT
        about = oracle, settings, wanted, yardsticks, timeout, self.progress
        return Task(name, *about, only_times=self.args.sweep)

    def _report(self, task: Task | None, verdict: Verdict) -> None:
        """Prints and records a verdict on the subject at hand."""
        subject, is_ours = self.subject, not self.args.solution
        if is_ours and verdict.word == ERROR and not verdict.count:
            raise FoundError(ERROR, verdict.reason)
        verdict.import_seconds += self.seconds
        found = records.record(subject, verdict, None if is_ours else str(verdict.file))
        self.document["records"].append(found)
        if self.args.sweep:
            is_first = bool(verdict.runs) and subject.problem not in self.shown
            self.shown += [subject.problem] * is_first
            console.show(tables.sweep_line(found, is_first))
            return
        ready = f"kernels ready in {verdict.import_seconds:.1f} s; " * (not self.shown)
        if subject not in self.shown:
            start = "\n" * bool(self.shown) + f"{subject.problem}: {self.headline}"
            note = subject.note and f"\n{subject.note}"
            console.show(f"{start}; {list(subject.shape)} {subject.dtype}{note}")
            self.shown.append(subject)
        console.show(ready + tables.details(found) if is_ours else tables.line(found))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes, beyond the caches."""
    clock = CudaClock(device) if device.type == "cuda" else CpuClock()
    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    target = source.clone()
    return 2 * source.nbytes / min(clock.time(target.copy_, source)[1] for _ in range(COPIES))


def add_limits(found: list[dict], bandwidth: float) -> None:
    """The roofline of each series: the highest rate of its floors, and the memory's bandwidth."""
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
