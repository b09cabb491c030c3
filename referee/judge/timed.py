"""Times a solution beside eager, in random order, by the parent's clock as well as the child's."""

import os
import random
from collections.abc import Iterable
from contextlib import suppress
from statistics import median
from time import monotonic

import torch

from referee.child.yardsticks import COMPILED, COPY, COPY_REUSED
from referee.judge.baselines import Asked
from referee.judge.feeding import Renewal, name_source
from referee.judge.oracle import SEEDS
from referee.judge.turns import Turns
from referee.judge.verdict import CHEATING, FoundError, Run
from referee.processes import busy_seconds
from referee.remote import RaisedError, pack
from referee.timing import (
    CONFIRMATION,
    GRAIN,
    LEAST_JUDGED,
    UNSEEN,
    Rate,
    Rounds,
    Samples,
    Step,
    Timings,
    concealed,
    judge,
    rounds,
)

BUSY = 0.1  # of a CPU, that a solution takes while nothing is asked of it
SLACK = 0.5  # s of a CPU; helpers that start late
# Calls shorter than this on a CPU, whose threads some other process often holds up by 0.5 ms, are
# repeated, and the fastest counts.
SHORT, REPEATS = {"cpu": 2e-3, "cuda": 0.0}, 2
# s that a child process may wait for a CPU after each message. Honest files were 0.4 ms and 1.3 ms
# beyond eager's on two cores, of which other programs had some.
WAKE_UP = {"cpu": 2e-3, "cuda": 0.0}
OUT_OF_MEMORY = "OutOfMemory"  # in the name of torch's exception


class Timed(Turns):
    """The times of forwards, and of training steps where the gradients are right."""

    # A solution need not read all of its inputs, but it writes its outputs.
    rate = Rate(
        unit="GB/s",
        scale=1e9,
        digits=1,
        work="moved_bytes",
        yardstick=COPY,
        floor="writing its outputs as fast as a copy",
        # A CPU's copy may fetch the lines that it overwrites, three transfers for two: streaming
        # stores beat it by up to 1.5.
        margin={"cpu": 1.9, "cuda": 1.25},
    )
    setting = ""

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
        what = self.task.name, str(self.oracle.file.path), self.oracle.form, self.setting
        self.baselines.prepare(what, self._prepare_eager)

    def _prepare_eager(self, eager: Asked, again: bool) -> dict:
        oracle = self.oracle
        eager.ask("set_precision", setting=self.precision)
        name_source(eager, self.task)
        seed = random.randrange(SEEDS)
        eager.ask("new", args=pack(oracle.args), seed=seed, dtype=self.parameter_dtype)
        eager.ask("load_state", names=[name for name, _ in oracle.parameters])
        eager.ask("allocate", slots=oracle.slots, inputs=pack(oracle.form))
        if oracle.repeats is None and (digest := oracle.digest(seed)):
            about = {"slot": 0, "names": [], "seed": 0, "at": 0.0, "is_timed": False}
            eager.ask("renew", draw=seed, **about)
            oracle.repeats = eager.ask("digest")["sums"] == digest
        for slot in range(oracle.slots):
            Renewal(oracle, oracle.parameters, True).give(eager, slot, is_timed=False)
        wanted = [] if again else list(self.task.yardsticks)
        return eager.ask("prepare", wanted=wanted, copied=max(1, self.moved // 2))

    @property
    def precision(self) -> str:
        """torch's setting for float32 products."""
        return self.setting or "highest"

    def time(self) -> Run:
        """Times the forwards of the solution and the baselines."""
        self.spared |= self.baselines.start()  # if an input of both signs ended them
        self.prepare_baselines()
        self.remote.ask("allocate", slots=self.oracle.slots, inputs=pack(self.oracle.form))
        self.remote.ask("prepare", wanted=[], copied=0)
        timings = Timings(self.device.type, self.names, self.rate, self.work, moved=self.moved)
        timings.notes += self.baselines.notes
        run = Run(self.setting, timings)
        self.verdict.runs.append(run)
        self.is_step = False
        self._measure("the forward", self._called(self.baselines.names), timings)
        return run

    def time_step(self, run: Run) -> None:
        """Times the training step of a solution whose gradients are right."""
        if not self.has_backward:
            return
        names, whole = self.names, Timings(self.device.type, self.names, self.rate, 0)
        step = run.step = Step.of(self.device.type, names, self.rate)
        self.is_step, self.wants, self.given, self.turned = True, [], [], set()
        self.baselines.forget()
        self.release()
        try:
            for name in (names.solution, names.eager, names.again):
                process, _ = self.process_of(name)
                process.ask("prepare_step", seed=self.step_seed)
                if name != names.again:
                    with suppress(RaisedError):  # of a program that admits no hooks
                        kept = process.ask("kept", names=self.operands_of(name))
                        step.kept[name] = int(kept["bytes"])
            called = self._called({COMPILED} & {*self.baselines.names})
            self._measure("the training step", called, whole, step.forward, step.backward)
        except (FoundError, RaisedError) as error:
            run.step = None
            if OUT_OF_MEMORY not in str(error):
                raise
            self.verdict.notes.append("no memory for the training step")

    def release(self) -> None:
        """Gives memory back before another process needs it; the warm-up comes after."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _called(self, yardsticks: Iterable[str]) -> dict[str, str]:
        """The contestants, each with the worker's name for its call."""
        names = self.names
        called = dict.fromkeys((names.solution, names.eager, names.again), "module")
        return called | {name: name for name in yardsticks}

    def _measure(self, what: str, called: dict[str, str], whole: Timings, *halves: Timings) -> None:
        """Adds the times of all contestants, twice if the first ones cannot be believed.

        Raises:
            FoundError: no honest run gives these.
        """
        what += self.setting and f" at {self.setting}"
        for wanted in (self.task.wanted, CONFIRMATION):
            hidden = self._time(what, called, [whole, *halves], wanted)
            if clock := wrong_clock(hidden, whole):
                problems = [clock]
                continue
            every = halves or (whole,)
            found = [judge(t, 0.0 if halves else self.fastest(t), what) for t in every]
            problems = [problem for each in found for problem in each.problems]
            if not problems:
                for timings, each in zip(every, found, strict=True):
                    timings.notes += each.notes
                return
        raise FoundError(CHEATING, problems[0])

    def _time(
        self, what: str, called: dict[str, str], every: list[Timings], wanted: Rounds
    ) -> dict[str, list[tuple[float, float]]]:
        """Adds the times of all contestants, in random order within each round.

        Args:
            every: the times of whole calls, and of their halves.

        Returns:
            By contestant, of every call, a repeated one too, the seconds that it reports and those
            that this process's clock saw beyond.
        """
        for timings in every:
            timings.start(called)
        hidden: dict[str, list[tuple[float, float]]] = {name: [] for name in called}
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
                if name == self.names.solution:
                    problem = next(filter(None, (turn.problem for turn in turns)), None)
                    if not (problem or self.is_step):
                        problem = self.call_again()
                    own += monotonic() - began
            return samples, problem

        for samples, problem in rounds(one_round, wanted, self.device, what, self.progress):
            if problem:
                raise FoundError(CHEATING, problem)
            for timings, sample in zip(every, samples, strict=True):
                timings.add(sample)
        if not self.is_step:
            others = monotonic() - start - own
            self._check_idle(busy_seconds(self.spared) - busy, own, others)
        return hidden

    def _check_idle(self, busy: float, own: float, others: float) -> None:
        """Whether it computed while the others were timed.

        Args:
            busy: seconds of processors that it took.
            own: seconds in which it was asked.
            others: seconds in which the others were.
        """
        beyond = busy - own * len(os.sched_getaffinity(0))
        if beyond > BUSY * others + SLACK:
            reason = f"background work: {beyond:.1f} s of CPUs while eager was timed"
            raise FoundError(CHEATING, reason)


def fastest_copy(timings: Timings) -> float:
    """Seconds of the fastest copy of as many bytes into memory that is there."""
    is_reused = COPY_REUSED in timings.seconds
    return min(timings.seconds[COPY_REUSED if is_reused else COPY])


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
