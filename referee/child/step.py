"""The requests of the backward: gradients, the bytes kept for them, the time of a training step."""

from functools import partial

import torch
from torch import nn
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks

from referee import cases
from referee.child import watch
from referee.child.feed import MOST_PARTS
from referee.child.results import take_apart
from referee.child.yardsticks import COMPILED

_grad, _recording = grad, torch.enable_grad
_synchronize = torch.cuda.synchronize


def is_differentiable(x: object) -> bool:
    """Whether x can have a gradient."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 0


def record(module: nn.Module, inputs: list, names: list[str]) -> tuple[list, list[torch.Tensor]]:
    """Arguments that autograd records, and what gradients are wanted of: these, and parameters."""
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
    """The gradients of what is wanted, from those of outputs; None where none depends on it."""
    floats = (y for y in outputs if y.is_floating_point())
    recorded = [pair for pair in zip(floats, given, strict=True) if pair[0].requires_grad]
    asked = [x for x in wanted if x.requires_grad]
    if not recorded or not asked:
        return [None for _ in wanted]
    ys, theirs = zip(*recorded, strict=True)
    found = iter(_grad(ys, asked, theirs, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in wanted]


def change_late(given: list[torch.Tensor], at: float) -> None:
    """Changes the sign of a row of gradients of outputs, at a place from 0 to 1."""
    for x in given[:MOST_PARTS]:
        (x[int(at * len(x))] if x.dim() and len(x) else x).neg_()


class Step:
    """These requests, of a `Worker`."""

    def derive(self, names: list[str], seed: int, size: int) -> dict:
        """One forward that autograd records, and its backward: results, then gradients of inputs,
        and of parameters by name.

        Args:
            seed: of the outputs' gradients, where none are staged.
            size: bytes of the outputs, where poison is to lie.
        """
        watch.poison(size, self.device)
        arguments, wanted = record(self.module, self.ring[0], names)
        with _recording():
            output = self.module(*arguments)
            _, _, outputs = take_apart(output, keeps_record=True)
            if any(y is None for y in outputs):
                return self.keep(output)
            given = [g.to(self.device) for g in self.staged] or draw_gradients(outputs, seed)
            self.staged = []
            gradients = differentiate(outputs, wanted, given)
        if self.device.type == "cuda":
            _synchronize(self.device)
        return self.keep([*(y.detach() for y in outputs), *gradients])

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
        """Makes room for timed steps: on a GPU one slot of the ring is left, and no yardstick."""
        self.output, self.given, self.seed = None, [], seed
        if self.device.type == "cuda":
            self.ring = self.ring[:1]
            self.calls = {n: c for n, c in self.calls.items() if n in ("module", COMPILED)}
            torch.cuda.empty_cache()
        return {}

    def time_step(self, call: str, names: list[str], at: float) -> dict:
        """Times a forward that autograd records, and its backward; `at` as of `change_late`."""
        arguments, wanted = record(self.module, self.ring[0], names)
        with _recording():
            forward = self.clocked(call, arguments)
            _, _, outputs = take_apart(self.output, keeps_record=True)
            if any(y is None for y in outputs):  # `pick` tells of it
                return {"forward": forward, "backward": [0.0, 0.0]}
            self.given = self.given or draw_gradients(outputs, self.seed)
            late = partial(change_late, self.given, at)
            differ = partial(differentiate, wanted=wanted, given=self.given)
            gradients, *backward = self.clock.time(differ, outputs, late)
        self.output = [*(y.detach() for y in outputs), *gradients]
        return {"forward": forward, "backward": backward}
