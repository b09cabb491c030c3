"""The backward of a solution: gradients beside the reference's, and the training step's times.

Where a sum is near zero, rounding decides whether ReLU passes a gradient: an honest result may
differ there by much. Those places are others for other inputs, so that several are drawn.
"""

import copy
import math
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import nn

from referee.child.step import differentiate, draw_gradients, is_differentiable, late_row, record
from referee.error_line import LONGEST_LINE
from referee.remote import HALF, ForgedError, RaisedError, dtype_name
from referee.solutions.budget import GROSS, Output
from referee.solutions.judge import SEEDS, Judge, wrong_clock
from referee.solutions.oracle import difference
from referee.solutions.verdict import CHEATING, WRONG, FoundError, of_exception
from referee.step import Step
from referee.structure import flatten
from referee.timing import CONFIRMATION, Rounds, Samples, Timings, judge, rounds

DRAWS = 3  # of inputs
CHANCE = 0.01  # that one element is wrong in all draws, and it is no fault
STRAYS = 0.02  # of elements, that may be wrong in every draw
LOOKED_AT = 1 << 10  # elements of each result and gradient, after a timed step
OUT_OF_MEMORY = "OutOfMemory"  # in the name of torch's exception
STALE = 0.25  # relative error of these that ReLU's side does not explain


class Quantity:
    """A result or a gradient, and how far off it was in the draws so far.

    Attributes:
        want: of the draw at hand; None for a gradient that the reference has not.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.want: Output | None = None
        self.first, self.is_wrong = "", False
        self.relative = self.share = math.inf  # the least of all draws; of elements that are wrong
        self.wrong: torch.Tensor | None = None  # which of them, in every draw
        self.chance = 1.0  # that it is all of these

    def compare(self, got: torch.Tensor) -> None:
        """Takes in what the solution gives for a draw."""
        beyond, relative, first = self.want.beyond(got)
        self.want.forget()
        self.first = self.first or first
        if self.want.is_exact:
            self.is_wrong |= bool(first)
            return
        share = beyond.double().mean().item() if len(beyond) else 0.0
        relative = relative if share else 0.0  # of what is nothing but rounding, it means nothing
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


class Contestant(NamedTuple):
    """A process that has new values for a timed step."""

    ask: Callable[..., dict]
    put: Callable[..., None]
    take: Callable[..., torch.Tensor]
    names: list[str]  # of the parameters
    slot: int


class Backward(Judge):
    """Judges the backward, where the reference and the solution have one."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.has_backward = False
        self.quantities: list[Quantity] = []
        self.results = 0  # how many of these are results
        self.step_seed = random.randrange(SEEDS)
        self.given: list[torch.Tensor] = []  # gradients of outputs, in timed steps
        self.wants: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []

    def fresh(self, turn: int) -> tuple[int | None, nn.Module, list]:
        """Gives the solution inputs; their slot, the reference of equal state, and the inputs."""
        raise NotImplementedError

    def relies_on_inputs(self) -> bool:
        """Whether the solution may be the reference for such inputs alone as `get_inputs` draws.

        Its gradients of inputs may then be others: of symmetric matrices, say.
        """
        return False

    def operands(self) -> dict[str, str]:
        """The solution's names of the parameters, by the reference's."""
        raise NotImplementedError

    def has_float64(self) -> bool:
        """Whether the reference can be computed in float64."""
        raise NotImplementedError

    def budget(self, eager: torch.Tensor, exact: torch.Tensor, terms: int) -> Output:
        """What a result or a gradient may be."""
        return Output(eager, exact if self.has_float64() else None, terms)

    def renew_step(self, name: str) -> Contestant:
        """Gives a contestant new inputs and parameters for a timed step."""
        raise NotImplementedError

    def step_inputs(self) -> tuple[nn.Module, list]:
        """The reference and the inputs of the solution's last timed step."""
        raise NotImplementedError

    def step_wants(self, at: float) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """Of all that this step gives: its shape, random flat places, and what is right there.

        Args:
            at: as of `late_row`, which has changed.
        """
        module, inputs = self.step_inputs()
        if not self.given:
            *_, self.given = self.derive(module, inputs)
        late_row(self.given[0], at).neg_()
        outputs, gradients, _ = self.derive(module, inputs, self.given)
        wants = []
        for x in filter(lambda x: x is not None, [*outputs, *gradients]):
            places = torch.randint(max(x.numel(), 1), (LOOKED_AT if x.numel() else 0,))
            wants.append((list(x.shape), places, x.reshape(-1)[places.to(x.device)]))
        return wants

    def wrong_result(self, problem: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
        """The fault of elements of a timed step's result that are beyond their budget, in words."""
        return problem

    def derive(
        self, module: nn.Module, inputs: list, given: list[torch.Tensor] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]:
        """The reference's outputs and gradients, and those of the outputs."""
        arguments, wanted = record(module, inputs, list(self.operands()))
        with torch.enable_grad():
            _, outputs = flatten(module(*arguments))
            given = given or draw_gradients(outputs, self.step_seed)
            gradients = differentiate(outputs, wanted, given)
        return [y.detach() for y in outputs], gradients, given

    def check_backward(self) -> None:
        """Gradients, where the reference and the solution have them."""
        self.progress("checking", "the backward")
        for turn in range(DRAWS):
            slot, module, inputs = self.fresh(turn)
            if not self._expect(module, inputs):
                return
            if not (places := self._ask_gradients(slot)):
                return
            self.verdict.count += 1
            for quantity, place in zip(self.quantities, places, strict=True):
                if quantity.want:
                    quantity.compare(self._whole_found(place, quantity.want))
        wrong = {q.what: problem for q in self.quantities if (problem := q.problem())}
        first = len(self.quantities) - len(self.operands())
        of_inputs = {q.what for q in self.quantities[self.results : first]}
        if not wrong:
            self.has_backward = True
        elif wrong.keys() <= of_inputs and self.relies_on_inputs():
            self.verdict.notes.append(f"forward only: another {', another '.join(wrong)}")
        else:
            raise FoundError(WRONG, "; ".join(wrong.values())[:LONGEST_LINE])

    def _expect(self, module: nn.Module, inputs: list) -> bool:
        """Sets what the `quantities` are for inputs; whether there are gradients."""
        try:
            outputs, gradients, given = self.derive(copy.deepcopy(module), inputs)
            exact = outputs, gradients
            if self.has_float64():
                wide = [x.double() if is_differentiable(x) else x for x in inputs]
                doubled = [g.double() for g in given]
                exact = self.derive(copy.deepcopy(module).double(), wide, doubled)
        except Exception:  # whatever a reference file raises
            return False
        self.results = len(outputs)
        count = sum(map(is_differentiable, inputs))
        operands = ["x"] if count == 1 else [f"input {i}" for i in range(count)]
        names = [f"result {i}" for i in range(len(outputs))]
        names += [f"gradient of {name}" for name in [*operands, *self.operands()]]
        terms = max(y.numel() for y in outputs)
        self.quantities = self.quantities or list(map(Quantity, names))
        pairs = zip([*outputs, *gradients], [*exact[0], *exact[1]], strict=True)
        for quantity, (eager, wide) in zip(self.quantities, pairs, strict=True):
            quantity.want = None if eager is None else self.budget(eager, wide, terms)
        return any(g is not None for g in gradients)

    def _ask_gradients(self, slot: int | None) -> list[int | None]:
        """Where the child keeps the `quantities`; none if the solution has no backward."""
        results, wants = self.results, [quantity.want for quantity in self.quantities]
        size = sum(want.numel * want.dtype.itemsize for want in wants[:results])
        about = {"slot": slot, "names": [*self.operands().values()], "seed": self.step_seed}
        try:
            reply = self.remote.ask("derive", **about, size=size)
        except RaisedError as raised:
            word, line = of_exception(raised, "checking the backward")
            if word == CHEATING:
                raise
            self.verdict.notes.append(f"forward only: its backward raises {line}")
            return []
        facts = [*reply["outputs"], *reply.get("gradients", [])]
        for quantity, fact in zip(self.quantities, facts, strict=False):
            if fact is not None and quantity.want is not None:
                self.check_form(fact, self._form(quantity.want), f"{quantity.what}, recorded: ")
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

    def _form(self, want: Output) -> dict:
        device = str(self.device)
        return {"dtype": dtype_name(want.dtype), "device": device, "shape": want.shape}

    def _whole_found(self, place: int, want: Output) -> torch.Tensor:
        step = HALF // want.dtype.itemsize
        pieces = []
        for start in range(0, want.numel, step):
            stop = min(start + step, want.numel)
            self.remote.ask("read_found", index=place, start=start, stop=stop)
            pieces.append(self.take(0, [stop - start], want.dtype))
        return torch.cat(pieces) if pieces else want.eager

    def time_step(self) -> None:
        if not self.has_backward:
            return
        step, self.given = Step.of(self.device.type, self.names, self.rate), []
        self.baselines.is_spent = self.device.type == "cuda"
        self.release()
        try:
            for name in (self.names.again, self.names.eager, self.names.solution):
                contestant = self.renew_step(name)
                contestant.ask("prepare_step", seed=self.step_seed)
                about = {"slot": contestant.slot, "names": contestant.names}
                with suppress(RaisedError):  # of a program that admits no hooks
                    step.kept[name] = int(contestant.ask("kept", **about)["bytes"])
            del step.kept[self.names.again]
            for wanted in (self.task.wanted, CONFIRMATION):
                if not (problems := self._time_step(step, wanted)):
                    break
            else:
                raise FoundError(CHEATING, problems[0])
        except (FoundError, RaisedError) as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            self.verdict.notes.append("no memory for the training step")
            return
        self.verdict.step = step

    def _time_step(self, step: Step, wanted: Rounds) -> list[str]:
        """Adds the times of all contestants, in random order within a round; what no honest run
        gives, in words.
        """
        names, what = self.names, "the training step"
        order = [names.solution, names.eager, names.again]
        whole = Timings(self.device.type, names, self.rate, 0)
        every = (step.forward, step.backward, whole)
        hidden: dict[str, list[tuple[float, float]]] = {name: [] for name in order}
        for timings in every:
            timings.start(order)

        def one_round() -> tuple[list[Samples], str | None]:
            samples, problem = [{}, {}, {}], None
            for name in random.sample(order, len(order)):
                halves, beyond, found = self._step_turn(name)
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

    def _step_turn(self, name: str) -> tuple[list[tuple[float, float]], float, str | None]:
        """Seconds of a forward and of a backward, by both clocks; those beyond; what is wrong."""
        ask, put, take, names, slot = self.renew_step(name)
        waited = self.remote.waited
        if name != self.names.solution:
            waited = partial(self.baselines.waited, name == self.names.again)
        at, before, start = random.random(), waited(), perf_counter()
        reply = ask("time_step", slot=slot, names=names, at=at)
        left_on = ask("left_on")["names"]
        ours = perf_counter() - start - (waited() - before)
        if left_on:
            reason = f"leaves {left_on[0]} on, which may compute a result when it is read"
            raise FoundError(CHEATING, reason[:LONGEST_LINE])
        halves = [(0.0, 0.0), tuple(reply["forward"])]
        if name == self.names.solution:
            self.wants = self.step_wants(at)
            facts = [*reply["outputs"], *reply.get("gradients", [])]
            there = [fact for fact, q in zip(facts, self.quantities, strict=False) if q.want]
            forms = [(fact or {}).get("shape") for fact in there]
            if forms != [shape for shape, _, _ in self.wants]:
                return halves, 0.0, "a timed step gives another kind of result than before"
        halves = [tuple(reply[half]) for half in ("forward", "backward")]
        if not all(type(t) is float and math.isfinite(t) for half in halves for t in half):
            raise ForgedError
        if self.wants:  # of eager too, that the caches are the same for all
            put(*(places for _, places, _ in self.wants))
            ask("look", slot=slot, counts=[len(places) for _, places, _ in self.wants])
        problem = self._wrong_step(take) if name == self.names.solution else None
        return halves, ours - halves[0][0] - halves[1][0], problem

    def _wrong_step(self, take: Callable[..., torch.Tensor]) -> str | None:
        """The fault of the elements that were looked at, in words."""
        start = 0
        there = [(i, quantity) for i, quantity in enumerate(self.quantities) if quantity.want]
        for (index, quantity), (_, _, want) in zip(there, self.wants, strict=True):
            got = self.take(start, [len(want)], want.dtype, take)
            start += got.numel() * got.element_size()
            problem = quantity.want.compare_some(got, want) if len(got) else None
            if index < self.results:
                problem = problem and self.wrong_result(problem, got, want)
            elif difference(got, want) <= STALE:
                problem = None
            if problem:
                return f"a timed step's {quantity.what} was wrong: {problem}"
        return None
