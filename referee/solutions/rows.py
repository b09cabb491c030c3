"""Problems of one input and one output, a row of which is a function of the input's row.

Inputs are drawn row by row from seeds, in this process and in the solution's.
"""

import itertools
import math
import random
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from referee import cases
from referee.child.rows import SHIFT, draw_state
from referee.compare import first_mismatch
from referee.error_line import LONGEST_LINE
from referee.memory import RING
from referee.remote import HALF, RaisedError, dtype_name, pack
from referee.solutions.backward import Backward, Contestant
from referee.solutions.baselines import Asked
from referee.solutions.judge import LATENESS, SEEDS, Turn
from referee.solutions.verdict import CHEATING, WRONG, FoundError, Task, of_exception

# Random rows that are looked at after a timed call.
SUSPECTS = {"relu": 2, "linear_relu_divide": 13}
# By which a solution may fall back on the reference's own ReLU.
LIBRARY = ["aten::relu", "aten::relu_", "aten::clamp", "aten::clamp_min", "aten::threshold"]
YARDSTICKS = {"relu": "copy", "linear_relu_divide": "product"}


class Rows(Backward):
    """One forward after the other, and what a wrong one tells."""

    worker = "rows"
    library = LIBRARY, False
    output_shape: tuple[int, int]
    scale = 1.0

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.dtype = self.task.dtype
        self.earlier: dict[tuple, torch.Tensor] = {}
        self.reference: nn.Module
        self.state: list[str] = []  # the names of the solution's parameters

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """The reference's result."""
        with torch.no_grad():
            return self.reference(x)

    def mismatch(self, output: torch.Tensor, x: torch.Tensor, whole: bool = False) -> str | None:
        """The fault of the values for x, in words.

        Args:
            whole: it is of the timed size, whose accuracy has a class.
        """
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
            "dtype": dtype_name(x.dtype),
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
            "dtype": dtype_name(expected.dtype),
            "device": str(expected.device),
            "shape": list(expected.shape),
        }
        self.check_form(reply, facts, f"{name}: ")
        output = self.take(0, list(expected.shape), expected.dtype)
        after = self.take(reply["bytes"], [len(flat)], torch.uint8)
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
        _, line = of_exception(raised, name)
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
                return WRONG, f"returns memory that it has not written: {name}"
            if unwritten:
                problem = f"memory that was not written, or NaN; {problem}"
        earlier = self.earlier.get(tuple(output.shape))
        if earlier is not None and earlier.dtype == output.dtype and torch.equal(output, earlier):
            return CHEATING, f"replays the result of an earlier call: {name}"
        self.remote.ask("recall", seconds=LATENESS)
        late = self.take(0, list(output.shape), output.dtype)
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

    def check_headline(self) -> None:
        """The timed size, of values as the public harness draws them and of both signs."""
        self.check_backward()
        for name, unit in (("x in 0..1", True), ("x in -1..1", False)):
            self.check_whole(f"{list(self.task.shape)}, {name}", unit)

    def check_whole(self, name: str, unit: bool) -> None:
        """One forward of the timed size; all rows of output and input are looked at."""
        self.progress("checking", name)
        self.verdict.count += 1
        (rows, k), (_, n) = self.task.shape, self.output_shape
        seed = random.randrange(SEEDS)
        facts = {
            "dtype": dtype_name(self.dtype),
            "device": str(self.device),
            "shape": [rows, n],
        }
        reply = self._run_whole(seed, unit)
        self.check_form(reply, facts, f"{name}: ")
        if reply["shares_input"] is not False:
            raise FoundError(CHEATING, f"returns its input, not new memory: {name}")
        if reply["shares_earlier"] is not False:
            raise FoundError(WRONG, f"two outputs share memory: {name}")
        step = HALF // ((k + n) * self.dtype.itemsize)
        step -= step % cases.rows_of_a_seed(torch.empty(1, k))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            size = self.remote.ask("rows", slot=0, start=start, stop=stop)["bytes"]
            output = self.take(0, [stop - start, n], self.dtype)
            after = self.take(size, [stop - start, k], self.dtype)
            x = torch.empty_like(after)
            cases.draw_rows(x, seed, unit, start)
            if first_mismatch(after, x, exact=True):
                raise FoundError(CHEATING, f"changes its input: {name}")
            if problem := self.mismatch(output, x, whole=True):
                expected = self.expected(x)
                raise FoundError(*self._diagnose(name, output, expected, x, None, problem))
            self.earlier = {tuple(output.shape): output}

    def _run_whole(self, seed: int, unit: bool) -> dict:
        self.remote.ask("fill", **_ring(self.task, 1, seed, unit))
        return self.remote.ask("run", slot=0)

    @staticmethod
    def prepare_eager(task: Task, eager: Asked, again: bool) -> list[str]:
        """Gives a process of eager parameters, inputs and yardsticks, whose names it returns."""
        args, seed = task.problem.get_init_inputs(), random.randrange(SEEDS)
        dtype = dtype_name(task.dtype)
        eager.ask("load", path=None, problem=task.name)
        state = eager.ask("new", args=pack(args), seed=seed, dtype=dtype)["state"]
        scale, names = 1 / math.sqrt(task.shape[1]), [name for name, _ in state]
        eager.ask("fill_state", seed=seed, names=names, scale=scale)
        eager.ask("fill", **_ring(task, RING[task.device.type], seed, False))
        yardstick = "" if again else YARDSTICKS[task.name]
        return eager.ask("prepare", yardstick=yardstick)["names"]

    def prepare_timing(self) -> None:
        slots = RING[self.device.type]
        self.slots = itertools.cycle(range(slots))
        self.remote.ask("fill", **_ring(self.task, slots, random.randrange(SEEDS), False))
        self.remote.ask("prepare", yardstick="")

    def turn(self, name: str, call: str) -> Turn:
        slot, seed, at = next(self.slots), random.randrange(SEEDS), random.random()
        ask, _, take, *_ = self._renew(name, slot, seed, at)
        sample, hidden = self.timed(name, slot=slot, call=call)
        # Eager's are fetched as well, that the caches are the same for all.
        total = self.task.shape[0]
        rows = [int(at * total), 0, total - 1]  # the first is written last
        rows += (random.randrange(total) for _ in range(SUSPECTS[self.task.name]))
        looked = ask("suspects", slot=slot, rows=rows)
        return Turn(sample, hidden, self._suspects(take, looked, rows, seed))

    def _renew(self, name: str, slot: int, seed: int, at: float) -> Contestant:
        """Gives a contestant a new input and new parameters."""
        process, names = (self.remote.ask, self.remote.put, self.remote.take), self.state
        if name == self.names.solution:
            self.latest = slot, seed
        else:
            eager, again = self.baselines, name == self.names.again
            process = tuple(partial(f, again) for f in (eager.ask, eager.put, eager.take))
            names = [name for name, _ in self.reference.named_parameters()]
        contestant = Contestant(*process, names, slot)
        contestant.ask("renew", slot=slot, seed=seed, names=names, scale=self.scale, at=at)
        return contestant

    def feed_small(self, shape: tuple[int, ...]) -> tuple[int | None, nn.Module, list]:
        """As of `fresh`, for an input of this shape."""
        x = cases.random(shape, self.dtype, self.device, self.generator)
        self.check(f"an input {list(shape)}", x, True)
        return None, self.reference, [x]

    def operands(self) -> dict[str, str]:
        own = (name for name, _ in self.reference.named_parameters())
        return dict(zip(own, self.state, strict=True))

    def has_float64(self) -> bool:
        return True

    def renew_step(self, name: str) -> Contestant:
        return self._renew(name, 0, random.randrange(SEEDS), random.random())

    def step_inputs(self) -> tuple[nn.Module, list]:
        x = torch.empty(self.task.shape, dtype=self.dtype, device=self.device)
        seed = self.latest[1]
        draw_state([p.data for p in self.reference.parameters()], seed + SHIFT, self.scale)
        return self.reference, [cases.draw_rows(x, seed)]

    def turn_again(self) -> list[Turn]:
        """With one element of x and one of the weight changed, which looks at samples miss."""
        slot, seed = self.latest
        row, column = place = [random.randrange(side) for side in self.task.shape]
        value = random.randrange(1, 100)
        weight = next(iter(self.reference.parameters()), None)
        sides = [random.randrange(side) for side in weight.shape] if self.state else []
        changed = [self.state[0], *sides] if sides else []
        self.remote.ask("touch", slot=slot, place=place, value=value, weight=changed)
        turn = self.timed(self.names.solution, slot=slot, call="module")
        rows = [row, *random.choices(range(self.task.shape[0]), k=SUSPECTS[self.task.name])]
        looked = self.remote.ask("suspects", slot=slot, rows=rows)

        def alter(x: torch.Tensor) -> None:
            x[[turn for turn, other in enumerate(rows) if other == row], column] = value
            if sides:
                weight.data[tuple(sides)].neg_()

        return [Turn(*turn, self._suspects(self.remote.take, looked, rows, seed, alter))]

    def _suspects(
        self,
        take: Callable[..., torch.Tensor],
        reply: dict,
        rows: list[int],
        seed: int,
        alter: Callable[[torch.Tensor], None] = lambda x: None,
    ) -> Callable[[], str | None]:
        """Takes rows of the last call, which were chosen after it; the result checks them."""
        n, k = self.output_shape[1], self.task.shape[1]
        size = len(rows) * n * self.dtype.itemsize
        if fault := str(reply.get("fault") or "")[:LONGEST_LINE]:
            return lambda: fault
        if reply["bytes"] != size:
            return lambda: "a timed call returned another kind of output than before"
        output = self.take(0, [len(rows), n], self.dtype, take)
        after = self.take(size, [len(rows), k], self.dtype, take)

        def check() -> str | None:
            x = cases.draw_some(after, rows, self.task.shape[0], seed)
            draw_state([p.data for p in self.reference.parameters()], seed + SHIFT, self.scale)
            alter(x)
            if first_mismatch(after, x, exact=True):
                return "changes its input in timed calls"
            problem = self.mismatch(output, x, whole=True)
            return problem and f"a timed call was wrong, in rows {rows[:4]} ...: {problem}"

        return check


def _ring(task: Task, slots: int, seed: int, unit: bool) -> dict[str, object]:
    """The arguments of `RowsWorker.fill`."""
    shape, dtype = list(task.shape), dtype_name(task.dtype)
    return {"slots": slots, "shape": shape, "dtype": dtype, "seed": seed, "unit": unit}
