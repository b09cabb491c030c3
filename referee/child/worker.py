"""The requests that a process of a solution, or of eager, answers."""

import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from types import ModuleType

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import model
from referee import cases, clock, compare, reference_file
from referee.child import watch, yardsticks
from referee.child.caught import Caught
from referee.child.feed import Feed, flat, flat_bytes, unpack
from referee.child.results import PLAIN, take_apart
from referee.child.step import change_late, differentiate, draw_gradients, record

CLOCKS = (clock.CpuClock, clock.CudaClock)

_recording, _set_precision = torch.enable_grad, torch.set_float32_matmul_precision
share_memory, synchronize = compare.share_memory, torch.cuda.synchronize


class Worker(Feed):
    """Each method is a request, by its name; the reply is the dictionary that it may return."""

    def __init__(self, arena: torch.Tensor, device: torch.device) -> None:
        super().__init__(arena, device)
        self.solution: ModuleType | None = None
        self.file, self.clock = "", None
        # The C library maps blocks afresh, at a page fault each 4 KiB, from a size on that grows
        # with what was freed, to 32 MiB: all processes are to have the same.
        torch.empty(31 << 20, dtype=torch.uint8)
        self.awake = torch.empty(1 << 18, device=device)  # enough for all threads
        self.before: dict[str, object] = {}
        self.was_on = watch.left_on()

    def build(self, names: list[str]) -> None:
        """Builds this project's kernels, of all problems at the same time."""
        sys.path.insert(0, str(Path(model.__file__).parent))
        importlib.import_module("model_new")

    def warm_compiler(self) -> None:
        """Compiles something, because the first time takes seconds. `prepare` reports failures."""
        with suppress(Exception):
            torch.compile(torch.relu)(torch.ones(8, device=self.device))

    def name_source(self, path: str | None, problem: str, shape: list[int], dtype: str) -> None:
        """Takes the inputs, and for now the module, of a reference file, or of a problem."""
        if path is None:
            known = model.PROBLEMS[problem]
            self.source = reference_file.of_problem(known, shape, getattr(torch, dtype))
        else:
            self.source = reference_file.load(Path(path))
        self.kind = self.source.model if self.solution is None else self._kind(problem)

    def _kind(self, problem: str) -> Callable:
        """The solution's class: with the name of the problem's reference and New, or ModelNew."""
        known = model.PROBLEMS.get(problem)
        name = f"{known.reference.__name__}New" if known else "ModelNew"
        kind = getattr(self.solution, name, None) or getattr(self.solution, "ModelNew", None)
        if not callable(kind):
            raise AttributeError("the file defines no ModelNew")
        return kind

    def load(self, path: str, problem: str) -> dict:
        """Imports the solution, and notes what is set."""
        self.before = watch.state(self.device)
        self.file, self.caught = path, Caught(path)
        sys.path.insert(0, str(Path(path).parent))
        start = perf_counter()
        with self.caught.tracing(self.caught.note_import):
            self.solution = reference_file.import_file("solution", path)
        self.kind = self._kind(problem)
        return {"seconds": perf_counter() - start}

    def set_precision(self, setting: str) -> None:
        """Of float32 products, for all that follows."""
        _set_precision(setting)
        self.before["the matrix product's precision"] = setting

    def new(self, args: str, seed: int, dtype: str) -> dict:
        """Constructs the module under a seed, in its own dtype if none is named; its state."""
        torch.manual_seed(seed)
        self.module = self.kind(*unpack(args))
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"ModelNew made a {type(self.module).__name__}, not a module")
        self.module.to(self.device, getattr(torch, dtype) if dtype else None)
        state = self.module.state_dict()
        for value in state.values():  # another kind may see what is altered before a timed call
            if type(value) not in PLAIN:
                raise TypeError(f"its state holds a {type(value).__name__}, not a plain tensor")
        return {"state": [[name, list(value.shape)] for name, value in state.items()]}

    def attribute(self, name: str, value: float) -> dict:
        """Assigns an attribute that the module has; whether it has."""
        if there := hasattr(self.module, name):
            setattr(self.module, name, value)
        return {"there": there}

    def library(self, ops: list[str], all_of_them: bool) -> dict:
        """The operators that a forward calls, none or `all_of_them`, and exceptions behind them."""
        inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in self.ring[0]]
        seen = watch.Seen()
        with seen, self.caught.tracing(self.caught.note_call):
            self.module(*inputs)
        called = [op for op in ops if op in seen.names]
        if all_of_them and len(called) < len(ops):
            called = []
        handled = filter(None, map(seen.names.get, called))
        return {"library": called, "swallowed": [*handled, *self.caught.behind_calls()]}

    def changes(self) -> dict:
        """The names of what the solution changed that is not its own."""
        now = watch.state(self.device)
        changed = [n for n, was in self.before.items() if n in now and watch.differs(was, now[n])]
        if self.clock and type(self.clock) not in CLOCKS:
            changed.append("the referee's clock")
        for own in filter(None, (self, self.clock)):
            kind = type(own)
            changed += [f"{kind.__name__}.{name}" for name in vars(own) if hasattr(kind, name)]
        return {"changed": changed[:5]}

    def forward(self, bait: list | None, size: int, fill: bool) -> dict:
        """One forward on the first inputs, while torch fills new memory if `fill`.

        Args:
            bait: shape, dtype and seed of what a program finds that looks for the expected result.
            size: bytes of the outputs, where poison is to lie.
        """
        earlier, inputs = self.results, self.ring[0]
        self.results, expected = [], None
        if bait:
            shape, dtype, seed = bait
            expected = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            cases.draw(expected, seed, unit=True)
        was = _geometry(inputs)
        watch.poison(size, self.device)
        with watch.nan_in_new_memory() if fill else nullcontext():
            output = self._forward(inputs, expected)
        reply = self.keep(output)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        for fact, y in zip(reply["results"], self.results, strict=True):
            if y is not None:
                fact["shares_input"] = any(share_memory(y, x) for x in tensors)
                fact["shares_earlier"] = any(share_memory(y, x) for x in earlier)
        return reply | {"moved": was != _geometry(inputs)}

    def _forward(self, inputs: list, expected: torch.Tensor | None) -> object:
        # `expected` is there to be found in this frame; it is random.
        output = self.module(*inputs)
        if self.device.type == "cuda":
            synchronize(self.device)
        return output

    def keep(self, results: object) -> dict:
        """Takes results apart, that they can be read; what they say of themselves."""
        structure, facts, self.results = take_apart(results)
        for fact, x in zip(facts, self.results, strict=True):
            if x is not None:
                fact |= {"dtype": cases.dtype_name(x.dtype), "device": str(x.device)}
                fact["shape"] = list(x.shape)
        return {"structure": structure, "results": facts}

    def derive(self, names: list[str], seed: int, size: int) -> dict:
        """One forward that autograd records, and its backward: results, then gradients of inputs,
        and of parameters by name. The outputs' gradients are staged, or else drawn from the seed.
        """
        watch.poison(size, self.device)
        arguments, wanted = record(self.there, self.ring[0], names)
        with _recording():
            output = self.module(*arguments)
            _, _, outputs = take_apart(output, keeps_record=True)
            if any(y is None for y in outputs):
                return self.keep(output)
            given = [g.to(self.device) for g in self.staged] or draw_gradients(outputs, seed)
            self.staged = []
            gradients = differentiate(outputs, wanted, given)
        if self.device.type == "cuda":
            synchronize(self.device)
        return self.keep([*(y.detach() for y in outputs), *gradients])

    def read(self, index: int, start: int, stop: int, is_input: bool = False) -> None:
        """Elements of a result or a gradient, in order; or bytes of an input's memory."""
        if is_input:
            x = flat_bytes(self.ring[0][index])
        else:
            x = self.results[index] = self.results[index].contiguous()
        self.send(x.view(-1)[start:stop], 0)

    def probe(self) -> dict:
        """Whether the results of an input are finite."""
        _, _, leaves = take_apart(self._forward(self.ring[0], None))
        floats = [leaf for leaf in leaves if leaf is not None and leaf.is_floating_point()]
        return {"finite": all(bool(leaf.isfinite().all()) for leaf in floats)}

    def prepare(self, wanted: list[str], copied: int) -> dict:
        """Sets what can be timed: the module, and yardsticks by name, or notes why not."""
        self.calls, notes = {"module": lambda inputs: self.module(*inputs)}, []
        for name in wanted:
            try:
                self.calls |= yardsticks.make(name, self.module, self.ring[0], copied)
            except Exception as error:  # no Triton, no such function: a yardstick is missing
                reason = str(error).strip().splitlines() or [type(error).__name__]
                notes.append(f"{name} is left out: {reason[0]}")
        is_cuda = self.device.type == "cuda"
        self.clock = clock.CudaClock(self.device) if is_cuda else clock.CpuClock()
        return {"names": [name for name in self.calls if name != "module"], "notes": notes}

    def time(self, slot: int, call: str) -> dict:
        """Times one call."""
        return {"forward": self.clocked(call, self.ring[slot])}

    def kept(self, names: list[str]) -> dict:
        """Bytes that autograd keeps for the backward, beyond inputs and parameters."""
        arguments, _ = record(self.there, self.ring[0], names)
        kept: dict[int, int] = {}

        def pack(saved: torch.Tensor) -> torch.Tensor:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            return saved

        with _recording(), saved_tensors_hooks(pack, lambda saved: saved):
            self.module(*arguments)
        for there in (*arguments, *self.module.parameters()):
            if isinstance(there, torch.Tensor):
                kept.pop(there.untyped_storage().data_ptr(), None)
        return {"bytes": sum(kept.values())}

    def prepare_step(self, seed: int) -> None:
        """Makes room for timed steps: on a GPU one slot of the ring is left, and no yardstick."""
        self.output, self.given, self.seed = None, [], seed
        if self.device.type == "cuda":
            self.ring, kept = self.ring[:1], ("module", yardsticks.COMPILED)
            self.calls = {n: c for n, c in self.calls.items() if n in kept}
            torch.cuda.empty_cache()

    def time_step(self, call: str, names: list[str], at: float) -> dict:
        """Times a forward that autograd records, and its backward; `at` as of `change_late`."""
        arguments, wanted = record(self.there, self.ring[0], names)
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

    def clocked(self, call: str, arguments: list) -> list[float]:
        """The seconds of a call by both clocks, with a CPU's threads awake; keeps its output."""
        self.awake.fill_(0)
        self.called = call
        self.output, *seconds = self.clock.time(self.calls[call], arguments, self.write)
        return seconds

    def left_on(self) -> dict:
        """The modes, hooks and timers that a call left on: they could compute its result later.

        Nothing is called that it could intercept; and the answer comes when the call is over.
        """
        return {"names": [name for name in watch.left_on() if name not in self.was_on]}

    def pick(self, slot: int, sizes: list[int], inputs: list[int], count: int, keep: bool) -> dict:
        """Elements of the last timed call's results and of its inputs, if the sizes are right.

        Args:
            sizes: the elements of each result; 0 where none is looked at.
            inputs: which are looked at.
            count: of the places that came in for each of all these.
            keep: results may lie in memory that is not theirs.
        """
        reply = self.keep(self.output)
        results, self.output, self.results = self.results, None, []
        pairs = [pair for pair in zip(results, sizes, strict=False) if pair[1]]
        is_right = all(x is not None and x.numel() == size for x, size in pairs)
        if not is_right or len(results) != len(sizes):
            return reply
        looked = [x.contiguous().view(-1) for x, _ in pairs]
        looked += [flat(self.ring[slot][index]) for index in inputs]
        places, end = self.incoming.view(torch.int64), 0
        for turn, x in enumerate(looked):
            some = places[turn * count : (turn + 1) * count]
            end += self.send(x[some.to(x.device)], end)
        theirs = [x for x in (*self.ring[slot], *self.given) if isinstance(x, torch.Tensor)]
        for x in results:
            if x is not None and not keep:
                self.take_away(x, theirs)
        return reply

    def take_away(self, result: torch.Tensor, inputs: list) -> None:
        """Frees the memory of a module's timed result, for a solution that kept it, too."""
        if self.called != "module" or any(share_memory(result, x) for x in inputs):
            return
        try:
            result.untyped_storage().resize_(0)
        except RuntimeError:  # not torch's memory
            with torch.inference_mode():  # where the result may be from
                result.fill_(77)


def _geometry(inputs: list) -> list[tuple]:
    """Where tensors lie."""
    return [(x.data_ptr(), x.shape, x.stride()) for x in inputs if isinstance(x, torch.Tensor)]
