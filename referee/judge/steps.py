"""The times of training steps: a forward that autograd records, and its backward."""

import random
from contextlib import suppress

import torch

from referee import cases
from referee.child.feed import MOST_PARTS
from referee.child.step import late_row
from referee.child.yardsticks import COMPILED
from referee.judge.backward import Backward
from referee.judge.oracle import difference
from referee.judge.timed import checked, wrong_clock
from referee.judge.verdict import CHEATING, FoundError, Run
from referee.remote import RaisedError
from referee.timing import CONFIRMATION, Rounds, Samples, Step, Timings, judge, rounds

LOOKED_AT = 1 << 10  # elements of each result and gradient, after a timed step
ROWS = 3  # of a large input, that are looked at where these alone count
OUT_OF_MEMORY = "OutOfMemory"  # in the name of torch's exception
STALE = 0.25  # relative error of these that ReLU's side does not explain


class Steps(Backward):
    """Training steps, of solutions whose gradients are right.

    Attributes:
        by_rows: a row of a result is a function of the row of the input alone.
    """

    by_rows = False

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.given: list[torch.Tensor] = []  # gradients of outputs
        self.turned: set[int] = set()  # rows of these with the other sign
        self.wants: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []

    def wrong_result(self, problem: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
        """The fault of elements of a timed step's result that are beyond their budget, in words."""
        return problem

    def time_step(self, run: Run) -> None:
        """Times the training step of a solution whose gradients are right."""
        if not self.has_backward:
            return
        step = Step.of(self.device.type, self.names, self.rate)
        self.given, self.turned = [], set()
        called = {self.names.solution: "module", self.names.eager: "module"}
        called |= {self.names.again: "module"}
        called |= {name: name for name in self.baselines.names if name == COMPILED}
        self.baselines.forget()
        self.release()
        run.step = step
        try:
            for name in called:
                process, _ = self.renew(name, 0)
                process.ask("prepare_step", seed=self.step_seed)
                if name in (self.names.solution, self.names.eager):
                    with suppress(RaisedError):  # of a program that admits no hooks
                        kept = process.ask("kept", names=self._names_of(name))
                        step.kept[name] = int(kept["bytes"])
            for wanted in (self.task.wanted, CONFIRMATION):
                if not (problems := self._time_step(step, called, wanted)):
                    return
            raise FoundError(CHEATING, problems[0])
        except (FoundError, RaisedError) as error:
            run.step = None
            if OUT_OF_MEMORY not in str(error):
                raise
            self.verdict.notes.append("no memory for the training step")

    def release(self) -> None:
        """Gives memory back before another process needs it; the warm-up comes after."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _names_of(self, contestant: str) -> list[str]:
        """Of its parameters."""
        names = self.operands()
        return list(names.values() if contestant == self.names.solution else names)

    def _time_step(self, step: Step, called: dict[str, str], wanted: Rounds) -> list[str]:
        """Adds the times of all contestants, in random order within a round; what no honest run
        gives, in words.
        """
        what = f"the training step{self.setting and f' at {self.setting}'}"
        whole = Timings(self.device.type, self.names, self.rate, 0)
        every = (step.forward, step.backward, whole)
        hidden: dict[str, list[tuple[float, float]]] = {name: [] for name in called}
        for timings in every:
            timings.start(called)

        def one_round() -> tuple[list[Samples], str | None]:
            samples, problem = [{}, {}, {}], None
            for name in random.sample(list(called), len(called)):
                halves, beyond, found = self._step_turn(name, called[name])
                problem = problem or found
                both = tuple(map(sum, zip(*halves, strict=True)))
                hidden[name].append((both[0], beyond))
                for sample, pair in zip(samples, (*halves, both), strict=True):
                    sample[name] = pair
            return samples, problem

        for samples, problem in rounds(one_round, wanted, self.device, what, self.progress):
            if problem:
                raise FoundError(CHEATING, problem)
            for timings, sample in zip(every, samples, strict=True):
                timings.add(sample)
        clock, problems = wrong_clock(hidden, whole), []
        for half in (step.forward, step.backward):
            found = judge(half, 0.0, what)
            half.notes += found.notes
            problems += found.problems
        return [clock, *problems] if clock else problems

    def _step_turn(
        self, name: str, call: str
    ) -> tuple[list[tuple[float, float]], float, str | None]:
        """Seconds of a forward and of a backward, by both clocks; those beyond; what is wrong."""
        process, _ = self.renew(name, 0)
        at, names = random.random(), self._names_of(name)
        reply, ours = self.clocked(name, "time_step", call=call, names=names, at=at)
        halves = [(0.0, 0.0), checked(*reply["forward"])]
        is_solution = name == self.names.solution
        facts = [*reply["outputs"], *reply.get("gradients", [])]
        there = [fact or {} for fact, q in zip(facts, self.quantities, strict=False) if q.want]
        if is_solution:
            self.wants = self._step_wants(at)
            forms = [fact.get("shape") for fact in there]
            if forms != [shape for shape, _, _ in self.wants]:
                return halves, 0.0, "a timed step gives another kind of result than before"
        halves = [checked(*reply[half]) for half in ("forward", "backward")]
        if self.wants:  # of eager too, that the caches are the same for all
            process.put(*(places for _, places, _ in self.wants))
            turns, counts = [x.get("place") for x in there], [len(x) for _, x, _ in self.wants]
            process.ask("look", turns=turns, counts=counts, keep=self.oracle.shares)
        problem = self._wrong_step() if is_solution else None
        return halves, ours - halves[0][0] - halves[1][0], problem

    def _step_wants(self, at: float) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """Of all that this step gives: its shape, random flat places, and what is right there.

        Args:
            at: as of `late_row`, which has changed.
        """
        self.redraw(self.latest.seed)  # not before the step: it would have the caches
        if self.by_rows:
            width, first, inputs, given = self._some_rows(at)
        else:
            width, inputs = 0, self.latest.inputs()
            if not self.given:
                *_, self.given = self.derive(self.module, inputs)
            for g in self.given[:MOST_PARTS]:
                late_row(g, at).neg_()
            given = self.given
        outputs, gradients, _ = self.derive(self.module, inputs, given)
        wants = []
        for x in filter(lambda x: x is not None, [*outputs, *gradients]):
            places = torch.randint(max(x.numel(), 1), (LOOKED_AT if x.numel() else 0,))
            values = x.reshape(-1)[places.to(x.device)]
            if width:
                places = first[places // width] * width + places % width
            shape = list(self.oracle.shape if width else x.shape)
            wants.append((shape, places, values))
        return wants

    def _some_rows(self, at: float) -> tuple[int, torch.Tensor, list, list]:
        """Rows of the input and of the output's gradient, of which there is no room for more: the
        elements in a row, which rows, and both.
        """
        shape = self.oracle.shape
        turned = int(at * shape[0])
        self.turned ^= {turned}
        rows = [turned, *random.choices(range(shape[0]), k=ROWS)]
        x = self.oracle.draw(self.latest.draw)[0][rows]
        blank = torch.empty(shape, dtype=self.dtype, device=self.device)
        given = cases.draw(blank, self.step_seed)[rows]
        given[[i for i, row in enumerate(rows) if row in self.turned]] *= -1
        return x[0].numel(), torch.tensor(rows), [x], [given]

    def _wrong_step(self) -> str | None:
        """The fault of the elements that were looked at, in words."""
        start = 0
        there = [(i, quantity) for i, quantity in enumerate(self.quantities) if quantity.want]
        for (index, quantity), (_, _, want) in zip(there, self.wants, strict=True):
            got = self.take(start, [len(want)], want.dtype)
            start += got.numel() * got.element_size()
            problem = quantity.want.compare_some(got, want) if len(got) else None
            if index < self.results:
                problem = problem and self.wrong_result(problem, got, want)
            elif not quantity.want.is_exact and difference(got, want) <= STALE:
                problem = None
            if problem:
                return f"a timed step's {quantity.what} was wrong: {problem}"
        return None
