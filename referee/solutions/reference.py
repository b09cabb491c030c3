"""Files that stand in for the `Model` of a reference file."""

import math
import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from referee import cases, relu
from referee.child.inputs import ALIGNMENT
from referee.compare import first_mismatch
from referee.error_line import LONGEST_LINE
from referee.remote import HALF, RaisedError, dtype_name, pack
from referee.solutions.backward import Backward, Contestant
from referee.solutions.baselines import Asked
from referee.solutions.budget import WORST, Found, Output, grade
from referee.solutions.feeding import Renewal, fill_ring, name_source, pieces, send
from referee.solutions.judge import LATENESS, SEEDS, Turn
from referee.solutions.oracle import DIFFERENT, PARTS, SIGNS, difference, parameters_of
from referee.solutions.verdict import CHEATING, WRONG, FoundError, Task, of_exception
from referee.timing import Names, Rate, Timings

LOOKED_AT = 1 << 12  # elements of each output and input, after a timed call
DIFFERS = "differs from the reference"
LARGEST_KEPT = 1 << 28  # bytes of a result that is compared with later ones


class Reference(Backward):
    """Within an error budget, relative to eager's errors."""

    worker = "inputs"
    names = Names(solution="ModelNew", eager="eager")
    # A solution need not read all of its inputs, but it writes its outputs.
    rate = Rate(
        unit="GB/s",
        scale=1e9,
        digits=1,
        work="bytes",
        yardstick=relu.COPY,
        floor="writing its outputs as fast as a copy",
        margin=relu.RATE.margin,
    )

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.oracle = self.task.oracle
        self.library = self.oracle.ops, True
        self.relative, self.equal = 0.0, True
        self.stale: nn.Module | None = None
        self.earlier: list[torch.Tensor] = []
        self.budgets: list[Output] = []
        self.turns, self.latest = 0, None
        self.parameters: list[tuple[str, int]] = []  # the solution's, that change
        self.base: dict[str, torch.Tensor] = {}  # the reference's, of which others are made

    def prepare_import(self) -> None:
        name_source(Asked(self.remote.ask, self.remote.put), self.task)

    def check_small(self) -> None:
        oracle = self.oracle
        self.progress("constructing")
        seed, args = random.randrange(SEEDS), pack(oracle.args)
        state = self.remote.ask("new", args=args, seed=seed, dtype=None)["state"]
        self.module = oracle.construct(seed)
        names = self._matching(state, self.module.state_dict())
        self.remote.ask("allocate", slots=1, inputs=oracle.specs)
        self._feed(oracle.inputs(0))
        self._check("as constructed", bait=True)
        if any(True for _ in self.module.parameters()):
            if names is None:
                self.verdict.notes.append(
                    "its state is not the reference's: none was loaded or changed"
                )
            else:
                self._load(names)
                self._check("a state loaded")
                self._overwrite()
                self._check("parameters overwritten")
        for draw in range(1, len(oracle.draws)):
            self._feed(oracle.inputs(draw))
            self._check(f"seed {draw + 1}, at the same address", fill=draw > 1)

    def check_headline(self) -> None:
        """Inputs that `get_inputs` would not draw: an honest file may rely on what it draws.

        A look at some elements does not tell those that are altered in part from others. Of both
        signs, ReLU is no identity, and rounding errors do not cancel.
        """
        for name in (PARTS, SIGNS):
            if self.oracle.floats and (inputs := self._unlike(name)):
                self._feed(self.oracle.there(inputs))
                self._check(name)
        if self.oracle.trivial is None:
            self.oracle.trivial = self.oracle.find_trivial()
        self.verdict.notes += self.oracle.trivial
        self.verdict.accuracy = "exact" if self.equal else grade(self.relative)
        if self.oracle.note:
            self.verdict.notes.append(self.oracle.note)
        self.check_backward()
        self.earlier, self.inputs, self.stale = [], [], None
        self.release()

    def _unlike(self, name: str) -> list | None:
        """Such inputs, for which eager gives finite results.

        Its process is asked, which an assertion on the device may end.
        """
        oracle = self.oracle
        if name not in oracle.unlike:
            inputs, oracle.unlike[name] = oracle.make_unlike(name), None
            self.release()
            self.spared |= self.baselines.start()
            ask = partial(self.baselines.ask, False)
            asked = Asked(ask, partial(self.baselines.put, False))
            try:
                send(asked, 0, inputs)
                if ask("probe", slot=0)["finite"] is True:
                    oracle.unlike[name] = inputs
                send(asked, 0, oracle.inputs(0))
            except FoundError:  # the baselines start again when they are needed
                pass
        return oracle.unlike[name]

    def _feed(self, inputs: list) -> None:
        """The inputs of the next forward, of the solution and of the reference."""
        self.inputs = inputs
        send(Asked(self.remote.ask, self.remote.put), 0, inputs)

    def _load(self, names: list[str]) -> None:
        """Other parameters, for both; `parameters` and `base` are those that can change again."""
        self.stale, self.module = self.module, self.oracle.copy(self.module)
        own = parameters_of(self.module)
        self.base = {name: self.module.state_dict()[name].clone() for name, _ in own}
        self._redraw(random.randrange(SEEDS))
        values = self.module.state_dict()
        theirs = dict(zip(values, names, strict=True))
        self.parameters = [(theirs[name], turn) for name, turn in own]
        self.base = {name: values[name].clone() for name, _ in own}
        dense = [torch.empty_like(v, device="cpu").copy_(v) for v in values.values()]
        send(Asked(self.remote.ask, self.remote.put), None, dense)
        self.remote.ask("load_state", names=names)

    def _overwrite(self) -> None:
        """Other parameters, for both, and the same inputs."""
        renewal = Renewal(self.oracle, self.parameters, inputs=False)
        renewal.give(Asked(self.remote.ask, self.remote.put), 0, is_timed=False)
        self.stale = self.oracle.copy(self.module)
        self._redraw(renewal.seed)

    def _redraw(self, seed: int) -> None:
        """The reference's parameters, as `InputsWorker.renew` does the solution's."""
        values = self.module.state_dict()
        for name, turn in parameters_of(self.module) if self.base else ():
            values[name].copy_(cases.redraw(self.base[name], seed + turn))

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
            same = (n for n, shape in left.items() if shape == list(value.shape))
            found = next((n for n in same if math.isclose(sums[n], want, abs_tol=1e-9)), None)
            if found is None:
                return None
            names.append(found)
            del left[found]
        return names

    def _check(self, name: str, bait: bool = False, fill: bool = False) -> None:
        """One forward: forms and values, fresh memory, inputs that stay as they are."""
        self.progress("checking", name)
        self.verdict.count += 1
        oracle = self.oracle
        expected = oracle.expected(self.module, self.inputs)
        first = expected[0]
        there = [first.shape, dtype_name(first.dtype), random.randrange(SEEDS)]
        there = there if bait and first.dtype.is_floating_point and first.shape else None
        try:
            reply = self.remote.ask("forward", bait=there, size=oracle.output_bytes, fill=fill)
        except RaisedError as raised:
            is_like = name not in (SIGNS, PARTS)
            if is_like or of_exception(raised, name)[0] == CHEATING:
                raise
            self.verdict.notes.append(f"refuses {SIGNS}")
            return
        self._check_forms(name, reply, expected)
        self._check_inputs(name)
        for turn, output in enumerate(expected):
            found = output.compare(self._pieces(turn, output))
            if found.problem:
                if name in (SIGNS, PARTS) and self._is_other(turn, output, found, name):
                    self.verdict.notes.append(f"{DIFFERS} for {name}")
                    return
                raise FoundError(*self._diagnose(name, turn, output, found, there))
            self.relative = max(self.relative, found.relative)
            self.equal = self.equal and found.equal
        if oracle.output_bytes <= LARGEST_KEPT:
            self.earlier.append(self._whole(0, first).cpu())
        if name not in (SIGNS, PARTS):  # the timed inputs are like these
            self.budgets = expected
        for output in expected:
            output.forget()

    def _check_forms(self, name: str, reply: dict, expected: list[Output]) -> None:
        structure, facts = reply["structure"], reply["outputs"]
        for turn, (fact, output) in enumerate(zip(facts, expected, strict=False)):
            want = {
                "dtype": dtype_name(output.dtype),
                "device": str(self.device),
                "shape": output.shape,
            }
            what = f"{name}, output {turn}: " if len(expected) > 1 else f"{name}: "
            self.check_form(fact, want, what)
            if fact["shares_input"] is not False and not self.oracle.shares:
                raise FoundError(CHEATING, f"returns its input, not new memory: {name}")
            if fact["shares_earlier"] and not self.oracle.shares:
                raise FoundError(WRONG, f"two outputs share memory: {name}")
        if structure != self.oracle.structure or len(facts) != len(expected):
            got = str(structure)[:50]
            reason = f"{name}: returns {got}, expected {self.oracle.structure}, * being a tensor"
            raise FoundError(WRONG, reason)

    def _check_inputs(self, name: str) -> None:
        for i in self.oracle.tensors:
            for start, mine in pieces(self.inputs[i], HALF):
                stop = start + len(mine)
                self.remote.ask("read_input", slot=0, index=i, start=start, stop=stop)
                after = self.take(0, [len(mine)], torch.uint8)
                if not torch.equal(after, mine):
                    raise FoundError(CHEATING, f"changes its input: {name}")

    def _pieces(self, turn: int, output: Output) -> Iterator[tuple[int, torch.Tensor]]:
        """An output of the solution, in flat pieces."""
        total, step = output.eager.numel(), HALF // output.dtype.itemsize
        for start in range(0, total, step):
            stop = min(start + step, total)
            self.remote.ask("read", output=turn, start=start, stop=stop)
            yield start, self.take(0, [stop - start], output.dtype)

    def _whole(self, turn: int, output: Output) -> torch.Tensor:
        found = [piece for _, piece in self._pieces(turn, output)]
        return torch.cat(found) if found else output.eager

    def _is_other(self, turn: int, output: Output, found: Found, name: str) -> bool:
        """Whether it is another function there, as an honest file may be, and not a known cheat."""
        got = self._whole(turn, output)
        replays = not turn and any(torch.equal(got.cpu(), earlier) for earlier in self.earlier)
        return found.gross and not replays and not self._cheat(got, output)

    def _diagnose(
        self, name: str, turn: int, output: Output, found: Found, bait: list | None
    ) -> tuple[str, str]:
        """The verdict on a wrong result."""
        got = self._whole(turn, output)
        if bait and not turn:
            drawn = torch.empty(output.shape, dtype=output.dtype, device=self.device)
            if torch.equal(got, cases.draw_rows(drawn, bait[2], unit=True).view(-1)):
                return CHEATING, f"takes a tensor of the referee's for its result: {name}"
        self.remote.ask("wait", seconds=LATENESS)
        is_late = output.compare([(0, got)]).problem is None
        if is_late or first_mismatch(self._whole(turn, output), got, exact=True):
            return CHEATING, f"background work: writes its result after the call returned: {name}"
        if output.dtype.is_floating_point:
            unwritten = (got.isnan() & ~output.eager.isnan()).double().mean().item()
            if unwritten > 0.5:
                return WRONG, f"returns memory that it has not written: {name}"
        if cheat := self._cheat(got, output):
            return CHEATING, f"{cheat}: {name}"
        if not turn and any(torch.equal(got.cpu(), earlier) for earlier in self.earlier):
            return CHEATING, f"replays the result of an earlier call: {name}"
        reached = grade(found.relative)
        if output.dtype == torch.float32 and reached != WORST:
            return WRONG, f"lower precision than eager's ({reached}): {name}: {found.problem}"
        return WRONG, f"{name}: {found.problem}"

    def _cheat(self, got: torch.Tensor, output: Output) -> str:
        """The cheat that gives this result."""
        guesses = {"returns zeros": torch.zeros_like(output.eager)}
        for i in self.oracle.tensors:
            guesses[f"returns a copy of its input {i}"] = self.inputs[i].reshape(-1)
        for what, guess in guesses.items():
            same = guess.shape == got.shape and guess.dtype == got.dtype and len(got) > 1
            if same and (torch.equal(got, guess) or _is_near(got, guess)):
                return what
        if self.stale is not None:
            results = self.oracle.run(self.stale, self.inputs)
            olds = [Output(result, None) for result in results]
            same = [old for old in olds if old.shape == output.shape and old.dtype == got.dtype]
            if any(old.compare([(0, got)]).problem is None for old in same):
                return "answers with old parameters"
        return ""

    @staticmethod
    def prepare_eager(task: Task, eager: Asked, again: bool) -> list[str]:
        """Gives a process of eager parameters, inputs and yardsticks, whose names it returns."""
        oracle = task.oracle
        name_source(eager, task)
        args, seed = pack(oracle.args), random.randrange(SEEDS)
        eager.ask("new", args=args, seed=seed, dtype=None)
        eager.ask("load_state", names=[name for name, _ in oracle.parameters])
        fill_ring(eager, task)
        if oracle.repeats is None and (digest := oracle.digest(seed)):
            about = {"slot": 0, "names": [], "seed": 0, "at": 0.0, "is_timed": False}
            eager.ask("renew", draw=seed, **about)
            oracle.repeats = eager.ask("digest", slot=0)["sums"] == digest
        copied = 0 if again else max(1, (oracle.input_bytes + oracle.output_bytes) // 2)
        return eager.ask("prepare", copied=copied)["names"]

    def prepare_timing(self) -> None:
        fill_ring(Asked(self.remote.ask, self.remote.put), self.task)
        self.remote.ask("prepare", copied=0)

    def turn(self, name: str, call: str) -> Turn:
        is_solution = name == self.names.solution
        self.turns += is_solution
        slot = self.turns % self.oracle.slots
        (ask, put, take), renewal = self._renew(name, slot)
        sample, hidden = self.timed(name, slot=slot, call=call)
        if call != "module":
            return Turn(sample, hidden, lambda: None)
        if is_solution:
            self._redraw(renewal.seed)
        # The same is done after a call of eager, that the caches are the same for all.
        problem = self._look(ask, put, take, slot, (self.latest or renewal).inputs())
        return Turn(sample, hidden, lambda: problem)

    def _renew(self, name: str, slot: int) -> tuple[tuple[Callable, ...], Renewal]:
        """Gives a contestant new values; `ask`, `put` and `take` of its process."""
        process, parameters = (self.remote.ask, self.remote.put, self.remote.take), self.parameters
        if name != self.names.solution:
            eager, again = self.baselines, name == self.names.again
            process = tuple(partial(f, again) for f in (eager.ask, eager.put, eager.take))
            parameters = self.oracle.parameters
        renewal = Renewal(self.oracle, parameters, inputs=True)
        if name == self.names.solution:
            self.latest = renewal
        renewal.give(Asked(*process[:2]), slot, is_timed=True)
        return process, renewal

    def turn_again(self) -> list[Turn]:
        """With other parameters alone: some inputs must not change in part."""
        if not self.parameters:
            return []
        slot, renewal = self.turns % self.oracle.slots, Renewal(self.oracle, self.parameters, False)
        remote = self.remote
        renewal.give(Asked(remote.ask, remote.put), slot, is_timed=True)
        turn = self.timed(self.names.solution, slot=slot, call="module")
        self._redraw(renewal.seed)
        problem = self._look(remote.ask, remote.put, remote.take, slot, self.latest.inputs())
        return [Turn(*turn, lambda: problem)]

    def _look(
        self, ask: Callable, put: Callable, take: Callable, slot: int, inputs: list
    ) -> str | None:
        """The fault of random elements of the timed call's outputs, or of its inputs, in words."""
        tensors, eager = self.oracle.tensors, self.oracle.run(self.module, inputs)
        kept = [inputs[i].as_strided((inputs[i].numel(),), (1,)) for i in tensors]
        flats = [x.contiguous().view(-1) for x in eager] + kept
        places = [torch.randint(max(len(f), 1), (LOOKED_AT,), dtype=torch.int64) for f in flats]
        put(*places)
        counts = {"outputs": len(eager), "inputs": tensors, "count": LOOKED_AT}
        counts["keep"] = self.oracle.shares
        reply = ask("pick", slot=slot, **counts)
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
            got = self.take(start, [len(some)], flat.dtype, take)
            start += -(-got.numel() * got.element_size() // ALIGNMENT) * ALIGNMENT
            some = some.to(self.device)
            if turn >= len(eager):
                if first_mismatch(got, flat[some], exact=True):
                    return "changes its input in timed calls"
            elif problem := self.budgets[turn].compare_some(got, flat[some]):
                return f"a timed call was wrong: {problem}"
        return None

    def fresh(self, turn: int) -> tuple[int | None, nn.Module, list]:
        self._feed(self.oracle.inputs(turn))
        return 0, self.module, self.inputs

    def relies_on_inputs(self) -> bool:
        is_known = any(note.startswith(DIFFERS) for note in self.verdict.notes)
        return is_known or not any(self.oracle.unlike.values())

    def operands(self) -> dict[str, str]:
        theirs = (name for name, _ in self.parameters)
        own = (name for name, _ in parameters_of(self.module))
        return dict(zip(own, theirs, strict=False))

    def has_float64(self) -> bool:
        return not self.oracle.note

    def renew_step(self, name: str) -> Contestant:
        process, _ = self._renew(name, 0)
        names = self.operands()
        chosen = names.values() if name == self.names.solution else names.keys()
        return Contestant(*process, list(chosen), 0)

    def step_inputs(self) -> tuple[nn.Module, list]:
        self._redraw(self.latest.seed)  # not before the step: it would have the caches
        return self.module, self.latest.inputs()

    def work(self) -> int:
        return self.oracle.input_bytes + self.oracle.output_bytes

    def fastest(self, timings: Timings) -> float:
        return relu.fastest_copy(timings) * self.oracle.output_bytes / self.work()


def _is_near(got: torch.Tensor, guess: torch.Tensor) -> bool:
    """Whether it is this with other roundings; zeros are near to zeros alone."""
    is_float = got.dtype.is_floating_point and bool(guess.count_nonzero())
    return is_float and difference(got, guess) <= DIFFERENT
