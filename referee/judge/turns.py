"""One timed call of a contestant, a forward or a training step: new values, two clocks, a look."""

import math
import random
from time import perf_counter
from typing import NamedTuple

import torch

from referee import cases
from referee.cases import dtype_name
from referee.child.feed import TRIPLED
from referee.child.step import change_late
from referee.compare import first_mismatch
from referee.judge.backward import Backward
from referee.judge.budget import Output
from referee.judge.feeding import Renewal
from referee.judge.oracle import difference
from referee.judge.verdict import CHEATING, FoundError
from referee.reference_file import LONGEST_LINE
from referee.remote import ForgedError, Remote
from referee.timing import Names

# Elements of each output and input that are looked at after a timed forward, and of each result
# and gradient after a step, by `Turns.is_step`.
LOOKED_AT = {False: 1 << 12, True: 1 << 10}
MOST_SOUGHT = 1 << 23  # elements of a result that is searched for rare ones
ROWS = 3  # of a large input, that are looked at where these alone count
STALE = 0.25  # relative error of gradients that ReLU's side does not explain


class Turn(NamedTuple):
    """A timed call."""

    # Of all of it, then of its halves, by the device's clock and until it was idle.
    seconds: list[tuple[float, float]]
    # What it took by this process's clock beyond that, without the time for which other programs
    # had the CPUs: a longer call is the sooner followed by their turn.
    hidden: float
    problem: str | None  # what is wrong with its result, in words


class Want(NamedTuple):
    """What a timed call is to give, at random places; without a budget, it is an input."""

    budget: Output | None
    shape: list[int]
    places: torch.Tensor
    values: torch.Tensor


class Turns(Backward):
    """Calls on inputs and parameters that are all new."""

    names = Names(solution="ModelNew", eager="eager")
    by_rows = False  # whether a row of a result is a function of the row of the input alone
    latest: Renewal | None = None  # the solution's values

    def start_turns(self, is_step: bool) -> None:
        """Training steps come, or forwards."""
        self.is_step, self.slot = is_step, 0
        # Of the latest call that was looked at, results first; None where nothing is.
        self.wants: list[Want | None] = []
        self.given: list[torch.Tensor] = []  # gradients of the outputs of steps
        self.turned: set[int] = set()  # rows of these with the other sign

    def wrong_result(self, problem: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
        """The fault of elements of a timed step's result that are beyond their budget, in words."""
        return problem

    def process_of(self, name: str) -> Remote:
        """A contestant's."""
        if name == self.names.solution:
            return self.remote
        return self.baselines.remotes[-1 if name == self.names.again else 0]

    def operands_of(self, name: str) -> list[str]:
        """A contestant's names of the parameters that have gradients."""
        names = self.operands()
        return list(names.values() if name == self.names.solution else names)

    def turn(self, name: str, call: str) -> Turn:
        """Times a call of a contestant, by the worker's name for it, and looks at its results."""
        is_solution, self.at = name == self.names.solution, random.random()  # for `change_late`
        self.slot = (self.slot + is_solution) % (1 if self.is_step else self.oracle.slots)
        process = self.process_of(name)
        parameters = self.parameters if is_solution else self.oracle.parameters
        renewal = Renewal(self.oracle, parameters, inputs=True)
        renewal.give(process, self.slot, is_timed=True)
        halves, hidden = self._clocked(name, call)
        if is_solution:
            self.latest = renewal
            self.redraw(renewal.seed)  # not before the call: it would have the caches
        if self.is_step and is_solution:
            self.wants = self._step_wants()
        elif call == "module" and not self.is_step:
            self.wants = self._forward_wants((self.latest or renewal).inputs())
        whole, problem = tuple(map(sum, zip(*halves, strict=True))), None
        if call == "module" or self.is_step:  # of eager too, that the caches are the same for all
            problem = self._look(process)
        return Turn([whole, *halves], hidden, problem if is_solution else None)

    def call_again(self) -> str | None:
        """What is wrong after an element of each parameter, and of the input, has changed.

        Whoever keeps what seems not to have changed is wrong there. Only inputs of this project's
        problems may change in part.
        """
        inputs, values = self.latest.inputs(), self.module.state_dict()
        before = self.oracle.run(self.module, inputs)
        may_change = self.oracle.file.is_ours and self.dtype.is_floating_point
        changed = [(inputs[0], None)] if may_change else []
        changed += [(values[own], theirs) for own, theirs in self.operands().items()]
        changed = [(x, name) for x, name in changed if x.numel()]
        if not changed:
            return None
        places = [[random.randrange(side) for side in x.shape] for x, _ in changed]
        for (x, name), place in zip(changed, places, strict=True):
            x.data[tuple(place)].mul_(TRIPLED if name else -1)
        names = [name for _, name in changed]
        self.remote.ask("touch", slot=self.slot, names=names, places=places)
        self._clocked(self.names.solution, "module")
        self.wants = self._forward_wants(inputs, before)
        return self._look(self.remote)

    def _clocked(self, name: str, call: str) -> tuple[list[tuple[float, float]], float]:
        """Times a call: the halves of `Turn.seconds`, and `Turn.hidden`."""
        process = self.process_of(name)
        op, about, halves = "time", {"slot": self.slot}, ("forward",)
        if self.is_step:
            op, about = "time_step", {"names": self.operands_of(name), "at": self.at}
            halves = "forward", "backward"
        before, start = process.waited(), perf_counter()
        reply = process.ask(op, call=call, **about)
        left_on = process.ask("left_on")["names"]
        seconds = perf_counter() - start - (process.waited() - before)
        if left_on:
            reason = f"leaves {left_on[0]} on, which may compute a result when it is read"
            raise FoundError(CHEATING, reason[:LONGEST_LINE])
        found = [_checked(reply[half]) for half in halves]
        return found, seconds - sum(own for own, _ in found)

    def _want(
        self, x: torch.Tensor, budget: Output | None = None, before: torch.Tensor | None = None
    ) -> Want:
        """Random elements of a tensor: those that differ from earlier ones, if any do. Half of a
        result's are unlike the one in its middle, as almost all of them may be alike."""
        flat, other, part = x.reshape(-1), before, slice(None)
        places = torch.randint(max(len(flat), 1), (LOOKED_AT[self.is_step] * bool(len(flat)),))
        if budget and before is None and 0 < len(flat) <= MOST_SOUGHT:
            other, part = flat[len(flat) // 2], slice(None, None, 2)
        if other is not None and len(there := (x != other).reshape(-1).nonzero().view(-1)):
            places[part] = there[(places[part] % len(there)).to(there.device)].cpu()
        return Want(budget, list(x.shape), places, flat[places.to(self.device)])

    def _forward_wants(self, inputs: list, before: list | None = None) -> list[Want]:
        """Of outputs, as of `_want`, and of the inputs' memory."""
        eager = self.oracle.run(self.module, inputs)
        every = zip(eager, self.budgets, before or [None] * len(eager), strict=True)
        wants = [self._want(*each) for each in every]
        tensors = (inputs[i] for i in self.oracle.tensors)
        return wants + [self._want(x.as_strided((x.numel(),), (1,))) for x in tensors]

    def _step_wants(self) -> list[Want | None]:
        """Of results and gradients."""
        if self.by_rows:
            rows, inputs, given = self._some_rows()
        else:
            inputs = self.latest.inputs()
            if not self.given:
                _, self.given = self.derive(self.module, inputs)
            change_late(self.given, self.at)
            given = self.given
        every, _ = self.derive(self.module, inputs, given)
        pairs = zip(every, self.quantities, strict=True)
        wants = [quantity.want and self._want(x, quantity.want) for x, quantity in pairs]
        if self.by_rows:
            shape, width = list(self.oracle.shape), inputs[0][0].numel()
            for turn, (budget, _, places, values) in enumerate(wants):
                places = rows[places // width] * width + places % width
                wants[turn] = Want(budget, shape, places, values)
        return wants

    def _some_rows(self) -> tuple[torch.Tensor, list, list]:
        """Some rows, for lack of room: which, the input's, and the output's gradient's."""
        shape = self.oracle.shape
        turned = int(self.at * shape[0])
        self.turned ^= {turned}
        rows = [turned, *random.choices(range(shape[0]), k=ROWS)]
        x = self.oracle.draw(self.latest.draw)[0][rows]
        blank = torch.empty(shape, dtype=self.dtype, device=self.device)
        given = cases.draw(blank, self.step_seed)[rows]
        given[[i for i, row in enumerate(rows) if row in self.turned]] *= -1
        return torch.tensor(rows), [x], [given]

    def _look(self, process: Remote) -> str | None:
        """What is wrong with the last call's results, or its inputs, by `wants`, in words."""
        if not self.wants:  # eager's first step
            return None
        inputs = [] if self.is_step else self.oracle.tensors
        results = self.wants[: len(self.wants) - len(inputs)]
        looked = [(i, want) for i, want in enumerate(self.wants) if want and len(want.places)]
        process.put(*(want.places for _, want in looked))
        sizes = [math.prod(want.shape) if want else 0 for want in results]
        about = {"sizes": sizes, "inputs": inputs, "count": LOOKED_AT[self.is_step]}
        reply = process.ask("pick", slot=self.slot, keep=self.oracle.shares, **about)
        facts = reply["results"]
        if fault := next((fact["fault"] for fact in facts if fact.get("fault")), ""):
            return str(fault)[:LONGEST_LINE]
        pairs = zip(results, facts, strict=False)
        found = [want and (fact.get("shape"), fact.get("dtype")) for want, fact in pairs]
        forms = [want and (want.shape, dtype_name(want.values.dtype)) for want in results]
        is_alike = self.is_step or reply["structure"] == self.oracle.structure
        if not (is_alike and found == forms and len(facts) == len(forms)):
            what = "step" if self.is_step else "call"
            return f"a timed {what} gives another kind of result than before"
        start = 0
        for turn, want in looked:
            got = process.take(start, [len(want.places)], want.values.dtype)
            start += got.numel() * got.element_size()
            if problem := self._problem(turn, want, got):
                return problem
        return None

    def _problem(self, turn: int, want: Want, got: torch.Tensor) -> str | None:
        """What is wrong with the elements that were looked at, in words."""
        if not want.budget:
            is_right = first_mismatch(got, want.values, exact=True) is None
            return None if is_right else "changes its input in timed calls"
        problem = want.budget.compare_some(got, want.values)
        if not self.is_step:
            return problem and f"a timed call was wrong: {problem}"
        if turn < self.results:
            problem = problem and self.wrong_result(problem, got, want.values)
        elif not want.budget.is_exact and difference(got, want.values) <= STALE:
            problem = None
        return problem and f"a timed step's {self.quantities[turn].what} was wrong: {problem}"


def _checked(half: object) -> tuple[float, float]:
    """Seconds that a process reports."""
    is_pair = type(half) is list and len(half) == 2
    if not (is_pair and all(type(t) is float and math.isfinite(t) for t in half)):
        raise ForgedError
    return max(half[0], 1e-9), half[1]
