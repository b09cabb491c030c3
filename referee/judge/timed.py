"""Times a solution beside eager, in random order, by the parent's clock as well as the child's."""

import math
import os
import random
from statistics import median
from time import monotonic, perf_counter
from typing import NamedTuple

import torch

from referee.cases import dtype_name
from referee.child.feed import ALIGNMENT, TRIPLED
from referee.child.yardsticks import COPY, COPY_REUSED
from referee.compare import first_mismatch
from referee.error_line import LONGEST_LINE
from referee.judge.checks import Checks
from referee.judge.feeding import Renewal, name_source
from referee.judge.oracle import SEEDS, parameters_of
from referee.judge.verdict import CHEATING, FoundError, Run
from referee.processes import busy_seconds
from referee.remote import ForgedError, Remote, pack
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

LOOKED_AT = 1 << 12  # elements of each output and input, after a timed call
BUSY = 0.1  # of a CPU, that a solution takes while nothing is asked of it
SLACK = 0.5  # s of a CPU; helpers that start late
# Calls shorter than this on a CPU, whose threads some other process often holds up by 0.5 ms, are
# repeated, and the fastest counts.
SHORT, REPEATS = {"cpu": 2e-3, "cuda": 0.0}, 2
# s that a child process may wait for a CPU after each message. Honest files were 0.4 ms and 1.3 ms
# beyond eager's on two cores, of which other programs had some.
WAKE_UP = {"cpu": 2e-3, "cuda": 0.0}


class Turn(NamedTuple):
    """A timed call.

    Attributes:
        sample: its seconds, by the device's clock and until the device was idle.
        hidden: what it took by this process's clock beyond that, without the time for which other
            programs had the CPUs: a longer call is the sooner followed by their turn.
        problem: what is wrong with its result, in words.
    """

    sample: tuple[float, float]
    hidden: float
    problem: str | None


class Timed(Checks):
    """Forwards, on inputs and parameters that are all new in every call."""

    names = Names(solution="ModelNew", eager="eager")
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

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.turns, self.latest = 0, None
        self.setting = ""

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

    def _prepare_eager(self, eager: Remote, again: bool) -> dict:
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
            oracle.repeats = eager.ask("digest", slot=0)["sums"] == digest
        for slot in range(oracle.slots):
            Renewal(oracle, oracle.parameters, True).give(eager, slot, is_timed=False)
        wanted = [] if again else list(self.task.yardsticks)
        return eager.ask("prepare", wanted=wanted, copied=max(1, self.moved // 2))

    @property
    def precision(self) -> str:
        """torch's setting for float32 products."""
        return self.setting or "highest"

    def prepare_timing(self) -> None:
        """Gives the solution room for the inputs of timed calls."""
        oracle = self.oracle
        self.remote.ask("allocate", slots=oracle.slots, inputs=pack(oracle.form))
        self.remote.ask("prepare", wanted=[], copied=0)

    def busy_seconds(self) -> float:
        """The processor time so far of the solution's process and all that it started."""
        return busy_seconds(self.spared)

    def time(self) -> Run:
        """Times the solution and the baselines."""
        self.spared |= self.baselines.start()  # if an input of both signs ended them
        self.prepare_baselines()
        self.prepare_timing()
        run = Run(self.setting, Timings(self.device.type, self.names, self.rate, self.work))
        run.timings.moved = self.moved
        run.timings.notes += self.baselines.notes
        self.verdict.runs.append(run)
        for wanted in (self.task.wanted, CONFIRMATION):
            found = self._time(run.timings, wanted)
            if not found.problems:
                break
        else:
            raise FoundError(CHEATING, found.problems[0])
        run.timings.notes += found.notes
        return run

    def _time(self, timings: Timings, wanted: Rounds) -> Findings:
        """Adds the times of all contestants, in random order within each round."""
        names = self.names
        called = {names.solution: "module", names.eager: "module", names.again: "module"}
        called |= {name: name for name in self.baselines.names}
        timings.start(called)
        hidden: dict[str, list[tuple[float, float]]] = {name: [] for name in called}
        own, busy, start = 0.0, self.busy_seconds(), monotonic()

        def one_round() -> tuple[Samples, str | None]:
            nonlocal own
            samples, problem = {}, None
            for name in random.sample(list(called), len(called)):
                began = monotonic()
                turns = [self._turn(name, called[name])]
                if turns[0].sample[0] < SHORT[self.device.type]:
                    turns += [self._turn(name, called[name]) for _ in range(REPEATS)]
                samples[name] = min(turn.sample for turn in turns)
                hidden[name] += [(turn.sample[0], turn.hidden) for turn in turns]
                if name == names.solution:
                    problem = next(filter(None, (turn.problem for turn in turns)), None)
                    problem = problem or self._call_again()
                    own += monotonic() - began
            return samples, problem

        what = f"the forward{self.setting and f' at {self.setting}'}"
        for samples, problem in rounds(one_round, wanted, self.device, what, self.progress):
            if problem:
                raise FoundError(CHEATING, problem)
            timings.add(samples)
        self._check_idle(self.busy_seconds() - busy, own, monotonic() - start - own)
        if problem := wrong_clock(hidden, timings):
            return Findings([problem])
        return judge(timings, self.fastest(timings), "the forward")

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

    def renew(self, name: str, slot: int) -> tuple[Remote, Renewal]:
        """Gives a contestant new values; its process."""
        process, parameters = self.process, self.parameters
        if name != self.names.solution:
            process = self.baselines.asked(name == self.names.again)
            parameters = self.oracle.parameters
        renewal = Renewal(self.oracle, parameters, inputs=True)
        if name == self.names.solution:
            self.latest = renewal
        renewal.give(process, slot, is_timed=True)
        return process, renewal

    def clocked(self, name: str, op: str, **arguments: object) -> tuple[dict, float]:
        """Asks a contestant for something timed; the reply, and the seconds by this clock."""
        ask, waited = self.remote.ask, self.remote.waited
        if name != self.names.solution:
            again = name == self.names.again
            ask, waited = self.baselines.asked(again).ask, self.baselines.asked(again).waited
        before, start = waited(), perf_counter()
        reply = ask(op, **arguments)
        left_on = ask("left_on")["names"]
        seconds = perf_counter() - start - (waited() - before)
        if left_on:
            reason = f"leaves {left_on[0]} on, which may compute a result when it is read"
            raise FoundError(CHEATING, reason[:LONGEST_LINE])
        return reply, seconds

    def _turn(self, name: str, call: str) -> Turn:
        """Renews the inputs of a contestant and times a call, by the worker's name for it."""
        is_solution = name == self.names.solution
        self.turns += is_solution
        slot = self.turns % self.oracle.slots
        process, renewal = self.renew(name, slot)
        reply, ours = self.clocked(name, "time", slot=slot, call=call)
        seconds, wall = checked(reply["seconds"], reply["wall"])
        problem = None
        if call == "module":
            if is_solution:
                self.redraw(renewal.seed)
            # The same is done after a call of eager, that the caches are the same for all.
            problem = self._look(process, slot, (self.latest or renewal).inputs())
        return Turn((max(seconds, 1e-9), wall), ours - seconds, problem if is_solution else None)

    def _call_again(self) -> str | None:
        """What is wrong after an element of each parameter, and of the input, has changed.

        Whoever keeps what seems not to have changed is wrong there. Only inputs of this project's
        problems may change in part.
        """
        slot, inputs = self.turns % self.oracle.slots, self.latest.inputs()
        before, values = self.oracle.run(self.module, inputs), self.module.state_dict()
        may_change = self.oracle.file.is_ours and self.dtype.is_floating_point
        changed = [(inputs[0], None)] if may_change else []
        own = (values[name] for name, _ in parameters_of(self.module))
        changed += zip(own, (name for name, _ in self.parameters), strict=False)
        changed = [(x, name) for x, name in changed if x.numel()]
        if not changed:
            return None
        places = [[random.randrange(side) for side in x.shape] for x, _ in changed]
        for (x, name), place in zip(changed, places, strict=True):
            x.data[tuple(place)].mul_(TRIPLED if name else -1)
        names = [name for _, name in changed]
        self.remote.ask("touch", slot=slot, names=names, places=places)
        self.clocked(self.names.solution, "time", slot=slot, call="module")
        return self._look(self.process, slot, inputs, before)

    def _look(
        self, process: Remote, slot: int, inputs: list, before: list[torch.Tensor] | None = None
    ) -> str | None:
        """The fault of random elements of the timed call's outputs, or of its inputs, in words.

        Args:
            before: results, of which those elements are looked at that differ now.
        """
        tensors, eager = self.oracle.tensors, self.oracle.run(self.module, inputs)
        flats = [x.contiguous().view(-1) for x in eager]
        changed = [(x != old.reshape(-1)) for x, old in zip(flats, before or [], strict=False)]
        flats += [inputs[i].as_strided((inputs[i].numel(),), (1,)) for i in tensors]
        places = [torch.randint(max(len(f), 1), (LOOKED_AT,), dtype=torch.int64) for f in flats]
        for turn, there in enumerate(x.nonzero().view(-1).cpu() for x in changed):
            if len(there):
                places[turn] = there[places[turn] % len(there)]
        process.put(*places)
        counts = {"outputs": len(eager), "inputs": tensors, "count": LOOKED_AT}
        reply = process.ask("pick", slot=slot, keep=self.oracle.shares, **counts)
        facts = reply["outputs"]
        if fault := next((fact["fault"] for fact in facts if fact.get("fault")), ""):
            return str(fault)[:LONGEST_LINE]
        forms = [(list(x.shape), dtype_name(x.dtype)) for x in eager]
        found = [(fact.get("shape"), fact.get("dtype")) for fact in facts]
        if (reply["structure"], found) != (self.oracle.structure, forms):
            return "a timed call returned another kind of output than before"
        start = 0
        for turn, (flat, at) in enumerate(zip(flats, places, strict=True)):
            some = at[: len(flat)]
            got = self.take(start, [len(some)], flat.dtype, process.take)
            start += -(-got.numel() * got.element_size() // ALIGNMENT) * ALIGNMENT
            some = some.to(self.device)
            if turn >= len(eager):
                if first_mismatch(got, flat[some], exact=True):
                    return "changes its input in timed calls"
            elif problem := self.budgets[turn].compare_some(got, flat[some]):
                return f"a timed call was wrong: {problem}"
        return None


def checked(*seconds: object) -> tuple[float, ...]:
    """Times that a process reports."""
    if not all(type(t) is float and math.isfinite(t) for t in seconds):
        raise ForgedError
    return seconds


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
