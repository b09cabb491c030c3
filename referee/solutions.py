"""Grades any file that defines `ModelNew`: in a process of its own, judged from this one.

References, random numbers and verdicts are here, where the solution cannot reach them; eager is
timed in further processes. A verdict of `cheating` names what an honest program does not do by
accident; all else that is not right is `wrong`.
"""

import copy
import math
import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, perf_counter, sleep

import torch
from torch import nn

from model import Problem
from referee import cases, linear, linear_checks, operands, relu
from referee.compare import first_mismatch
from referee.errors import U32, Allowance, Comparison
from referee.linear_errors import compare_output, precision
from referee.memory import RING
from referee.progress import Progress
from referee.remote import HALF, EndedError, ForgedError, LateError, RaisedError, Remote, reaping
from referee.stats import speed_up
from referee.timing import GRAIN, LEAST_JUDGED, UNSEEN, Rounds, Timings, judge, rounds

CORRECT, WRONG, CHEATING, ERROR, LATE = "correct", "wrong", "cheating", "error", "time limit"
BUFFERS = {"cpu": 9, "cuda": 10}  # of the input's size that all processes together hold
LONGEST_LINE = 200
LATENESS = 0.2  # s, after which what a thread still had to write is there
SETTLING = 15.0  # s, within which an honest program's helpers have started up
BUSY = 0.1  # of a CPU, that a solution takes while nothing is asked of it
# The Frobenius norm of the errors over that of the results, at most: between what rounding to the
# format gives, 3.0e-4 (7.4e-4 truncated) and 2.3e-3, and the next one's.
GRADES = {"TF32-grade": 1.2e-3, "bf16-grade": 1e-2}
# The largest error in parts of the sum of the terms' magnitudes that bfloat16 operands explain.
LOWER = 2.0**-6
# Calls shorter than this on a CPU, whose threads some other process often holds up by 0.5 ms, are
# repeated, and the fastest counts.
SHORT, REPEATS = {"cpu": 2e-3, "cuda": 0.0}, 2
# By how much the ratio of two processes that run the same code is off: which addresses they got.
PLACEMENT = {"cpu": 1.1, "cuda": 1.01}
# Ratios of eager to itself beyond which the machine is too noisy to tell anything.
WIDEST_CONTROL = 1.3
SUSPECTS = {
    "relu": 2,
    "linear_relu_divide": 13,
}  # random rows that are looked at after a timed call
SEEDS = 1 << 30  # seeds of rows are drawn from this many


COMPILER_ERROR = re.compile(r"(?:^|[\s:)])(?:fatal )?error\s*:|undefined (?:reference|symbol)")


class FoundError(Exception):
    """The verdict is known: its word, and the reason."""


@dataclass
class Verdict:
    """The outcome of a file.

    Attributes:
        word: correct, wrong, cheating, error or time limit.
        reason: what is wrong, in words.
        accuracy: the class reached, "" if not known.
        refused: kinds of inputs that the problem does not ask for and the solution refuses.
        timings: of a correct solution.
    """

    file: Path
    word: str = CORRECT
    reason: str = ""
    accuracy: str = ""
    count: int = 0
    import_seconds: float = 0.0
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timings: Timings | None = None

    @property
    def ratio(self) -> tuple[float, float, float] | None:
        """Eager's time in parts of the solution's, with its interval; None where too noisy."""
        timings = self.timings
        if timings is None or self.too_noisy:
            return None
        names = timings.names
        return speed_up(timings.seconds[names.eager], timings.seconds[names.solution])

    @property
    def too_noisy(self) -> bool:
        """Whether eager's own two times differ so much that no ratio means anything."""
        seconds, names = self.timings.seconds, self.timings.names
        if len(seconds[names.eager]) < LEAST_JUDGED:
            return True
        _, low, high = speed_up(seconds[names.eager], seconds[names.again])
        return high > WIDEST_CONTROL or low < 1 / WIDEST_CONTROL

    @property
    def is_tie(self) -> bool:
        """Whether the interval includes 1, if moved by as much as processes, or eager's differ."""
        seconds, names = self.timings.seconds, self.timings.names
        control, *_ = speed_up(seconds[names.eager], seconds[names.again])
        _, low, high = self.ratio
        bias = max(control, 1 / control, PLACEMENT[self.timings.device])
        return low / bias <= 1 <= high * bias


@dataclass(frozen=True)
class Task:
    """The conditions on which files are graded, as `outcome.Task`; `name` is the problem's."""

    name: str
    problem: Problem
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wanted: Rounds
    timeout: float
    progress: Progress


class Baselines:
    """Eager, and eager again, each in a process of its own; on a GPU, whose memory they share,
    in one. They start when they are first needed.
    """

    def __init__(self, task: Task) -> None:
        self._task, self._remotes = task, []
        self.names: list[str] = []

    def start(self) -> set[int]:
        """Starts and fills them, if they are not there; their process ids."""
        for turn in range(0 if self._remotes else 2 if self._task.device.type == "cpu" else 1):
            self._remotes.append(Remote(self._task.device))
            names = self._prepare(turn)
            self.names = self.names or names
        return {remote.pid for remote in self._remotes}

    def ask(self, again: bool, op: str, **arguments: object) -> dict:
        """`Remote.ask` of one of the two.

        Raises:
            FoundError: it failed; it is torch's own code, so that the solution is not judged.
        """
        try:
            return self._remotes[-1 if again else 0].ask(op, **arguments)
        except (EndedError, ForgedError, RaisedError) as error:
            self.close()
            reason = f"eager itself could not be timed: {type(error).__name__} {error}"
            raise FoundError(ERROR, reason[:LONGEST_LINE]) from None

    def take(self, *place: object) -> torch.Tensor:
        """`Remote.take` of the first."""
        return self._remotes[0].take(*place)

    def close(self) -> None:
        """Ends them."""
        for remote in self._remotes:
            remote.close()
        self._remotes = []

    def _prepare(self, turn: int) -> list[str]:
        task, again = self._task, bool(turn)
        args, seed = task.problem.get_init_inputs(), random.randrange(SEEDS)
        dtype = _name(task.dtype)
        self.ask(again, "load", path=None, problem=task.name)
        state = self.ask(again, "new", args=args, seed=seed, dtype=dtype)["state"]
        scale, names = 1 / math.sqrt(task.shape[1]), [name for name, _ in state]
        self.ask(again, "fill_state", seed=seed, names=names, scale=scale)
        self.ask(again, "fill", **_ring(task, RING[task.device.type], seed, False))
        yardstick = "" if again else {"relu": "copy"}.get(task.name, "product")
        return self.ask(again, "prepare", yardstick=yardstick)["names"]


def grade_files(files: list[Path], task: Task, report: Callable[[Verdict], None]) -> list[Verdict]:
    """Grades one file after the other, and reports each as soon as it is known."""
    verdicts, baselines = [], Baselines(task)
    try:
        for file in files:
            verdicts.append(grade_file(file, task, baselines))
            report(verdicts[-1])
    finally:
        baselines.close()
    return verdicts


def grade_file(file: Path, task: Task, baselines: Baselines) -> Verdict:
    """Its verdict, whatever the file does."""
    verdict, stage = Verdict(file), "starting"

    def progress(what: str, detail: str = "") -> None:
        nonlocal stage
        stage = f"{what} {detail}".rstrip()
        task.progress(f"{file.name}: {what}", detail)

    with reaping() as spared:
        remote = Remote(task.device, monotonic() + task.timeout)
        try:
            judged = {"relu": Relu, "linear_relu_divide": Linear}[task.name]
            judged(remote, task, verdict, progress, baselines, spared).grade(file)
        except FoundError as found:
            verdict.word, verdict.reason = found.args
        except LateError:
            verdict.word, verdict.reason = LATE, f"{task.timeout:g} s, while {stage}"
        except ForgedError:
            verdict.word = CHEATING
            verdict.reason = f"forged a reply to the referee, while {stage}"
        except EndedError as ended:
            verdict.word, verdict.reason = _ended(ended.args[0], stage, remote.printed)
        except RaisedError as raised:
            verdict.word, verdict.reason = _raised(raised, stage)
        finally:
            remote.close()
    task.progress.clear()
    return verdict


class Judge:
    """Asks the solution, and compares; what both problems have in common."""

    names, rate = relu.NAMES, relu.RATE

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
        self.device, self.dtype = task.device, task.dtype
        self.generator = torch.Generator(device=self.device)
        self.seed = self.generator.seed() % SEEDS  # new in every run
        self.generator.manual_seed(self.seed)
        self.earlier: dict[tuple, torch.Tensor] = {}
        self.reference: nn.Module

    def grade(self, file: Path) -> None:
        """The whole course, from import to times.

        Raises:
            FoundError: as soon as something is not right.
        """
        self.progress("importing")
        path, name = str(file.resolve()), self.task.name
        self.verdict.import_seconds = float(
            self.remote.ask("load", path=path, problem=name)["seconds"]
        )
        self.check_changes()
        self.check_small()
        self.check_changes()
        self.check_library()
        self.check_background()
        self.progress("checking", str(list(self.task.shape)))
        self.check_headline()
        self.time()
        self.check_changes()

    def check_small(self) -> None:
        """Everything but the timed size."""
        raise NotImplementedError

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """The reference's result."""
        with torch.no_grad():
            return self.reference(x)

    def mismatch(self, output: torch.Tensor, x: torch.Tensor) -> str | None:
        """The fault of the values for x, in words."""
        raise NotImplementedError

    def guesses(self, x: torch.Tensor) -> dict[str, tuple[str, torch.Tensor]]:
        """Wrong results that tell what was done: the verdict's word and the result, by name."""
        raise NotImplementedError

    def check(
        self, name: str, x: torch.Tensor, required: bool, again: bool = False, fill: bool = False
    ) -> None:
        """One forward: form and values, fresh memory, an input that stays as it is."""
        self.progress("checking", name)
        self.verdict.count += 1
        flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        spec = {
            "dtype": _name(x.dtype),
            "bytes": len(flat),
            "shape": list(x.shape),
            "strides": list(x.stride()),
            "offset": x.storage_offset(),
        }
        expected = self.expected(x)
        bait = [list(expected.shape), random.randrange(SEEDS)]
        if not (required and expected.numel() and x.is_floating_point()):
            bait = None
        self.remote.put(flat)
        size = expected.numel() * x.element_size()
        try:
            reply = self.remote.ask("call", spec=spec, bait=bait, size=size, again=again, fill=fill)
        except RaisedError as raised:
            self._refused(name, raised, required)
            return
        facts = {
            "dtype": _name(expected.dtype),
            "device": str(expected.device),
            "shape": list(expected.shape),
            "strides": list(expected.stride()),
        }
        compact = x.is_contiguous() and expected.numel() > 0
        self._check_form(reply, facts, f"{name}: ", compact)
        output = self._take(0, list(expected.shape), expected.dtype)
        after = self._take(reply["bytes"], [len(flat)], torch.uint8)
        if reply["shares_input"] is not False:
            raise FoundError(CHEATING, f"returns its input, not new memory: {name}")
        if reply["moved"] is not False or not torch.equal(after, flat):
            raise FoundError(CHEATING, f"changes its input: {name}")
        if again and reply["shares_earlier"]:
            raise FoundError(WRONG, f"two outputs share memory: {name}")
        if problem := self.mismatch(output, x):
            raise FoundError(*self._diagnose(name, output, expected, x, bait, problem))
        if output.numel() > 1:
            self.earlier[tuple(output.shape)] = output

    def _refused(self, name: str, raised: RaisedError, required: bool) -> None:
        """Not all kinds of inputs need be taken; those of the problem's kind must be."""
        about = raised.args[0]
        _, line = _raised(raised, name)
        if about.get("exits") or "CUDA error" in str(about.get("text")):
            raise raised
        if not required:
            kind = name.partition(",")[0]
            if kind not in self.verdict.refused:
                self.verdict.refused.append(kind)
            return
        if self.verdict.count == 1:  # does it take anything?
            self._run_whole(random.randrange(SEEDS), True)
        raise FoundError(WRONG, f"does not take {name}: {line}")

    def _check_form(self, reply: dict, facts: dict, prefix: str, strides: bool) -> None:
        """The kind of output, and what it says of itself.

        A solution may return results of strided inputs with other strides, and the stride of a
        dimension of one element means nothing.
        """
        kind = str(reply.get("type"))[:100]
        if kind not in ("Tensor", "Parameter") or "dtype" not in reply:
            if reply.get("subclass"):
                reason = f"returns a tensor subclass, {kind}, which may compute when it is read"
                raise FoundError(CHEATING, reason)
            raise FoundError(WRONG, f"{prefix}returns a {kind}, not a plain tensor")
        for fact, want in facts.items():
            got = reply.get(fact)
            if fact == "strides":
                sides = zip(facts["shape"], want, got, strict=True)
                if not strides or all(s == 1 or a == b for s, a, b in sides):
                    continue
            if got != want:
                got = str(got)[:LONGEST_LINE]
                raise FoundError(WRONG, f"{prefix}the output's {fact} is {got}, expected {want}")

    def _take(
        self,
        start: int,
        shape: list[int],
        dtype: torch.dtype,
        take: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if type(start) is not int or not 0 <= start <= HALF - dtype.itemsize * math.prod(shape):
            raise ForgedError
        return (take or self.remote.take)(start, shape, dtype).to(self.device)

    def _diagnose(
        self,
        name: str,
        output: torch.Tensor,
        expected: torch.Tensor,
        x: torch.Tensor,
        bait: list | None,
        problem: str,
    ) -> tuple[str, str]:
        """The verdict on a wrong result."""
        if bait:
            found = torch.empty(bait[0], dtype=output.dtype, device=output.device)
            if torch.equal(output, cases.draw_rows(found, bait[1], unit=True)):
                return CHEATING, f"takes a tensor of the referee's for its result: {name}"
        if output.is_floating_point():
            unwritten = (output.isnan() & ~expected.isnan()).double().mean().item()
            if unwritten > 0.5:
                return CHEATING, f"returns memory that it has not written: {name}"
            if unwritten:
                problem = f"memory that was not written, or NaN; {problem}"
        earlier = self.earlier.get(tuple(output.shape))
        if earlier is not None and earlier.dtype == output.dtype and torch.equal(output, earlier):
            return CHEATING, f"replays the result of an earlier call: {name}"
        self.remote.ask("recall", seconds=LATENESS)
        late = self._take(0, list(output.shape), output.dtype)
        if not torch.equal(late.nan_to_num(), output.nan_to_num()):
            return CHEATING, f"background work: writes its result after the call returned: {name}"
        for what, (word, guess) in self.guesses(x).items():
            same = guess.shape == output.shape and output.numel() > 1
            if same and self.agrees(output, guess) and not self.agrees(guess, expected):
                return word, f"{what}: {name}"
        return WRONG, f"{name}: {problem}"

    def agrees(self, output: torch.Tensor, guess: torch.Tensor) -> bool:
        """Whether two results are the same but for rounding."""
        return torch.equal(output, guess)

    def check_changes(self) -> None:
        """Functions, settings and names of the referee that the solution changed."""
        changed = self.remote.ask("changes")["changed"]
        if changed:
            raise FoundError(CHEATING, f"changed {', '.join(map(str, changed))}"[:LONGEST_LINE])

    def check_library(self) -> None:
        """Whether it swallowed an exception and then called the library's function."""
        try:
            found = self.remote.ask("library")
        except RaisedError:  # a mode that looks on is no part of the problem
            return
        library, swallowed = found["library"], found["swallowed"]
        if library and swallowed:
            reason = f"falls back on {library[0]} after {swallowed[0]}"
            raise FoundError(CHEATING, reason[:LONGEST_LINE])
        if library:
            self.verdict.notes.append(f"calls {library[0]}")

    def check_background(self) -> None:
        """Whether it computes while nothing is asked of it."""
        self.progress("waiting until it rests")
        until = monotonic() + SETTLING
        while True:
            before, start = self.remote.busy_seconds(), monotonic()
            sleep(LATENESS)
            share = (self.remote.busy_seconds() - before) / (monotonic() - start)
            if share < BUSY:
                return
            if monotonic() > until:
                raise FoundError(
                    CHEATING, f"background work: {share:.0%} of a CPU while it should rest"
                )

    def check_headline(self) -> None:
        """The timed size, of values as the public harness draws them and of both signs."""
        for name, unit in (("x in 0..1", True), ("x in -1..1", False)):
            self.check_whole(f"{list(self.task.shape)}, {name}", unit)

    def check_whole(self, name: str, unit: bool) -> None:
        """One forward of the timed size; all rows of output and input are looked at."""
        self.progress("checking", name)
        self.verdict.count += 1
        (rows, k), (_, n) = self.task.shape, self.output_shape
        seed = random.randrange(SEEDS)
        facts = {
            "dtype": _name(self.dtype),
            "device": str(self.device),
            "shape": [rows, n],
            "strides": [n, 1],
        }
        reply = self._run_whole(seed, unit)
        self._check_form(reply, facts, f"{name}: ", True)
        if reply["shares_input"] is not False:
            raise FoundError(CHEATING, f"returns its input, not new memory: {name}")
        step = HALF // ((k + n) * self.dtype.itemsize)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            size = self.remote.ask("rows", slot=0, start=start, stop=stop)["bytes"]
            output = self._take(0, [stop - start, n], self.dtype)
            after = self._take(size, [stop - start, k], self.dtype)
            x = torch.empty_like(after)
            cases.draw_rows(x, seed + start, unit)
            if first_mismatch(after, x, exact=True):
                raise FoundError(CHEATING, f"changes its input: {name}")
            if problem := self.mismatch(output, x, whole=True):
                expected = self.expected(x)
                raise FoundError(*self._diagnose(name, output, expected, x, None, problem))
            self.earlier = {tuple(output.shape): output}

    def _run_whole(self, seed: int, unit: bool) -> dict:
        self.remote.ask("fill", **_ring(self.task, 1, seed, unit))
        return self.remote.ask("run", slot=0)

    def time(self) -> None:
        """Times the solution and the baselines, in random order within each round."""
        task, names = self.task, self.names
        self.progress("starting eager")
        self.spared |= self.baselines.start()
        slots, rows = RING[self.device.type], task.shape[0]
        ring = Ring(slots, rows, random.randrange(SEEDS))
        self.remote.ask("fill", **_ring(task, slots, ring.seed, False))
        self.remote.ask("prepare", yardstick="")
        timings = Timings(self.device.type, names, self.rate, self.work())
        called = {names.solution: "module", names.eager: "module", names.again: "module"}
        called |= {name: name for name in self.baselines.names}
        timings.start(called)
        hidden: dict[str, list[float]] = {name: [] for name in called}

        def turn(name: str) -> tuple[tuple[float, float], str | None]:
            if name == names.solution:
                ask, take, seeds = self.remote.ask, self.remote.take, ring
            else:
                ask = partial(self.baselines.ask, name == names.again)
                take, seeds = self.baselines.take, Ring(slots, rows, 0)
            slot, row, column, seed = seeds.turn(self.columns())
            ask("alter", slot=slot, row=row, seed=seed, column=column, scale=self.scale)
            start = perf_counter()
            reply = ask("time", slot=slot, name=called[name])
            ours = perf_counter() - start
            seconds, wall = float(reply["seconds"]), float(reply["wall"])
            hidden[name].append(ours - seconds)
            # Eager's are fetched as well, that the caches are the same for all.
            looked = ask("suspects", slot=slot, row=row, count=SUSPECTS[task.name])
            check = self._suspects(take, looked, seeds, slot, row, (column, seed))
            return (max(seconds, 1e-9), wall), check

        def one_round() -> tuple[dict, str | None]:
            samples, checks = {}, []
            for name in random.sample(list(called), len(called)):
                turns = [turn(name)]
                if turns[0][0][0] < SHORT[self.device.type]:
                    turns += [turn(name) for _ in range(REPEATS)]
                samples[name] = min(sample for sample, _ in turns)
                if name == names.solution:
                    checks = [check for _, check in turns]
            return samples, next(filter(None, (check() for check in checks)), None)

        for samples, problem in rounds(one_round, task.wanted, self.device, "it", self.progress):
            if problem:
                raise FoundError(CHEATING, problem)
            timings.add(samples)
        if problem := _wrong_clock(hidden, timings):
            raise FoundError(CHEATING, problem)
        judge(timings, self.fastest(timings), "the forward")
        if timings.problems:
            raise FoundError(CHEATING, timings.problems[0])
        self.verdict.timings = timings

    def _suspects(
        self,
        take: Callable[..., torch.Tensor],
        reply: dict,
        ring: "Ring",
        slot: int,
        row: int,
        altered: tuple[int | None, int],
    ) -> Callable[[], str | None]:
        """Takes rows of the last call, which were chosen after it; what checks them later on."""
        rows, count = reply["rows"], SUSPECTS[self.task.name] + 3
        if reply["type"] != "Tensor" or len(rows) != count or rows[0] != row:
            return lambda: "a timed call returned another kind of output than before"
        if not all(type(r) is int and 0 <= r < self.task.shape[0] for r in rows):
            raise ForgedError
        n, k = self.output_shape[1], self.task.shape[1]
        output = self._take(0, [count, n], self.dtype, take)
        after = self._take(reply["bytes"], [count, k], self.dtype, take)
        seeds = [ring.seed_of(slot, r) for r in rows]

        def check() -> str | None:
            x = torch.empty_like(after)
            for values, seed in zip(x, seeds, strict=True):
                cases.draw_rows(values[None], seed)
            if first_mismatch(after, x, exact=True):
                return "changes its input in timed calls"
            self.alter_reference(*altered)
            problem = self.mismatch(output, x)
            return problem and f"a timed call was wrong, in rows {rows[:4]} ...: {problem}"

        return check

    output_shape: tuple[int, int]
    scale = 1.0

    def columns(self) -> int | None:
        """How many rows of the weight there are to alter; None without a weight."""
        return None

    def alter_reference(self, column: int | None, seed: int) -> None:
        """Draws the row of the reference's weight that was drawn for the solution's."""

    def work(self) -> int:
        """The work of one call, in units of the rate."""
        raise NotImplementedError

    def fastest(self, timings: Timings) -> float:
        """Seconds of one call's work at the highest rate measured."""
        raise NotImplementedError


class Ring:
    """The seeds of the rows of a ring of inputs."""

    def __init__(self, slots: int, rows: int, seed: int) -> None:
        self.slots, self.rows, self.seed = slots, rows, seed
        self._altered: dict[tuple[int, int], int] = {}
        self._slot = 0

    def turn(self, columns: int | None) -> tuple[int, int, int | None, int]:
        """The next input, a row of it, a row of the weight, and the seed to draw them with."""
        self._slot = (self._slot + 1) % self.slots
        row, seed = random.randrange(self.rows), random.randrange(SEEDS)
        self._altered[self._slot, row] = seed
        return self._slot, row, None if columns is None else random.randrange(columns), seed

    def seed_of(self, slot: int, row: int) -> int:
        """The seed of a row as it is now."""
        return self._altered.get((slot, row), self.seed + slot * self.rows + row)


class Relu(Judge):
    """Equal to the last bit."""

    rate, names = relu.RATE, relu.NAMES

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.reference = self.task.problem.reference().to(self.device)
        self.output_shape = self.task.shape

    def check_small(self) -> None:
        self.progress("constructing")
        args = self.task.problem.get_init_inputs()
        self.remote.ask("new", args=args, seed=self.seed, dtype=_name(self.dtype))
        every = list(cases.elementwise(self.device, self.seed))
        own = [case for case in every if case.name.startswith(f"{_name(self.dtype)},")]
        for case in own:
            x = case.make()
            self.check(case.name, x, x.is_contiguous() and x.numel() > 0)
        x = self._draw(1 << 22)
        self.check("a large vector", x, True)
        x = self._draw(129, 65)
        self.check("an input", x, True)
        values = x.clone()
        cases.refill(values[random.randrange(len(values))], self.generator)
        self.check("another row at the same address", values, True, again=True)
        values = values.clone()
        place = random.randrange(values.numel())
        values.view(-1)[place] = 1 if values.view(-1)[place] <= 0 else 3
        self.check("another element at the same address", values, True, again=True)
        self.check("other values at the same address", self._draw(129, 65), True, again=True)
        for length in range(1, 66):
            self.check(f"length {length}, new memory filled", self._draw(length), True, fill=True)
        for case in every:
            if case not in own:
                self.check(case.name, case.make(), False)
        self.check("an input", self._draw(129, 65), True)
        self.verdict.accuracy = "exact"

    def _draw(self, *shape: int) -> torch.Tensor:
        return cases.random(shape, self.dtype, self.device, self.generator)

    def mismatch(self, output: torch.Tensor, x: torch.Tensor, whole: bool = False) -> str | None:
        mismatch = first_mismatch(output, self.expected(x))
        return str(mismatch) if mismatch else None

    def guesses(self, x: torch.Tensor) -> dict[str, tuple[str, torch.Tensor]]:
        return {
            "returns a copy of its input": (CHEATING, x),
            "returns zeros": (CHEATING, torch.zeros_like(x)),
        }

    def work(self) -> int:
        return 2 * math.prod(self.task.shape) * self.dtype.itemsize

    def fastest(self, timings: Timings) -> float:
        return relu.fastest_copy(timings)


class Linear(Judge):
    """Within the errors of a sum in the dtype, in whatever order."""

    rate, names = linear.RATE, linear.NAMES

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        k, n, _ = self.task.problem.get_init_inputs()
        self.output_shape = (self.task.shape[0], n)
        self.scale = 1 / math.sqrt(k)
        self.stale: dict[str, nn.Module] = {}
        self.worst = 0.0

    def check_small(self) -> None:
        sizes, draw = linear_checks.SIZES, self._draw
        self.construct(65, 33, 3.0)
        self.check("an input, as constructed", draw(129, 65), True)
        self.load("load_state_dict")
        self.check("an input, a state loaded", draw(129, 65), True)
        for turn in range(2):
            for i, m in enumerate(sizes):
                n = sizes[(5 * i + 4 * turn + 1) % len(sizes)]
                k = sizes[(8 * i + 3 * turn + 2) % len(sizes)]
                divisor = linear_checks.DIVISORS[(i + turn) % len(linear_checks.DIVISORS)]
                self.construct(k, n, divisor)
                name = f"[{m}, {k}] -> {n}, divisor {divisor}"
                self.check(f"{name}, as constructed", draw(m, k), True)
                self.load("load_state_dict")
                self.check(f"{name}, a state loaded", draw(m, k), True)
        for m, n, k in linear_checks.SHAPES[:-1]:
            self.construct(k, n, 2.0)
            self.check(f"[{m}, {k}] -> {n}", draw(m, k), True)
        self._check_calls()
        self.construct(33, 17, 2.0)
        for name, shape, view in linear_checks.X_LAYOUTS:
            x = view(draw(*shape))
            self.check(name, x, x.is_contiguous() and x.numel() > 0 and x.dim() == 2)
        if self.dtype == torch.float32:
            self._check_operands()
        self.construct(65, 33, 2.0)
        self.check("an input", draw(129, 65), True)

    def _check_calls(self) -> None:
        """One address, one module, other values."""
        self.construct(65, 33, 2.0)
        x = self._draw(129, 65)
        self.check("an input", x, True)
        self.load("data")
        self.check("parameters overwritten", x, True, again=True)
        values = x.clone()
        cases.refill(values[random.randrange(len(values))], self.generator)
        self.check("another row at the same address", values, True, again=True)
        values = values.clone()
        values.view(-1)[random.randrange(values.numel())].neg_().add_(3)
        self.check("another element at the same address", values, True, again=True)
        if self.remote.ask("attribute", name="divisor", value=-0.5)["there"]:
            self.stale = {"an old divisor": self._copy()}
            self.reference.divisor = -0.5
            self.check("divisor assigned", values, True)
        for m, n in ((1, 1), (7, 3), (17, 65), (33, 31), (130, 129)):
            self.construct(9, n, 2.0)
            self.check(f"[{m}, 9] -> {n}, new memory filled", self._draw(m, 9), True, fill=True)

    def _check_operands(self) -> None:
        """Operands of many kinds, but for those that only some hardware carries."""
        self.construct(129, 65, 2.0)
        for name in operands.CASES:
            if "subnormal" in name or "overflow" in name:
                continue
            x, weight, bias = operands.named(name, 33, 129, 65)
            self.reference.load_state_dict({"linear.weight": weight, "linear.bias": bias})
            self.put_state("load_state_dict")
            self.check(name, x.to(self.device), True)

    def construct(self, k: int, n: int, divisor: float) -> None:
        """Both modules, under one seed."""
        seed, dtype = random.randrange(SEEDS), _name(self.dtype)
        state = self.remote.ask("new", args=[k, n, divisor], seed=seed, dtype=dtype)["state"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.task.problem.reference(k, n, divisor).to(self.device, self.dtype)
        shapes = [list(value.shape) for value in module.state_dict().values()]
        self.state = [str(name) for name, _ in state]
        if [shape for _, shape in state] != shapes:
            got = ", ".join(f"{name} {shape}" for name, shape in state) or "empty"
            raise FoundError(WRONG, f"its state is {got}, expected {shapes}"[:LONGEST_LINE])
        self.reference, self.stale, self.earlier = module.requires_grad_(False), {}, {}

    def load(self, how: str) -> None:
        """New values for both modules' parameters."""
        self.stale = {"old parameters": self._copy()}
        for parameter in self.reference.parameters():
            cases.refill(parameter.data, self.generator)
        self.put_state(how)

    def put_state(self, how: str) -> None:
        """Gives the solution the reference's parameters."""
        values = list(self.reference.state_dict().values())
        self.remote.put(*values)
        shapes = [list(value.shape) for value in values]
        dtype = _name(self.dtype)
        self.remote.ask("state", names=self.state, shapes=shapes, dtype=dtype, how=how)

    def check_headline(self) -> None:
        self.progress("constructing")
        self.construct(*self.task.problem.get_init_inputs())
        self.check_whole(f"{list(self.task.shape)}, x in 0..1", True)
        seed = random.randrange(SEEDS)
        self.remote.ask("fill_state", seed=seed, names=self.state, scale=self.scale)
        for turn, parameter in enumerate(self.reference.state_dict().values()):
            cases.draw_rows(parameter, seed + (turn << 32)).mul_(self.scale)
        self.check_whole(f"{list(self.task.shape)}, x in -1..1", False)
        self.verdict.accuracy = self._grade(self.worst)

    def mismatch(self, output: torch.Tensor, x: torch.Tensor, whole: bool = False) -> str | None:
        compared = self._compare(output, x)
        if whole:
            self.worst = max(self.worst, compared.solution.relative)
        if compared.solution.beyond and (problem := compared.problem()):
            return problem
        if whole and (grade := self._grade(self.worst)) in GRADES:
            return f"{grade}: relative error {self.worst:.2g}"
        return None

    def _compare(self, output: torch.Tensor, x: torch.Tensor) -> Comparison:
        k = x.shape[-1]
        allowance = Allowance.of(x.dtype, precision(), k).times(linear.TIMED)
        if x.dtype == torch.float32:
            # A plain sum of K terms: its errors add up as random signs do, six standard
            # deviations of them.
            allowance = Allowance(0.0, (4 + 8 * math.sqrt(k)) * U32, allowance.smallest)
        return compare_output("", output, self.expected(x), x, self.reference, allowance)

    def _grade(self, relative: float) -> str:
        """The accuracy class of errors at the timed size."""
        if self.dtype != torch.float32:
            return f"{_name(self.dtype)}-grade"
        k = self.reference.linear.in_features
        if relative <= (4 + math.sqrt(k)) * U32:
            return "float32-grade"
        return next((name for name, most in GRADES.items() if relative <= most), "worse than bf16")

    def guesses(self, x: torch.Tensor) -> dict[str, tuple[str, torch.Tensor]]:
        module = self.reference
        with torch.no_grad():
            z, divisor = module.linear(x), module.divisor
            product = x @ module.linear.weight.T
            found = {
                "returns zeros": (CHEATING, torch.zeros_like(z)),
                "leaves out the bias": (CHEATING, torch.relu(product) / divisor),
                "leaves out the division": (WRONG, torch.relu(z)),
                "leaves out ReLU": (WRONG, z / divisor),
            }
            for what, stale in self.stale.items():
                found[f"answers with {what}"] = (CHEATING, stale(x))
        return found

    def agrees(self, output: torch.Tensor, guess: torch.Tensor) -> bool:
        scale = guess.abs().max().item()
        return (output - guess).abs().max().item() <= 1e-3 * scale

    def _diagnose(
        self,
        name: str,
        output: torch.Tensor,
        expected: torch.Tensor,
        x: torch.Tensor,
        bait: list | None,
        problem: str,
    ) -> tuple[str, str]:
        word, reason = super()._diagnose(name, output, expected, x, bait, problem)
        is_float32 = word == WRONG and self.dtype == torch.float32
        if is_float32 and self._compare(output, x).solution.scaled <= LOWER:
            return WRONG, f"lower precision than float32: {reason}"
        return word, reason

    def columns(self) -> int | None:
        return self.output_shape[1]

    def alter_reference(self, column: int | None, seed: int) -> None:
        weight = self.reference.linear.weight.data
        cases.draw_rows(weight[column : column + 1], seed + 1).mul_(self.scale)

    def work(self) -> int:
        return 2 * math.prod(self.task.shape) * self.output_shape[1]

    def fastest(self, timings: Timings) -> float:
        return linear.fastest_product(timings)

    def _draw(self, *shape: int) -> torch.Tensor:
        return cases.random(shape, self.dtype, self.device, self.generator)

    def _copy(self) -> nn.Module:
        return copy.deepcopy(self.reference)


def first_error_line(text: str) -> str:
    """The first error of a compiler in a message, else its first line; printable, and short."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    line = next((line for line in lines if COMPILER_ERROR.search(line)), lines[0])
    line = re.sub(r"(?<![\w.])/(?:[^\s/:()'\"]+/)+", "", line)  # folders
    return "".join(c if c.isprintable() else "?" for c in line)[:LONGEST_LINE]


def _raised(raised: RaisedError, stage: str) -> tuple[str, str]:
    """The verdict on an exception, in a stage of the grading."""
    about = raised.args[0]
    name, text, line = (about.get(key) for key in ("type", "text", "line"))
    if about.get("exits"):
        return CHEATING, f"exits with status 0 while {stage}"
    where = f", line {line}" if isinstance(line, int) else ""
    return ERROR, f"{first_error_line(f'{name}')}: {first_error_line(str(text))}{where}"


def _ended(status: int, stage: str, printed: str) -> tuple[str, str]:
    """The verdict on a process that is gone."""
    if status == 0:
        return CHEATING, f"exits with status 0 while {stage}"
    last = [line for line in printed.splitlines() if line.strip()][-1:]
    said = f": {first_error_line(last[0])}" if last else ""
    if status > 0:
        return ERROR, f"exits with status {status} while {stage}{said}"
    name = signal.Signals(-status).name
    reason = "killed, as for want of memory," if name == "SIGKILL" else f"crashes ({name})"
    return ERROR, f"{reason} while {stage}{said}"


def _wrong_clock(hidden: dict[str, list[float]], timings: Timings) -> str | None:
    """Whether calls of the solution last longer by this process's clock than by the child's.

    What messages take is in either. A busy machine delays many of them, but not three in four: the
    lower quartile is compared with the upper one of eager's.
    """
    names = timings.names
    if len(timings.seconds[names.solution]) < LEAST_JUDGED:
        return None
    ours, *_ = quantiles(hidden[names.solution], n=4, method="inclusive")
    *_, usual = quantiles(hidden[names.eager] + hidden[names.again], n=4, method="inclusive")
    typical = median(timings.seconds[names.solution])
    beyond = ours - usual
    if beyond <= 4 * GRAIN + UNSEEN * typical:
        return None
    return (
        f"takes {typical * 1e3:.3f} ms by its process's clock, and {beyond * 1e3:.3f} ms more by "
        "the referee's: a changed timer, or work outside the timed call"
    )


def _ring(task: Task, slots: int, seed: int, unit: bool) -> dict[str, object]:
    """The arguments of `worker.Worker.fill`."""
    shape, dtype = list(task.shape), _name(task.dtype)
    return {"slots": slots, "shape": shape, "dtype": dtype, "seed": seed, "unit": unit}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
