"""Asks a solution and compares: whatever the problem, from the import to the times."""

import math
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import NamedTuple

import torch

from referee.error_line import LONGEST_LINE
from referee.remote import HALF, ForgedError, RaisedError, Remote, busy_seconds
from referee.solutions.baselines import Baselines
from referee.solutions.verdict import CHEATING, WRONG, FoundError, Task, Verdict
from referee.timing import (
    CONFIRMATION,
    GRAIN,
    LEAST_JUDGED,
    UNSEEN,
    Findings,
    Names,
    Rate,
    Rounds,
    Samples,
    Timings,
    concealed,
    judge,
    rounds,
)

LATENESS = 0.2  # s, after which what a thread still had to write is there
SETTLING = 15.0  # s, within which an honest program's helpers have started up
BUSY = 0.1  # of a CPU, that a solution takes while nothing is asked of it
SLACK = 0.5  # s of a CPU; helpers that start late
# Calls shorter than this on a CPU, whose threads some other process often holds up by 0.5 ms, are
# repeated, and the fastest counts.
SHORT, REPEATS = {"cpu": 2e-3, "cuda": 0.0}, 2
SEEDS = 1 << 30  # seeds are drawn from this many


class Turn(NamedTuple):
    """A timed call.

    Attributes:
        sample: its seconds, by the device's clock and until the device was idle.
        hidden: what it took by this process's clock beyond that, without the time for which other
            programs had the CPUs: a longer call is the sooner followed by their turn.
        check: looks at its output, and says what is wrong with it.
    """

    sample: tuple[float, float]
    hidden: float
    check: Callable[[], str | None]


class Judge:
    """The course that all problems have in common."""

    worker: str
    names: Names
    rate: Rate
    library: tuple[list[str], bool]

    def __init__(
        self,
        remote: Remote,
        task: Task,
        verdict: Verdict,
        progress: Callable,
        baselines: Baselines,
        spared: set[int],
    ) -> None:
        self.remote, self.task, self.verdict, self.progress = remote, task, verdict, progress
        self.baselines, self.spared = baselines, spared
        self.device = task.device
        self.generator = torch.Generator(device=self.device)
        self.seed = self.generator.seed() % SEEDS  # new in every run
        self.generator.manual_seed(self.seed)

    def grade(self, file: Path) -> None:
        """The whole course, from import to times.

        Raises:
            FoundError: as soon as something is not right.
        """
        self.prepare_import()
        self.progress("importing")
        problem = self.task.problem and self.task.name
        loaded = self.remote.ask("load", path=str(file.resolve()), problem=problem)
        self.verdict.import_seconds = float(loaded["seconds"])
        self.check_changes()
        self.check_small()
        self.check_changes()
        self.check_library()
        self.check_background()
        self.check_headline()
        self.time()
        self.time_step()
        self.check_changes()

    def prepare_import(self) -> None:
        """What is to be there before the solution."""

    def check_small(self) -> None:
        """Everything but the timed size."""
        raise NotImplementedError

    def check_headline(self) -> None:
        """The timed size, and the backward."""
        raise NotImplementedError

    def time_step(self) -> None:
        """Times the training step of a solution whose gradients are right."""
        raise NotImplementedError

    def release(self) -> None:
        """Gives memory back before another process needs it; the warm-up comes after."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def check_form(self, reply: dict, facts: dict, prefix: str) -> None:
        """The kind of output, and what it says of itself; the order of dimensions is free."""
        kind = str(reply.get("type"))[:100]
        if fault := reply.get("fault"):
            raise FoundError(CHEATING, str(fault)[:LONGEST_LINE])
        if kind not in ("Tensor", "Parameter") or "dtype" not in reply:
            raise FoundError(WRONG, f"{prefix}returns a {kind}, not a plain tensor")
        for fact, want in facts.items():
            got = reply.get(fact)
            if got != want:
                got = str(got)[:LONGEST_LINE]
                raise FoundError(WRONG, f"{prefix}the output's {fact} is {got}, expected {want}")

    def take(
        self,
        start: int,
        shape: list[int],
        dtype: torch.dtype,
        take: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if type(start) is not int or not 0 <= start <= HALF - dtype.itemsize * math.prod(shape):
            raise ForgedError
        return (take or self.remote.take)(start, shape, dtype).to(self.device)

    def check_changes(self) -> None:
        """Functions, settings and names of the referee that the solution changed."""
        if found := self.baselines.disturbed():
            raise FoundError(CHEATING, found)
        changed = self.remote.ask("changes")["changed"]
        if changed:
            raise FoundError(CHEATING, f"changed {', '.join(map(str, changed))}"[:LONGEST_LINE])

    def check_library(self) -> None:
        """Whether it swallowed an exception and then called the library's function."""
        try:
            ops, all_of_them = self.library
            found = self.remote.ask("library", ops=ops, all_of_them=all_of_them)
        except RaisedError:  # a mode that looks on is no part of the problem
            return
        library, swallowed = found["library"], found["swallowed"]
        if not library:
            return
        called = "the reference's own operators" if all_of_them else library[0]
        if swallowed:
            reason = f"falls back on {called} after {swallowed[0]}"
            raise FoundError(CHEATING, reason[:LONGEST_LINE])
        self.verdict.notes.append(f"calls {called}")

    def check_background(self) -> None:
        """Whether it computes while nothing is asked of it."""
        self.progress("waiting until it rests")
        until = monotonic() + SETTLING
        while True:
            before, start = self._busy_seconds(), monotonic()
            sleep(LATENESS)
            share = (self._busy_seconds() - before) / (monotonic() - start)
            if share < BUSY:
                return
            if monotonic() > until:
                raise FoundError(
                    CHEATING, f"background work: {share:.0%} of a CPU while it should rest"
                )

    def _busy_seconds(self) -> float:
        """The processor time so far of the solution's process and all that it started."""
        return busy_seconds(self.spared)

    def _check_idle(self, busy: float, own: float, others: float) -> None:
        """Whether it computed while the others were timed.

        Args:
            busy: seconds of processors that it took.
            own: seconds in which it was asked.
            others: seconds in which the others were.
        """
        beyond = busy - own * len(os.sched_getaffinity(0))
        if beyond > BUSY * others + SLACK:
            raise FoundError(
                CHEATING, f"background work: {beyond:.1f} s of CPUs while eager was timed"
            )

    def time(self) -> None:
        """Times the solution and the baselines."""
        self.spared |= self.baselines.start()  # if an input of both signs ended them
        self.prepare_timing()
        for wanted in (self.task.wanted, CONFIRMATION):
            timings, found = self._time(wanted)
            if not found.problems:
                break
        else:
            raise FoundError(CHEATING, found.problems[0])
        timings.add_findings(found)
        self.verdict.timings = timings

    def _time(self, wanted: Rounds) -> tuple[Timings, Findings]:
        """The times of all contestants, in random order within each round."""
        names = self.names
        timings = Timings(self.device.type, names, self.rate, self.work())
        called = {names.solution: "module", names.eager: "module", names.again: "module"}
        called |= {name: name for name in self.baselines.names}
        timings.start(called)
        turns_of: dict[str, list[Turn]] = {name: [] for name in called}
        own, busy, start = 0.0, self._busy_seconds(), monotonic()

        def one_round() -> tuple[Samples, str | None]:
            nonlocal own
            samples, checks = {}, []
            for name in random.sample(list(called), len(called)):
                began = monotonic()
                turns = [self.turn(name, called[name])]
                if turns[0].sample[0] < SHORT[self.device.type]:
                    turns += [self.turn(name, called[name]) for _ in range(REPEATS)]
                samples[name] = min(turn.sample for turn in turns)
                turns_of[name] += turns
                if name == names.solution:
                    checks = [turn.check for turn in turns]
                    checks += [turn.check for turn in self.turn_again()]
                    own += monotonic() - began
            problems = [check() for check in checks]
            return samples, next(filter(None, problems), None)

        for samples, problem in rounds(one_round, wanted, self.device, "it", self.progress):
            if problem:
                raise FoundError(CHEATING, problem)
            timings.add(samples)
        self._check_idle(self._busy_seconds() - busy, own, monotonic() - start - own)
        hidden = {
            name: [(turn.sample[0], turn.hidden) for turn in turns]
            for name, turns in turns_of.items()
        }
        if problem := wrong_clock(hidden, timings):
            return timings, Findings([problem])
        return timings, judge(timings, self.fastest(timings), "the forward")

    def prepare_timing(self) -> None:
        """Gives the solution the inputs of the timed calls."""
        raise NotImplementedError

    def timed(self, name: str, **arguments: object) -> tuple[tuple[float, float], float]:
        """Times a call of the contestant; `sample` and `hidden` of its turn."""
        ask, waited = self.remote.ask, self.remote.waited
        if name != self.names.solution:
            again, eager = name == self.names.again, self.baselines
            ask, waited = partial(eager.ask, again), partial(eager.waited, again)
        before, start = waited(), perf_counter()
        reply = ask("time", **arguments)
        left_on = ask("left_on")["names"]
        ours = perf_counter() - start - (waited() - before)
        seconds, wall = reply["seconds"], reply["wall"]
        if not all(isinstance(t, float) and math.isfinite(t) for t in (seconds, wall)):
            raise ForgedError
        if left_on:
            reason = f"leaves {left_on[0]} on, which may compute a result when it is read"
            raise FoundError(CHEATING, reason[:LONGEST_LINE])
        return (max(seconds, 1e-9), wall), ours - seconds

    def turn(self, name: str, call: str) -> Turn:
        """Alters an input of the contestant and times a call, by the worker's name for it."""
        raise NotImplementedError

    def turn_again(self) -> list[Turn]:
        """One more call of the solution, timed in vain, after little has changed since the last.

        Whoever keeps what seems not to have changed is wrong in it.
        """
        return []

    def work(self) -> int:
        """The work of one call, in units of the rate."""
        raise NotImplementedError

    def fastest(self, timings: Timings) -> float:
        """Seconds of one call's work at the highest rate measured."""
        raise NotImplementedError


# s that a child process may wait for a CPU after each message. Honest files were 0.4 ms and 1.3 ms
# beyond eager's on two cores, of which other programs had some.
WAKE_UP = {"cpu": 2e-3, "cuda": 0.0}


def wrong_clock(hidden: dict[str, list[tuple[float, float]]], timings: Timings) -> str | None:
    """Whether calls of the solution last longer by this process's clock than by the child's.

    Both include the time of messages. See `concealed`.

    Args:
        hidden: by contestant, of every call, a repeated one too, the seconds that it reports and
            those beyond.
    """
    names = timings.names
    if len(timings.seconds[names.solution]) < LEAST_JUDGED:
        return None
    usual = [beyond for name in (names.eager, names.again) for _, beyond in hidden[name]]
    typical = median(timings.seconds[names.solution])
    beyond = concealed(hidden[names.solution], typical, usual)
    if beyond <= WAKE_UP[timings.device] + 4 * GRAIN + UNSEEN * typical:
        return None
    return (
        f"takes {typical * 1e3:.3f} ms by its process's clock, and {beyond * 1e3:.3f} ms more by "
        "the referee's: a changed timer, or work outside the timed call"
    )
