"""The backward of a solution: gradients beside the reference's, and the training step's times.

Where a sum is near zero, rounding decides whether ReLU passes a gradient: an honest result may
differ there by much. Those places are others for other inputs, so that several are drawn; or the
problem knows them, and the outputs' gradients are zero there.
"""

import copy
import math
import random
from contextlib import suppress

import torch
from torch import nn

from referee import cases
from referee.child.step import differentiate, draw_gradients, is_differentiable, late_row, record
from referee.child.yardsticks import COMPILED
from referee.error_line import LONGEST_LINE
from referee.judge.budget import GROSS, Found, Output
from referee.judge.feeding import send
from referee.judge.oracle import SEEDS, difference, parameters_of
from referee.judge.timed import Timed, checked, wrong_clock
from referee.judge.verdict import CHEATING, WRONG, FoundError, Run, of_exception
from referee.remote import HALF, RaisedError
from referee.structure import flatten
from referee.timing import CONFIRMATION, Rounds, Samples, Step, Timings, judge, rounds

CHANCE = 0.01  # that one element is wrong in all draws, and it is no fault
STRAYS = 0.02  # of elements, that may be wrong in every draw
LOOKED_AT = 1 << 10  # elements of each result and gradient, after a timed step
ROWS = 3  # of a large input, that are looked at where these alone count
OUT_OF_MEMORY = "OutOfMemory"  # in the name of torch's exception
STALE = 0.25  # relative error of these that ReLU's side does not explain


class Quantity:
    """A result or a gradient, and how far off it was in the draws so far.

    Attributes:
        want: of the draw at hand; None for a gradient that the reference has not.
        found: in the last draw.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.want: Output | None = None
        self.found: Found | None = None
        self.first, self.is_wrong = "", False
        self.relative = self.share = math.inf  # the least of all draws; of elements that are wrong
        self.wrong: torch.Tensor | None = None  # which of them, in every draw
        self.chance = 1.0  # that it is all of these

    def compare(self, got: torch.Tensor, is_strict: bool) -> None:
        """Takes in what the solution gives for a draw; nothing may be wrong if `is_strict`."""
        found = self.found = self.want.compare([(0, got)])
        self.want.forget()
        beyond = found.beyond
        if not self.first and beyond.any():
            self.first = found.problem
        if self.want.is_exact or is_strict:
            self.is_wrong |= bool(beyond.any())
            return
        share = beyond.double().mean().item() if len(beyond) else 0.0
        relative = found.relative if share else 0.0  # of nothing but rounding, it means nothing
        self.relative, self.share = min(self.relative, relative), min(self.share, share)
        self.chance *= share
        self.wrong = beyond if self.wrong is None else self.wrong & beyond

    def problem(self) -> str | None:
        """What is wrong whatever the inputs, in words."""
        is_wrong = self.is_wrong
        if self.wrong is not None:
            is_placed = bool(self.wrong.any()) and self.chance * len(self.wrong) < CHANCE
            is_wrong = is_placed or self.share > STRAYS or self.relative > GROSS
        return f"{self.what}: {self.first}" if is_wrong else None


class Backward(Timed):
    """Judges the backward, where the reference and the solution have one.

    Attributes:
        by_rows: a row of a result is a function of the row of the input alone.
    """

    by_rows = False

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.has_backward = False
        self.quantities: list[Quantity] = []
        self.results = 0  # how many of these are results
        self.step_seed = random.randrange(SEEDS)
        self.given: list[torch.Tensor] = []  # gradients of outputs, in timed steps
        self.turned: set[int] = set()  # rows of these with the other sign
        self.wants: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []

    def relies_on_inputs(self) -> bool:
        """Whether the solution may be the reference for such inputs alone as `get_inputs` draws.

        Its gradients of inputs may then be others: of symmetric matrices, say.
        """
        return False

    def clear(self, inputs: list) -> torch.Tensor | None:
        """Where ReLU's side is certain; None if that is not known."""
        return None

    def budget(self, eager: torch.Tensor, exact: torch.Tensor, terms: int) -> Output:
        """What a result or a gradient may be."""
        return Output(eager, None if self.oracle.note else exact, terms)

    def wrong_result(self, problem: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
        """The fault of elements of a timed step's result that are beyond their budget, in words."""
        return problem

    def _operands(self) -> dict[str, str]:
        """The solution's names of the parameters, by the reference's."""
        theirs = (name for name, _ in self.parameters)
        own = (name for name, _ in parameters_of(self.module))
        return dict(zip(own, theirs, strict=False))

    def derive(
        self, module: nn.Module, inputs: list, given: list[torch.Tensor] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]:
        """The reference's outputs and gradients, and those of the outputs."""
        arguments, wanted = record(module, inputs, list(self._operands()))
        with torch.enable_grad():
            _, outputs = flatten(module(*arguments))
            given = given or draw_gradients(outputs, self.step_seed)
            gradients = differentiate(outputs, wanted, given)
        return [y.detach() for y in outputs], gradients, given

    def start_backward(self) -> None:
        """Gradients of other shapes come."""
        self.has_backward, self.quantities, self.given = False, [], []

    def check_backward(self, draws: list[list]) -> None:
        """Gradients for some inputs, where the reference and the solution have them."""
        self.progress("checking", "the backward")
        for inputs in draws:
            self.feed(inputs)
            clear = self.clear(inputs)
            if not self._expect(inputs, clear):
                return
            if not (places := self._ask_gradients()):
                return
            self.verdict.count += 1
            for quantity, place in zip(self.quantities, places, strict=True):
                if quantity.want:
                    got = self._whole_found(place, quantity.want)
                    quantity.compare(got, clear is not None)
        wrong = {q.what: problem for q in self.quantities if (problem := q.problem())}
        first = len(self.quantities) - len(self._operands())
        of_inputs = {q.what for q in self.quantities[self.results : first]}
        if not wrong:
            self.has_backward = True
        elif wrong.keys() <= of_inputs and self.relies_on_inputs():
            self.verdict.notes.append(f"forward only: another {', another '.join(wrong)}")
        else:
            raise FoundError(WRONG, "; ".join(wrong.values())[:LONGEST_LINE])

    def _expect(self, inputs: list, clear: torch.Tensor | None) -> bool:
        """Sets what the `quantities` are for inputs; whether there are gradients."""
        try:
            outputs, gradients, given = self.derive(copy.deepcopy(self.module), inputs)
            if clear is not None:
                given = [g * clear for g in given]
                outputs, gradients, _ = self.derive(copy.deepcopy(self.module), inputs, given)
                send(self.process, None, given)
            exact = outputs, gradients
            if not self.oracle.note:
                wide = [x.double() if is_differentiable(x) else x for x in inputs]
                doubled = [g.double() for g in given]
                exact = self.derive(copy.deepcopy(self.module).double(), wide, doubled)
        except Exception:  # whatever a reference file raises
            return False
        self.results = len(outputs)
        count = sum(map(is_differentiable, inputs))
        operands = ["x"] if count == 1 else [f"input {i}" for i in range(count)]
        names = [f"result {i}" for i in range(len(outputs))]
        names += [f"gradient of {name}" for name in [*operands, *self._operands()]]
        terms = max(y.numel() for y in outputs)
        self.quantities = self.quantities or list(map(Quantity, names))
        pairs = zip([*outputs, *gradients], [*exact[0], *exact[1]], strict=True)
        for quantity, (eager, wide) in zip(self.quantities, pairs, strict=True):
            quantity.want = None if eager is None else self.budget(eager, wide, terms)
        return any(g is not None for g in gradients)

    def _ask_gradients(self) -> list[int | None]:
        """Where the child keeps the `quantities`; none if the solution has no backward."""
        results, wants = self.results, [quantity.want for quantity in self.quantities]
        size = sum(want.numel * want.dtype.itemsize for want in wants[:results])
        names = [*self._operands().values()]
        try:
            reply = self.remote.ask("derive", names=names, seed=self.step_seed, size=size)
        except RaisedError as raised:
            word, line = of_exception(raised, "checking the backward")
            if word == CHEATING:
                raise
            self.verdict.notes.append(f"forward only: its backward raises {line}")
            return []
        facts = [*reply["outputs"], *reply.get("gradients", [])]
        for quantity, fact in zip(self.quantities, facts, strict=False):
            if fact is not None and quantity.want is not None:
                self.check_form(fact, self.form(quantity.want), f"{quantity.what}, recorded: ")
        if len(reply["outputs"]) != results or len(facts) != len(self.quantities):
            reason = f"a recorded forward returns {reply['structure']}"
            raise FoundError(WRONG, reason[:LONGEST_LINE])
        pairs = list(zip(self.quantities, facts, strict=True))
        missing = [q.what for q, fact in pairs if q.want is not None and fact is None]
        if missing:
            none = "" if not reply["recorded"] else f": no {', no '.join(missing)}"
            self.verdict.notes.append(f"forward only{none}"[:LONGEST_LINE])
            return []
        return [None if q.want is None else fact["place"] for q, fact in pairs]

    def _whole_found(self, place: int, want: Output) -> torch.Tensor:
        step = HALF // want.dtype.itemsize
        pieces = []
        for start in range(0, want.numel, step):
            stop = min(start + step, want.numel)
            self.remote.ask("read_found", index=place, start=start, stop=stop)
            pieces.append(self.take(0, [stop - start], want.dtype))
        return torch.cat(pieces) if pieces else want.eager

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
        names = self._operands()
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
        if is_solution:
            self.wants = self._step_wants(at)
            facts = [*reply["outputs"], *reply.get("gradients", [])]
            there = [fact for fact, q in zip(facts, self.quantities, strict=False) if q.want]
            forms = [(fact or {}).get("shape") for fact in there]
            if forms != [shape for shape, _, _ in self.wants]:
                return halves, 0.0, "a timed step gives another kind of result than before"
        halves = [checked(*reply[half]) for half in ("forward", "backward")]
        if self.wants:  # of eager too, that the caches are the same for all
            process.put(*(places for _, places, _ in self.wants))
            process.ask("look", counts=[len(places) for _, places, _ in self.wants])
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
            late_row(self.given[0], at).neg_()
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
            elif difference(got, want) <= STALE:
                problem = None
            if problem:
                return f"a timed step's {quantity.what} was wrong: {problem}"
        return None
