"""The requests of reference files: any number of inputs and outputs, which come in whole."""

import time
from functools import partial
from pathlib import Path

import torch

from referee import cases, clock, correctness, reference_file, relu
from referee.child.worker import PLAIN, Worker, share_memory, synchronize, unpack
from referee.structure import flatten

ALIGNMENT = 16  # of every tensor in the mapped file

_sleep = time.sleep


class InputsWorker(Worker):
    """See `Worker`. A slot of the ring holds the arguments of a forward."""

    def __init__(self, arena: torch.Tensor, device: torch.device) -> None:
        super().__init__(arena, device)
        self.staged: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def load_reference(self, path: str) -> dict:
        """Takes the module of a reference file for the solution."""
        self.kind = reference_file.load(Path(path)).model
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
        """Room for a state that comes in, as `allocate` has it."""
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
        """Loads what is staged."""
        self.module.load_state_dict(dict(zip(names, self.staged, strict=True)))
        self.staged = []
        return {}

    def patch(self, slot: int, changes: list, is_timed: bool) -> dict:
        """Overwrites a part of an input: for each, its index, and the range in each dimension.

        Args:
            is_timed: in the next timed call.
        """
        start = 0
        for index, ranges in changes:
            x = self.ring[slot][index].data
            part = x[tuple(slice(*ends) for ends in ranges)]
            end = start + part.numel() * x.element_size()
            values = self.incoming[start:end].view(x.dtype).view(part.shape)
            self.writes.append(partial(part.copy_, values.to(self.device, copy=True)))
            start = -(-end // ALIGNMENT) * ALIGNMENT
        if not is_timed:
            self.write()
        if self.device.type == "cuda":
            synchronize(self.device)
        return {}

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
        structure, leaves = flatten(output)
        facts, tensors = [], [x for x in inputs if isinstance(x, torch.Tensor)]
        for leaf in leaves:
            kind = type(leaf)
            lazy = issubclass(kind, torch.Tensor) and kind not in PLAIN
            facts.append({"type": kind.__name__, "subclass": lazy})
            if kind not in PLAIN or leaf.layout != torch.strided:
                return {"structure": structure, "outputs": facts}
            leaf = leaf.detach()
            facts[-1] |= {
                "dtype": str(leaf.dtype).removeprefix("torch."),
                "device": str(leaf.device),
                "shape": list(leaf.shape),
                "strides": list(leaf.stride()),
                "shares_input": any(share_memory(leaf, x) for x in tensors),
                "shares_earlier": any(share_memory(leaf, x) for x in earlier),
            }
            self.outputs.append(leaf)
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
        _, leaves = flatten(self._forward(self.ring[slot], None))
        floats = [leaf for leaf in leaves if leaf.is_floating_point()]
        return {"finite": all(bool(leaf.isfinite().all()) for leaf in floats)}

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
        structure, leaves = flatten(self.output)
        plain = all(type(leaf) in PLAIN for leaf in leaves)
        if len(leaves) != outputs or not plain:
            return {"structure": structure, "shapes": [], "dtypes": []}
        looked = [leaf.detach().contiguous().view(-1) for leaf in leaves]
        looked += [_flat(self.ring[slot][index]) for index in inputs]
        places, end = self.incoming.view(torch.int64), 0
        for turn, flat in enumerate(looked):
            some = places[turn * count : turn * count + min(count, len(flat))]
            end += self.send(flat[some.to(flat.device)], end)
            end = -(-end // ALIGNMENT) * ALIGNMENT
        tensors = [x for x in self.ring[slot] if isinstance(x, torch.Tensor)]
        for leaf in [] if keep else leaves:
            self.take_away(leaf, tensors)
        self.output = None
        return {
            "structure": structure,
            "shapes": [list(leaf.shape) for leaf in leaves],
            "dtypes": [str(leaf.dtype).removeprefix("torch.") for leaf in leaves],
        }

    @staticmethod
    def _blank(spec: tuple, device: torch.device) -> object:
        if len(spec) == 1:
            return spec[0]
        shape, strides, dtype = spec
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


def flat_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor."""
    return _flat(x).view(torch.uint8)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.data.as_strided((x.numel(),), (1,))
