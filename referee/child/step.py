"""The requests of the backward: gradients, the bytes kept for them, the time of a training step."""

import torch
from torch import nn
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks

from referee import cases
from referee.child import watch
from referee.child.feed import MOST_PARTS
from referee.child.results import form_of, take_apart
from referee.child.yardsticks import COMPILED

_grad, _recording = grad, torch.enable_grad
_synchronize = torch.cuda.synchronize


def is_differentiable(x: object) -> bool:
    """Whether x can have a gradient."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 0


def record(module: nn.Module, inputs: list, names: list[str]) -> tuple[list, list[torch.Tensor]]:
    """The arguments of a forward that autograd records, and what gradients are wanted of.

    Args:
        names: of parameters.
    """
    arguments = [x.detach().requires_grad_() if is_differentiable(x) else x for x in inputs]
    state = module.state_dict(keep_vars=True)
    wanted = [x for x in arguments if is_differentiable(x)]
    return arguments, wanted + [state[name] for name in names]


def draw_gradients(outputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """A gradient for each output of floats, whether or not it has been recorded."""
    return [
        cases.draw(torch.empty(y.shape, dtype=y.dtype, device=y.device), seed + turn)
        for turn, y in enumerate(outputs)
        if y.is_floating_point()
    ]


def differentiate(
    outputs: list[torch.Tensor], wanted: list[torch.Tensor], given: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients of what is wanted, None where an output does not depend on it.

    Args:
        given: as `draw_gradients` makes them.
    """
    floats = (y for y in outputs if y.is_floating_point())
    recorded = [pair for pair in zip(floats, given, strict=True) if pair[0].requires_grad]
    asked = [x for x in wanted if x.requires_grad]
    if not recorded or not asked:
        return [None for _ in wanted]
    ys, theirs = zip(*recorded, strict=True)
    found = iter(_grad(ys, asked, theirs, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in wanted]


def late_row(x: torch.Tensor, at: float) -> torch.Tensor:
    """The row of an output's gradient of which the sign changes before a timed backward."""
    return x[int(at * len(x))] if x.dim() and len(x) else x


class Step:
    """These requests, of a `Worker`; `found` is what they give: outputs, then gradients."""

    def derive(self, names: list[str], seed: int, size: int) -> dict:
        """One forward that autograd records, and its backward.

        Args:
            names: of the parameters whose gradients are wanted, beside those of inputs.
            seed: of the outputs' gradients, where none are staged.
            size: bytes of the outputs, where poison is to lie.
        """
        self.found, self.given = [], []
        watch.poison(size, self.device)
        arguments, wanted = record(self.module, self.ring[0], names)
        with _recording():
            structure, facts, outputs = take_apart(self.module(*arguments), keeps_record=True)
            reply = {"structure": structure, "outputs": facts}
            if any(y is None for y in outputs):
                return reply
            given = [g.to(self.device) for g in self.staged] or draw_gradients(outputs, seed)
            self.staged = []
            gradients = differentiate(outputs, wanted, given)
        return reply | self._keep(facts, outputs, gradients)

    def _keep(self, facts: list[dict], outputs: list, gradients: list) -> dict:
        """Describes outputs and gradients, None where there is none, and keeps them if all are
        plain: a `place` is that in `found`.
        """
        if self.device.type == "cuda":
            _synchronize(self.device)
        _, own, there = take_apart([g for g in gradients if g is not None])
        if all(g is not None for g in there):
            self.found = [y.detach() for y in outputs] + there
            for place, (fact, x) in enumerate(zip([*facts, *own], self.found, strict=True)):
                fact |= form_of(x) | {"place": place}
        own = iter(own)
        return {
            "recorded": any(y.requires_grad for y in outputs),
            "gradients": [None if g is None else next(own) for g in gradients],
        }

    def read_found(self, index: int, start: int, stop: int) -> dict:
        """Elements of one of these, in order."""
        self.found[index] = self.found[index].contiguous()
        self.send(self.found[index].view(-1)[start:stop], 0)
        return {}

    def kept(self, names: list[str]) -> dict:
        """Bytes that autograd keeps for the backward, beyond inputs and parameters."""
        arguments, _ = record(self.module, self.ring[0], names)
        kept: dict[int, int] = {}

        def pack(saved: torch.Tensor) -> torch.Tensor:
            storage = saved.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return saved

        with _recording(), saved_tensors_hooks(pack, lambda saved: saved):
            self.module(*arguments)
        for there in (*arguments, *self.module.parameters()):
            if isinstance(there, torch.Tensor):
                kept.pop(there.untyped_storage().data_ptr(), None)
        return {"bytes": sum(kept.values())}

    def prepare_step(self, seed: int) -> dict:
        """Makes room for timed steps: on a GPU one slot of the ring is left, and no yardstick.

        Args:
            seed: of the outputs' gradients.
        """
        self.write()
        self.outputs, self.output = [], None
        self.found, self.given, self.seed = [], [], seed
        if self.device.type == "cuda":
            self.ring = self.ring[:1]
            self.calls = {n: c for n, c in self.calls.items() if n in ("module", COMPILED)}
            torch.cuda.empty_cache()
        return {}

    def time_step(self, call: str, names: list[str], at: float) -> dict:
        """Times a forward that autograd records, and its backward.

        Args:
            at: which row of the outputs' gradients changes its sign, from 0 to 1.
        """
        self.found, self.output = [], None
        self.awake.fill_(0)
        self.called = call
        arguments, wanted = record(self.module, self.ring[0], names)
        with _recording():
            output, *forward = self.clock.time(self.calls[call], arguments, self.write)
            structure, facts, outputs = take_apart(output, keeps_record=True)
            reply = {"structure": structure, "outputs": facts, "forward": forward}
            if any(y is None for y in outputs):
                return reply
            self.given = self.given or draw_gradients(outputs, self.seed)
            gradients, *backward = self.clock.time(
                lambda outputs: differentiate(outputs, wanted, self.given),
                outputs,
                lambda: [late_row(given, at).neg_() for given in self.given[:MOST_PARTS]],
            )
        return reply | {"backward": backward} | self._keep(facts, outputs, gradients)

    def look(self, turns: list[int], counts: list[int], keep: bool) -> dict:
        """Elements of what was found, in the order of the places that came in: so many of each.

        All that was found is gone then, for a solution that kept it, too.

        Args:
            turns: which results and gradients are looked at.
            keep: outputs may lie in memory that is not theirs.
        """
        places, end = self.incoming.view(torch.int64), 0
        for turn, count in zip(turns, counts, strict=True):
            x = self.found[turn]
            some, places = places[:count].to(x.device), places[count:]
            end += self.send(x.contiguous().view(-1)[some], end)
        theirs = [x for x in self.ring[0] if isinstance(x, torch.Tensor)]
        found, self.found = self.found, []
        for x in [] if keep else found:
            self.take_away(x, [*theirs, *self.given])
        return {}
