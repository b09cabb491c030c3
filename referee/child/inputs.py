"""The requests of reference files: any number of inputs and outputs, which come in whole."""

import time
from functools import partial
from pathlib import Path

import torch

import model
from referee import cases, clock, correctness, reference_file, relu
from referee.child.results import form_of, take_apart
from referee.child.worker import Worker, share_memory, synchronize, unpack

ALIGNMENT = 16  # of every tensor in the mapped file
PART = 16  # what changes last before a timed call is a sixteenth of a tensor, or as much as fits in
LARGEST_PART = 1 << 22  # bytes
MOST_PARTS = 16  # that change last: launched while a GPU's L2 is flushed

_sleep = time.sleep


class InputsWorker(Worker):
    """See `Worker`. A slot of the ring holds the arguments of a forward."""

    def __init__(self, arena: torch.Tensor, device: torch.device) -> None:
        super().__init__(arena, device)
        self.source: reference_file.ReferenceFile | None = None
        self.staged: list[torch.Tensor] = []
        self.base: dict[str, torch.Tensor] = {}  # parameters, of which others are made

    def load_reference(self, path: str | None, problem: str, rows: int) -> dict:
        """Takes the inputs, and for now the module, of a reference file, or of a problem."""
        if path is None:
            self.source = reference_file.of_problem(model.PROBLEMS[problem], rows)
        else:
            self.source = reference_file.load(Path(path))
        self.kind = self.source.model
        return {}

    def allocate(self, slots: int, inputs: str) -> dict:
        """A ring of inputs.

        Args:
            inputs: packed; tensors as (shape, strides, dtype), other values as (value,).
        """
        self.output, self.outputs, self.ring = None, [], []
        for _ in range(slots):
            self.ring.append([self._blank(spec, self.device) for spec in unpack(inputs)])
        return {}

    def stage(self, tensors: str) -> dict:
        """Room for a state, or for inputs, that come in, as `allocate` has it."""
        self.staged = [self._blank(spec, torch.device("cpu")) for spec in unpack(tensors)]
        return {}

    def feed(self, slot: int | None, index: int, start: int, size: int) -> dict:
        """Bytes of an input, or of what is staged."""
        into = self.staged if slot is None else self.ring[slot]
        flat_bytes(into[index])[start : start + size].copy_(self.incoming[:size])
        return {}

    def sums(self) -> dict:
        """The sum of each tensor of the state, in order."""
        values = self.module.state_dict().values()
        return {"sums": [value.double().sum().item() for value in values]}

    def load_state(self, names: list[str]) -> dict:
        """Loads what is staged, or nothing; keeps it, that other parameters can be made of it."""
        state, there = dict(zip(names, self.staged, strict=False)), self.module.state_dict()
        if state:
            more = {} if len(state) == len(there) else {"strict": False}
            self.module.load_state_dict(state, **more)
        there = state or there
        self.base = {name: there[name].detach().to(self.device, copy=True) for name in names}
        self.staged = []
        return {}

    def renew(
        self, slot: int, draw: int | None, names: list, seed: int, at: float, is_timed: bool
    ) -> dict:
        """Gives the inputs of a slot, and the parameters, values that no version tells of.

        Args:
            draw: the seed of the inputs; None for those that are staged, or none.
            names: of the parameters, each with what is added to its seed.
            at: where the part begins that changes last, from 0 to 1.
            is_timed: for the next timed call.
        """
        fresh, self.staged = self.staged, []
        if draw is not None:
            fresh = self.source.draw(draw, self.device)
        for x, values in zip(self.ring[slot], fresh, strict=False):
            if isinstance(x, torch.Tensor):
                self._replace(x.data, values.to(self.device), at)
        there = self.module.state_dict() if names else {}
        for name, turn in names:
            self._replace(there[name].data, cases.redraw(self.base[name], seed + turn), at)
        if not is_timed:
            self.write()
        if self.device.type == "cuda":
            synchronize(self.device)
        return {}

    def _replace(self, x: torch.Tensor, values: torch.Tensor, at: float) -> None:
        """Overwrites x, a part of it not before `write`: after the flush of a GPU's L2.

        A call that works on another stream meanwhile reads old values there. The part is small, for
        what is written last lies in the L2.
        """
        same = x.dtype == values.dtype and x.stride() == values.stride()
        if not (same and x.numel()) or len(self.writes) == MOST_PARTS:
            x.copy_(values)
            return
        old, new = _flat(x), _flat(values)
        size = max(1, min(len(old) // PART, LARGEST_PART // x.element_size()))
        start = int(at * (len(old) - size))
        part = slice(start, start + size)
        late = new[part].clone()
        new[part] = old[part]
        old.copy_(new)
        self.writes.append(partial(old[part].copy_, late))

    def digest(self, slot: int) -> dict:
        """The sum of the bits of each input."""
        tensors = [x for x in self.ring[slot] if isinstance(x, torch.Tensor)]
        return {"sums": [sum_of_bits(x) for x in tensors]}

    def forward(self, bait: list | None, size: int, fill: bool) -> dict:
        """One forward on the first inputs.

        Args:
            bait: shape, dtype and seed of what a program finds that looks for the expected result.
            size: bytes of the outputs, where poison is to lie.
            fill: while torch fills new memory.
        """
        earlier, inputs = self.outputs, self.ring[0]
        self.output, self.outputs, expected = None, [], None
        if bait:
            shape, dtype, seed = bait
            expected = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            cases.draw_rows(expected, seed, unit=True)
        correctness.poison(size, self.device)
        if fill:
            with correctness.nan_in_new_memory(warn_only=True):
                output = self._forward(inputs, expected)
        else:
            output = self._forward(inputs, expected)
        return self._hand_over(output, inputs, earlier)

    def _forward(self, inputs: list, expected: torch.Tensor | None) -> object:
        # `expected` is there to be found in this frame; it is random.
        output = self.module(*inputs)
        if self.device.type == "cuda":
            synchronize(self.device)
        return output

    def _hand_over(self, output: object, inputs: list, earlier: list) -> dict:
        structure, facts, self.outputs = take_apart(output)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        for fact, leaf in zip(facts, self.outputs, strict=True):
            if leaf is None:
                self.outputs = []
                break
            fact |= form_of(leaf) | {
                "shares_input": any(share_memory(leaf, x) for x in tensors),
                "shares_earlier": any(share_memory(leaf, x) for x in earlier),
            }
        return {"structure": structure, "outputs": facts}

    def read(self, output: int, start: int, stop: int) -> dict:
        """Elements of an output, in order."""
        self.outputs[output] = self.outputs[output].contiguous()
        self.send(self.outputs[output].view(-1)[start:stop], 0)
        return {}

    def read_input(self, slot: int, index: int, start: int, stop: int) -> dict:
        """Bytes of an input, in the order of its memory."""
        self.send(flat_bytes(self.ring[slot][index])[start:stop], 0)
        return {}

    def wait(self, seconds: float) -> dict:
        """Leaves time for what is still to be written."""
        _sleep(seconds)
        return {}

    def probe(self, slot: int) -> dict:
        """Whether the results of an input are finite."""
        _, _, leaves = take_apart(self._forward(self.ring[slot], None))
        floats = [leaf for leaf in leaves if leaf is not None and leaf.is_floating_point()]
        return {"finite": all(bool(leaf.isfinite().all()) for leaf in floats)}

    def arguments(self, slot: int | None) -> list:
        return self.ring[slot or 0]

    def call_once(self) -> None:
        inputs = self.ring[0]
        self.module(*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs))

    def prepare(self, copied: int) -> dict:
        """Sets what can be timed: the module, and copies of so many bytes, if any."""
        self.calls = {"module": lambda inputs: self.module(*inputs)}
        if copied:
            source, target = (
                torch.zeros(copied, dtype=torch.uint8, device=self.device) for _ in range(2)
            )
            for name, copy in relu.copies(target).items():
                self.calls[name] = lambda inputs, copy=copy: copy(source)
        is_cuda = self.device.type == "cuda"
        self.clock = clock.CudaClock(self.device) if is_cuda else clock.CpuClock()
        return {"names": [name for name in self.calls if name != "module"]}

    def pick(self, slot: int, outputs: int, inputs: list[int], count: int, keep: bool) -> dict:
        """Elements of the last timed call's outputs and of its inputs.

        Args:
            outputs: how many there are.
            inputs: which are looked at.
            count: of the places that came in for each of all these.
            keep: outputs may lie in memory that is not theirs.
        """
        structure, facts, leaves = take_apart(self.output)
        self.output = None
        if len(leaves) != outputs or any(leaf is None for leaf in leaves):
            return {"structure": structure, "outputs": facts}
        looked = [leaf.contiguous().view(-1) for leaf in leaves]
        looked += [_flat(self.ring[slot][index]) for index in inputs]
        places, end = self.incoming.view(torch.int64), 0
        for turn, flat in enumerate(looked):
            some = places[turn * count : turn * count + min(count, len(flat))]
            end += self.send(flat[some.to(flat.device)], end)
            end = -(-end // ALIGNMENT) * ALIGNMENT
        tensors = [x for x in self.ring[slot] if isinstance(x, torch.Tensor)]
        for fact, leaf in zip(facts, leaves, strict=True):
            fact |= form_of(leaf)
            if not keep:
                self.take_away(leaf, tensors)
        return {"structure": structure, "outputs": facts}

    @staticmethod
    def _blank(spec: tuple, device: torch.device) -> object:
        if len(spec) == 1:
            return spec[0]
        shape, strides, dtype = spec
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


def flat_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor."""
    return _flat(x).view(torch.uint8)


def sum_of_bits(x: torch.Tensor) -> int:
    """The sum of the bytes of a dense tensor, as whole numbers where they fill some."""
    flat = flat_bytes(x)
    words = len(flat) // 4 * 4
    rest = flat[words:].sum(dtype=torch.int64)
    return (flat[:words].view(torch.int32).sum(dtype=torch.int64) + rest).item()


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.data.as_strided((x.numel(),), (1,))
