"""Asks a solution for results, compares them with the reference's, and says what is wrong."""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from time import sleep

import torch
from torch import nn

from referee import cases
from referee.cases import dtype_name
from referee.compare import first_mismatch
from referee.judge.baselines import Baselines
from referee.judge.budget import WORST, Found, Output, grade
from referee.judge.feeding import Renewal, holds, send
from referee.judge.oracle import DIFFERENT, SEEDS, difference, form_of, parameters_of
from referee.judge.verdict import CHEATING, WRONG, FoundError, Task, Verdict, of_exception
from referee.reference_file import LONGEST_LINE
from referee.remote import HALF, RaisedError, Remote, pack

LATENESS = 0.2  # s, after which what a thread still had to write is there
LARGEST_KEPT = 1 << 26  # bytes of a result that is compared with later ones, and of a bait
MOST_KEPT = 32  # such results
DIFFERS = "differs from the reference"


class Checks:
    """Construction, parameters, and one forward after the other."""

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
        self.baselines, self.spared, self.oracle = baselines, spared, task.oracle
        self.device, self.dtype = self.oracle.device, self.oracle.dtype
        self.seed = random.randrange(SEEDS)  # new in every run
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        is_ours = self.oracle.file.is_ours and self.dtype.is_floating_point
        self.parameter_dtype = dtype_name(self.dtype) if is_ours else ""  # "": the modules' own
        self.inputs: list = []
        self.relative, self.equal = 0.0, True
        self.earlier: deque[torch.Tensor] = deque(maxlen=MOST_KEPT)
        self.budgets: list[Output] = []  # of the last results

    def expected(self, inputs: list) -> list[Output]:
        """The reference's results, and what a solution's may be."""
        return self.oracle.expected(self.module, inputs)

    def guesses(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Wrong first results that tell what was done: the verdict's word and the result."""
        return {}

    def draw(self, *shape: int) -> torch.Tensor:
        """An input of this shape."""
        return cases.random(shape, self.dtype, self.device, self.generator)

    def construct(self, args: list | None = None) -> list[str] | None:
        """Both modules, under one seed; the solution's names for the reference's state, if any."""
        self.progress("checking", "construction")
        args, seed = self.oracle.args if args is None else args, random.randrange(SEEDS)
        about = {"args": pack(args), "seed": seed, "dtype": self.parameter_dtype}
        state = self.remote.ask("new", **about)["state"]
        self.module = self.oracle.construct(seed, args)
        self.stale: dict[str, nn.Module] = {}  # with other parameters, by what these are
        self.parameters: list[tuple[str, int]] = []  # the solution's, as of `parameters_of`
        self.base: dict[str, torch.Tensor] = {}  # the reference's, of which others are made
        return self._matching(state, self.module.state_dict())

    def _matching(self, state: list, values: dict[str, torch.Tensor]) -> list[str] | None:
        """The solution's names for the reference's state, beside which it may have more; or None.

        Other names are told by shapes and by what was drawn under the one seed.
        """
        left = {str(name): list(shape) for name, shape in state}
        if left == {name: list(value.shape) for name, value in values.items()}:
            return list(values)
        sums = dict(zip(left, self.remote.ask("sums")["sums"], strict=True))
        names = []
        for value in values.values():
            want = value.double().sum().item()
            same = (n for n in left if left[n] == list(value.shape))
            found = next((n for n in same if math.isclose(sums[n], want, abs_tol=1e-9)), None)
            if found is None:
                return None
            names.append(found)
            del left[found]
        return names

    def load(self, names: list[str], values: list[torch.Tensor] | None = None) -> None:
        """Other parameters, that can change again, for both: these, or made of their own."""
        self.stale["old parameters"] = self.oracle.copy(self.module)
        own, there = parameters_of(self.module), self.module.state_dict()
        if values is None:
            self.base = {name: there[name].clone() for name, _ in own}
            self.redraw(random.randrange(SEEDS))
        for name, value in zip(there, values or [], strict=False):
            there[name].copy_(value)
        theirs = dict(zip(there, names, strict=True))
        self.parameters = [(theirs[name], turn) for name, turn in own]
        self.base = {name: there[name].clone() for name, _ in own}
        dense = [torch.empty_like(v, device="cpu").copy_(v) for v in there.values()]
        send(self.remote, None, dense)
        self.remote.ask("load_state", names=names)

    def overwrite(self) -> None:
        """Other parameters, for both, that no version tells of, and the same inputs."""
        renewal = Renewal(self.oracle, self.parameters, inputs=False)
        renewal.give(self.remote, 0, is_timed=False)
        self.stale["old parameters"] = self.oracle.copy(self.module)
        self.redraw(renewal.seed)

    def redraw(self, seed: int) -> None:
        """The reference's parameters, as `Feed.renew` does the solution's."""
        values = self.module.state_dict()
        for name, turn in parameters_of(self.module) if self.base else ():
            values[name].copy_(cases.redraw(self.base[name], seed + turn))

    def feed(self, inputs: list, again: bool = False) -> None:
        """The inputs of the next forward, at the same address if `again`."""
        self.inputs = inputs
        if not again:
            self.remote.ask("allocate", slots=1, inputs=pack(form_of(inputs)))
        send(self.remote, 0, inputs)

    def check(
        self,
        name: str,
        inputs: list | None = None,
        required: bool = True,
        again: bool = False,
        fill: bool = False,
        may_differ: bool = False,
    ) -> Found | None:
        """One forward: forms and values, fresh memory, inputs that stay as they are.

        Args:
            inputs: None for those that are there.
            required: the solution must take them.
            again: at the same address as those before.
            fill: while torch fills new memory.
            may_differ: the solution may be another function here.

        Returns:
            What is found of the first result; None of inputs that are refused.
        """
        self.progress("checking", name)
        self.verdict.count += 1
        if inputs is not None:
            self.feed(inputs, again)
        expected = self.expected(self.inputs)
        first = expected[0]
        size = sum(x.numel * x.dtype.itemsize for x in expected)
        is_small, bait = size <= LARGEST_KEPT, None
        if required and is_small and first.dtype.is_floating_point and first.shape and first.numel:
            bait = [first.shape, dtype_name(first.dtype), random.randrange(SEEDS)]
        try:
            reply = self.remote.ask("forward", bait=bait, size=size, fill=fill)
        except RaisedError as raised:
            self.refuse(name, raised, required)
            return None
        self._check_forms(name, reply, expected)
        if reply["moved"] is not False or not holds(self.remote, self.inputs):
            raise FoundError(CHEATING, f"changes its input: {name}")
        results = []
        for turn, output in enumerate(expected):
            results.append(found := output.compare(self.read(turn, output)))
            if found.problem:
                got = self._whole(turn, output)
                if may_differ and found.gross and not self._cheat(turn, output, got):
                    self.verdict.notes.append(f"{DIFFERS} for {name}")
                    return found
                raise FoundError(*self._diagnose(name, turn, output, found, bait))
            self.relative = max(self.relative, found.relative)
            self.equal = self.equal and found.equal
        if is_small and first.numel > 1:
            self.earlier.append(self._whole(0, first).cpu())
        if not may_differ:  # the timed inputs are like these
            self.budgets = expected
        for output in expected:
            output.forget()
        return results[0]

    def refuse(self, name: str, raised: RaisedError, required: bool) -> None:
        """Not all kinds of inputs need be taken."""
        is_crash = "CUDA error" in str(raised.args[0].get("text"))
        if required or is_crash or of_exception(raised, name)[0] == CHEATING:
            raise raised
        kind = name.partition(",")[0]
        if kind not in self.verdict.refused:
            self.verdict.refused.append(kind)

    def check_form(self, fact: dict, want: Output, prefix: str) -> None:
        """What a result says of itself; the order of its dimensions in memory is free."""
        kind = str(fact.get("type"))[:100]
        if fault := fact.get("fault"):
            raise FoundError(CHEATING, str(fault)[:LONGEST_LINE])
        if kind not in ("Tensor", "Parameter") or "dtype" not in fact:
            raise FoundError(WRONG, f"{prefix}returns a {kind}, not a plain tensor")
        form = {"dtype": dtype_name(want.dtype), "device": str(self.device), "shape": want.shape}
        for name, right in form.items():
            if (got := fact.get(name)) != right:
                got = str(got)[:LONGEST_LINE]
                raise FoundError(WRONG, f"{prefix}the output's {name} is {got}, expected {right}")

    def _check_forms(self, name: str, reply: dict, expected: list[Output]) -> None:
        structure, facts = reply["structure"], reply["results"]
        if fault := next((fact["fault"] for fact in facts if fact.get("fault")), ""):
            raise FoundError(CHEATING, str(fault)[:LONGEST_LINE])
        if structure != self.oracle.structure or len(facts) != len(expected):
            got = str(structure)[:50]
            reason = f"{name}: returns {got}, expected {self.oracle.structure}, * being a tensor"
            raise FoundError(WRONG, reason)
        for turn, (fact, output) in enumerate(zip(facts, expected, strict=True)):
            what = f"{name}, output {turn}: " if len(expected) > 1 else f"{name}: "
            self.check_form(fact, output, what)
            if fact["shares_input"] is not False and not self.oracle.shares:
                raise FoundError(CHEATING, f"returns its input, not new memory: {name}")
            if fact["shares_earlier"] and not self.oracle.shares:
                raise FoundError(WRONG, f"two outputs share memory: {name}")

    def read(self, turn: int, want: Output) -> Iterator[tuple[int, torch.Tensor]]:
        """A result of the solution, or a gradient, in flat pieces."""
        step = HALF // want.dtype.itemsize
        for start in range(0, want.numel, step):
            stop = min(start + step, want.numel)
            self.remote.ask("read", index=turn, start=start, stop=stop)
            yield start, self.remote.take(0, [stop - start], want.dtype)

    def _whole(self, turn: int, want: Output) -> torch.Tensor:
        found = [piece for _, piece in self.read(turn, want)]
        return torch.cat(found) if found else want.eager

    def _diagnose(
        self, name: str, turn: int, output: Output, found: Found, bait: list | None
    ) -> tuple[str, str]:
        """The verdict on a wrong result."""
        got = self._whole(turn, output)
        if bait and not turn:
            drawn = torch.empty(output.shape, dtype=output.dtype, device=self.device)
            if torch.equal(got, cases.draw(drawn, bait[2], unit=True).view(-1)):
                return CHEATING, f"takes a tensor of the referee's for its result: {name}"
        sleep(LATENESS)
        is_late = output.compare([(0, got)]).problem is None
        if is_late or first_mismatch(self._whole(turn, output), got, exact=True):
            return CHEATING, f"background work: writes its result after the call returned: {name}"
        if output.dtype.is_floating_point:
            filled = got
            if not got.count_nonzero():  # zeros are also what memory from the system holds
                self.remote.ask("forward", bait=None, size=0, fill=True)
                filled = self._whole(turn, output)
            unwritten = (filled.isnan() & ~output.eager.isnan()).double().mean().item()
            if unwritten > 0.5:
                return WRONG, f"returns memory that it has not written: {name}"
        if cheat := self._cheat(turn, output, got):
            return cheat[0], f"{cheat[1]}: {name}"
        reached = grade(found.relative)
        if output.dtype == torch.float32 and not found.gross and reached != WORST:
            reason = f"lower precision than eager's ({reached}): {name}: {found.problem}"
            return WRONG, reason
        return WRONG, f"{name}: {found.problem}"

    def _cheat(self, turn: int, output: Output, got: torch.Tensor) -> tuple[str, str] | None:
        """What gives this wrong result: the verdict's word, and in words."""
        guesses = {"returns zeros": (CHEATING, torch.zeros_like(output.eager))}
        for i in self.oracle.tensors:
            guesses[f"returns a copy of its input {i}"] = CHEATING, self.inputs[i]
        guesses |= {} if turn else self.guesses()
        for what, module in self.stale.items():
            old = self.oracle.run(module, self.inputs)[turn]
            guesses[f"answers with {what}"] = CHEATING, old
        for what, (word, guess) in guesses.items():
            guess = guess.reshape(-1)
            same = guess.shape == got.shape and guess.dtype == got.dtype and len(got) > 1
            if not same or _is_near(guess, output.eager):
                continue
            if torch.equal(got, guess) or _is_near(got, guess):
                return word, what
        like = [old for old in self.earlier if (old.dtype, old.shape) == (got.dtype, got.shape)]
        if not turn and any(torch.equal(got.cpu(), old) for old in like):
            return CHEATING, "replays the result of an earlier call"
        return None


def _is_near(got: torch.Tensor, guess: torch.Tensor) -> bool:
    """Whether it is this with other roundings; zeros are near to zeros alone."""
    if not (got.dtype.is_floating_point and bool(guess.count_nonzero())):
        return torch.equal(got, guess)
    return difference(got, guess) <= DIFFERENT
