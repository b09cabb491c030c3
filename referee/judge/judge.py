"""The course of a grading, from the import to the times beside eager's."""

import os
import random
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import monotonic, sleep

import torch

from referee import timing
from referee.child.yardsticks import COMPILED, COPY, COPY_REUSED
from referee.judge.checks import LATENESS
from referee.judge.feeding import Renewal, holds, name_source
from referee.judge.oracle import SEEDS
from referee.judge.turns import Turns
from referee.judge.verdict import CHEATING, FoundError, Run
from referee.processes import busy_seconds
from referee.reference_file import LONGEST_LINE
from referee.remote import RaisedError, Remote, pack
from referee.timing import Rate, Rounds, Samples, Step, Timings

SETTLING = 15.0  # s, within which an honest program's helpers have started up
BUSY = 0.1  # of a CPU, that a solution takes while nothing is asked of it
SLACK = 0.5  # s of a CPU; helpers that start late
# Calls shorter than this on a CPU, whose threads some other process often holds up by 0.5 ms, are
# repeated, and the fastest counts.
SHORT, REPEATS = {"cpu": 2e-3, "cuda": 0.0}, 2
# s that a child process may wait for a CPU after each message. Honest files were 0.4 ms and 1.3 ms
# beyond eager's on two cores, of which other programs had some.
WAKE_UP = {"cpu": 2e-3, "cuda": 0.0}
OUT_OF_MEMORY = "OutOfMemory"  # in the name of torch's exception

# By contestant, of every call, a repeated one too: the seconds that it reports, and those beyond.
Hidden = dict[str, list[tuple[float, float]]]


class Judge(Turns):
    """What the courses of all problems have in common.

    Each has `check_small`, of everything but the timed size, and `check_and_time`.
    """

    # Operators, each of which tells of the library; if there are none, all of the reference's do.
    library: tuple[str, ...] = ()
    setting = ""  # of the precision of float32 products; "" is the default
    # A solution need not read all of its inputs, but it writes its outputs.
    rate = Rate(
        unit="GB/s",
        work="moved_bytes",
        yardstick=COPY,
        floor="writing its outputs as fast as a copy",
        # A CPU's copy may fetch the lines that it overwrites, three transfers for two: streaming
        # stores beat it by up to 1.5.
        margin={"cpu": 1.9, "cuda": 1.25},
    )

    def grade(self, file: Path | None) -> None:
        """The whole course, for a file, or None for one that the process has imported.

        Raises:
            FoundError: as soon as something is not right.
        """
        name_source(self.remote, self.task)
        if file:
            self.progress("importing")
            loaded = self.remote.ask("load", path=str(file.resolve()), problem=self.task.name)
            self.verdict.import_seconds = float(loaded["seconds"])
            self.check_changes()
        if not self.task.only_times:
            self.check_small()
            self.check_changes()
            self._check_library()
            self._check_background()
        self.check_and_time()
        self.check_changes()

    def check_changes(self) -> None:
        """Functions, settings and names of the referee that the solution changed."""
        if found := self.baselines.disturbed():
            raise FoundError(CHEATING, found)
        if changed := self.remote.ask("changes")["changed"]:
            raise FoundError(CHEATING, f"changed {', '.join(map(str, changed))}"[:LONGEST_LINE])

    def _check_library(self) -> None:
        """Whether it swallowed an exception and then called the library's function."""
        about = {"ops": self.library or self.oracle.ops, "all_of_them": not self.library}
        try:
            found = self.remote.ask("library", **about)
        except RaisedError:  # a mode that looks on is no part of the problem
            return
        if not found["library"]:
            return
        called = found["library"][0] if self.library else "the reference's own operators"
        if swallowed := found["swallowed"]:
            reason = f"falls back on {called} after {swallowed[0]}"
            raise FoundError(CHEATING, reason[:LONGEST_LINE])
        self.verdict.notes.append(f"calls {called}")

    def _check_background(self) -> None:
        """Whether it computes while nothing is asked of it."""
        self.progress("waiting until it rests")
        until = monotonic() + SETTLING
        while True:
            before, start = busy_seconds(self.spared), monotonic()
            sleep(LATENESS)
            share = (busy_seconds(self.spared) - before) / (monotonic() - start)
            if share < BUSY:
                return
            if monotonic() > until:
                reason = f"background work: {share:.0%} of a CPU while it should rest"
                raise FoundError(CHEATING, reason)

    @property
    def work(self) -> int:
        """The work of one call, in units of the rate."""
        return self.moved

    @property
    def moved(self) -> int:
        """Bytes that a call reads and writes, if it reads all of its inputs."""
        return self.oracle.input_bytes + self.oracle.output_bytes

    def fastest(self, timings: Timings) -> float:
        """Seconds of one call's work at the highest rate measured."""
        return fastest_copy(timings) * self.oracle.output_bytes / self.moved

    def prepare_baselines(self) -> None:
        """Gives eager the inputs, parameters and yardsticks of what is timed."""
        self.baselines.prepare((*self._subject, self.precision), self._prepare_eager)

    @property
    def _subject(self) -> tuple:
        return self.task.name, str(self.oracle.file.path), self.oracle.form

    def _prepare_eager(self, eager: Remote, again: bool) -> dict:
        oracle = self.oracle
        eager.ask("set_precision", setting=self.precision)
        name_source(eager, self.task)
        seed = random.randrange(SEEDS)
        if eager.has != self._subject:
            eager.ask("new", args=pack(oracle.args), seed=seed, dtype=self.parameter_dtype)
            eager.ask("load_state", names=[name for name, _ in oracle.parameters])
            eager.has = self._subject
        eager.ask("allocate", slots=oracle.slots, inputs=pack(oracle.form))
        if oracle.repeats is None and (drawn := oracle.draw_alike(seed)):
            about = {"slot": 0, "names": [], "seed": 0, "at": 0.0, "is_timed": False}
            eager.ask("renew", draw=seed, **about)
            oracle.repeats = holds(eager, drawn)
            del drawn
        for slot in range(oracle.slots):
            Renewal(oracle, oracle.parameters, True).give(eager, slot, is_timed=False)
        wanted = [] if again else list(self.task.yardsticks)
        return eager.ask("prepare", wanted=wanted, copied=max(1, self.moved // 2))

    @property
    def precision(self) -> str:
        """torch's setting for float32 products."""
        return self.setting or "highest"

    def time(self) -> None:
        """Times forwards, beside the baselines', and steps if the gradients were right."""
        self.earlier.clear()
        self.inputs, self.stale = [], {}
        torch.cuda.empty_cache()
        self.spared |= self.baselines.start()  # if an input of both signs ended them
        self.prepare_baselines()
        self.remote.ask("allocate", slots=self.oracle.slots, inputs=pack(self.oracle.form))
        self.remote.ask("prepare", wanted=[], copied=0)
        timings = Timings(self.device.type, self.names, self.rate, self.work, moved=self.moved)
        timings.notes += self.baselines.notes
        run = Run(self.setting, timings)
        self.verdict.runs.append(run)
        self.start_turns(is_step=False)
        self._measure(timings)
        if self.has_backward:
            self._time_step(run)

    def _time_step(self, run: Run) -> None:
        names, about = self.names, (self.device.type, self.names, self.rate)
        step = run.step = Step(Timings(*about, 0), Timings(*about, 0))
        self.start_turns(is_step=True)
        self.baselines.prepared = None  # they lose the inputs
        torch.cuda.empty_cache()  # before another process needs the room
        try:
            for name in (names.solution, names.eager, names.again):
                process = self.process_of(name)
                process.ask("prepare_step", seed=self.step_seed)
                if name != names.again:
                    with suppress(RaisedError):  # of a program that admits no hooks
                        kept = process.ask("kept", names=self.operands_of(name))
                        step.kept[name] = int(kept["bytes"])
            self._measure(Timings(*about, 0), step.forward, step.backward)
        except (FoundError, RaisedError) as error:
            run.step = None
            if OUT_OF_MEMORY not in str(error):
                raise
            self.verdict.notes.append("no memory for the training step")

    def _measure(self, whole: Timings, *halves: Timings) -> None:
        """Adds the times of all contestants; those that cannot be believed are taken once more."""
        what = "the training step" if self.is_step else "the forward"
        what += self.setting and f" at {self.setting}"
        judged = halves or (whole,)
        for wanted in (self.task.wanted, timing.CONFIRMATION):
            hidden = self._time(what, wanted, [whole, *halves])
            if problem := wrong_clock(hidden, whole):
                continue
            found = [timing.judge(t, 0.0 if halves else self.fastest(t), what) for t in judged]
            problem = next((each for problems, _ in found for each in problems), None)
            if not problem:  # of a step, one note is enough
                judged[0].notes += next((notes for _, notes in found if notes), [])
                return
        raise FoundError(CHEATING, problem)

    def _time(self, what: str, wanted: Rounds, every: list[Timings]) -> Hidden:
        """Adds the times of rounds, of whole calls and of halves; what `wrong_clock` looks at."""
        names = self.names
        called = dict.fromkeys((names.solution, names.eager, names.again), "module")
        called |= {n: n for n in self.baselines.names if n == COMPILED or not self.is_step}
        for timings in every:
            timings.start(called)
        hidden: Hidden = {name: [] for name in called}
        own, busy, start = 0.0, busy_seconds(self.spared), monotonic()

        def one_round() -> tuple[list[Samples], str | None]:
            nonlocal own
            samples, problem = [{} for _ in every], None
            for name in random.sample(list(called), len(called)):
                began = monotonic()
                turns = [self.turn(name, called[name])]
                if not self.is_step and turns[0].seconds[0][0] < SHORT[self.device.type]:
                    turns += [self.turn(name, called[name]) for _ in range(REPEATS)]
                fastest = min(turn.seconds for turn in turns)
                for sample, seconds in zip(samples, fastest, strict=False):
                    sample[name] = seconds
                hidden[name] += [(turn.seconds[0][0], turn.hidden) for turn in turns]
                if name == names.solution:
                    problem = next(filter(None, (turn.problem for turn in turns)), None)
                    if not (problem or self.is_step):
                        problem = self.call_again()
                    own += monotonic() - began
            return samples, problem

        for samples, problem in timing.rounds(one_round, wanted, self.device, what, self.progress):
            if problem:
                raise FoundError(CHEATING, problem)
            for timings, sample in zip(every, samples, strict=True):
                timings.add(sample)
        others = monotonic() - start - own
        beyond = busy_seconds(self.spared) - busy - own * len(os.sched_getaffinity(0))
        if beyond > BUSY * others + SLACK and not self.is_step:
            reason = f"background work: {beyond:.1f} s of CPUs while eager was timed"
            raise FoundError(CHEATING, reason)
        return hidden


def fastest_copy(timings: Timings) -> float:
    """Seconds of the fastest copy of as many bytes into memory that is there."""
    return min(timings.seconds.get(COPY_REUSED) or timings.seconds[COPY])


def wrong_clock(hidden: Hidden, timings: Timings) -> str | None:
    """Whether calls of the solution last longer by this process's clock than by the child's.

    Both include the time of messages. See `concealed`.
    """
    names = timings.names
    if len(timings.seconds[names.solution]) < timing.LEAST_JUDGED:
        return None
    usual = [beyond for name in (names.eager, names.again) for _, beyond in hidden[name]]
    typical = median(timings.seconds[names.solution])
    beyond = timing.concealed(hidden[names.solution], typical, usual)
    if beyond <= WAKE_UP[timings.device] + 4 * timing.GRAIN + timing.UNSEEN * typical:
        return None
    return (
        f"takes {typical * 1e3:.3f} ms by its process's clock, and {beyond * 1e3:.3f} ms more by "
        "the referee's: a changed timer, or work outside the timed call"
    )
