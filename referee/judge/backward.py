"""The backward of a solution: gradients beside the reference's.

Where a sum is near zero, rounding decides whether ReLU passes a gradient: an honest result may
differ there by much. Those places are others for other inputs, so that several are drawn; or the
problem knows them, and the outputs' gradients are zero there.
"""

import copy
import math
import random
from collections.abc import Iterable

import torch
from torch import nn

from referee.child.step import differentiate, draw_gradients, is_differentiable, record
from referee.judge.budget import GROSS, Found, Output
from referee.judge.checks import Checks
from referee.judge.feeding import send
from referee.judge.oracle import SEEDS, parameters_of
from referee.judge.verdict import CHEATING, WRONG, FoundError, of_exception
from referee.reference_file import LONGEST_LINE, flatten
from referee.remote import RaisedError

CHANCE = 0.01  # at most, that so many elements are wrong in all draws, and it is no fault
STRAYS = 0.02  # of elements, that may be wrong in every draw


class Quantity:
    """A result or a gradient, and how far off it was in the draws so far."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.want: Output | None = None  # of this draw; None where the reference has no gradient
        self.found: Found | None = None  # in the last draw
        self.first, self.is_wrong = "", False
        self.relative = self.share = math.inf  # the least of all draws; of elements that are wrong
        self.wrong: torch.Tensor | None = None  # which of them, in every draw
        self.chance = 1.0  # that it is all of these

    def compare(self, got: Iterable[tuple[int, torch.Tensor]], is_strict: bool) -> None:
        """Takes in what the solution gives for a draw; nothing may be wrong if `is_strict`."""
        found = self.found = self.want.compare(got)
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
            is_placed = self.chance * len(self.wrong) < CHANCE * int(self.wrong.sum())
            is_wrong = is_placed or self.share > STRAYS or self.relative > GROSS
        return f"{self.what}: {self.first}" if is_wrong else None


class Backward(Checks):
    """Judges the backward, where the reference and the solution have one."""

    has_backward = False
    # Whether the solution may be the reference for such inputs alone as `get_inputs` draws: its
    # gradients of inputs may then be others, of symmetric matrices, say.
    relies_on_inputs = False

    def clear(self, inputs: list) -> torch.Tensor | None:
        """Where ReLU's side is certain; None if that is not known."""
        return None

    def budget(self, eager: torch.Tensor, exact: torch.Tensor, terms: int) -> Output:
        """What a result or a gradient may be."""
        return Output(eager, None if self.oracle.note else exact, terms)

    def operands(self) -> dict[str, str]:
        """The solution's names of the parameters, by the reference's."""
        theirs = (name for name, _ in self.parameters)
        own = (name for name, _ in parameters_of(self.module))
        return dict(zip(own, theirs, strict=False))

    def derive(
        self, module: nn.Module, inputs: list, given: list[torch.Tensor] | None = None
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """The reference's outputs, then gradients; and those of the outputs."""
        arguments, wanted = record(module.state_dict(keep_vars=True), inputs, list(self.operands()))
        with torch.enable_grad():
            _, outputs = flatten(module(*arguments))
            given = given or draw_gradients(outputs, self.step_seed)
            gradients = differentiate(outputs, wanted, given)
        return [*(y.detach() for y in outputs), *gradients], given

    def check_backward(self, draws: list[list]) -> None:
        """Gradients for some inputs, where the reference and the solution have them."""
        self.progress("checking", "the backward")
        self.has_backward, self.step_seed = False, random.randrange(SEEDS)
        self.quantities: list[Quantity] = []
        for inputs in draws:
            self.feed(inputs)
            clear = self.clear(inputs)
            if not (self._expect(inputs, clear) and self._ask_gradients()):
                return
            self.verdict.count += 1
            for turn, quantity in enumerate(self.quantities):
                if quantity.want:
                    quantity.compare(self.read(turn, quantity.want), clear is not None)
        wrong = {q.what: problem for q in self.quantities if (problem := q.problem())}
        first = len(self.quantities) - len(self.operands())
        of_inputs = {q.what for q in self.quantities[self.results : first]}
        if not wrong:
            self.has_backward = True
        elif wrong.keys() <= of_inputs and self.relies_on_inputs:
            self.verdict.notes.append(f"forward only: another {', another '.join(wrong)}")
        else:
            raise FoundError(WRONG, "; ".join(wrong.values())[:LONGEST_LINE])

    def _expect(self, inputs: list, clear: torch.Tensor | None) -> bool:
        """Sets what the `quantities` are for inputs; whether there are gradients."""
        try:
            eager, given = self.derive(copy.deepcopy(self.module), inputs)
            if clear is not None:
                given = [g * clear for g in given]
                eager, _ = self.derive(copy.deepcopy(self.module), inputs, given)
                send(self.remote, None, given)
            exact = eager
            if not self.oracle.note:
                wide = [x.double() if is_differentiable(x) else x for x in inputs]
                doubled = [g.double() for g in given]
                exact, _ = self.derive(copy.deepcopy(self.module).double(), wide, doubled)
        except Exception:  # whatever a reference file raises
            return False
        count = sum(map(is_differentiable, inputs))
        operands = ["x"] if count == 1 else [f"input {i}" for i in range(count)]
        gradients = [f"gradient of {name}" for name in [*operands, *self.operands()]]
        self.results = len(eager) - len(gradients)  # how many of the quantities are results
        names = [*(f"result {i}" for i in range(self.results)), *gradients]
        terms = max(y.numel() for y in eager[: self.results])
        self.quantities = self.quantities or list(map(Quantity, names))
        for quantity, x, y in zip(self.quantities, eager, exact, strict=True):
            was, quantity.want = quantity.want, None
            if x is None:
                continue
            if x.layout != torch.strided or (was and was.shape != list(x.shape)):
                return False  # sparse, or of a size that depends on values
            quantity.want = self.budget(x, y, terms)
        return any(x is not None for x in eager[self.results :])

    def _ask_gradients(self) -> bool:
        """Has the child compute the `quantities`; whether the solution has a backward."""
        wants = [quantity.want for quantity in self.quantities]
        size = sum(want.numel * want.dtype.itemsize for want in wants[: self.results])
        about = {"names": [*self.operands().values()], "seed": self.step_seed, "size": size}
        try:
            reply = self.remote.ask("derive", **about)
        except RaisedError as raised:
            word, line = of_exception(raised, "checking the backward")
            if word == CHEATING:
                raise
            self.verdict.notes.append(f"forward only: its backward raises {line}")
            return False
        facts, missing = reply["results"], []
        for quantity, fact in zip(self.quantities, facts, strict=False):
            if quantity.want and fact.get("type") == "NoneType":
                missing.append(quantity.what)
            elif quantity.want:
                self.check_form(fact, quantity.want, f"{quantity.what}, recorded: ")
        if len(facts) != len(wants):
            raise FoundError(WRONG, "a recorded forward returns another kind of result than before")
        if missing:
            every = sum(want is not None for want in wants[self.results :])
            none = f": no {', no '.join(missing)}" if len(missing) < every else ""
            self.verdict.notes.append(f"forward only{none}"[:LONGEST_LINE])
        return not missing
