"""The requests of this project's problems: one input, whose rows are drawn from seeds."""

import time
from functools import partial

import torch

from referee import cases, clock, correctness, relu
from referee import linear_relu_divide as linear
from referee.child.results import form_of, take_apart
from referee.child.worker import Worker, share_memory, synchronize

SHIFT = 1 << 31  # between the seeds of an input and of parameters

_sleep = time.sleep


class RowsWorker(Worker):
    """See `Worker`."""

    def state(self, names: list[str], shapes: list[list[int]], dtype: str, how: str) -> dict:
        """Gives the state new values: by `load_state_dict`, or beneath it, by `data`."""
        values, start, dtype = [], 0, getattr(torch, dtype)
        for shape in shapes:
            end = start + _bytes(shape, dtype)
            values.append(self.incoming[start:end].view(dtype).view(shape).clone())
            start = end
        if how == "load_state_dict":
            self.module.load_state_dict(dict(zip(names, values, strict=True)))
        else:
            there = self.module.state_dict()
            for name, value in zip(names, values, strict=True):
                there[name].data.copy_(value)
        return {}

    def attribute(self, name: str, value: float) -> dict:
        """Assigns an attribute that the module has; whether it has."""
        there = hasattr(self.module, name)
        if there:
            setattr(self.module, name, value)
        return {"there": there}

    def call(self, spec: dict, bait: list | None, size: int, again: bool, fill: bool) -> dict:
        """One forward on an input that comes in.

        Args:
            spec: the input's dtype, bytes of storage, shape, strides and offset.
            bait: shape and seed of what a program finds that looks for the expected result.
            size: bytes of the output, where poison is to lie.
            again: in the memory of the input before, with values that no version tells of.
            fill: while torch fills new memory.
        """
        dtype = getattr(torch, spec["dtype"])
        came = self.incoming[: spec["bytes"]]
        if again:
            storage = self.x.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            flat.data.copy_(came)
        else:
            flat = came.to(self.device, copy=True)
            place = spec["shape"], spec["strides"], spec["offset"]
            self.x = flat.view(dtype).as_strided(*place)
        self.earlier, x = self.output, self.x
        self.output = expected = None
        if bait:
            expected = torch.empty(bait[0], dtype=dtype, device=self.device)
            cases.draw_rows(expected, bait[1], unit=True)
        correctness.poison(size, self.device)
        if fill:
            with correctness.nan_in_new_memory(warn_only=True):
                output = self._forward(x, expected)
        else:
            output = self._forward(x, expected)
        return self._hand_over(output, x, flat, spec)

    def _forward(self, x: torch.Tensor, expected: torch.Tensor | None) -> object:
        # `expected` is there to be found in this frame; it is random.
        output = self.module(x)
        if self.device.type == "cuda":
            synchronize(self.device)
        return output

    def _hand_over(self, output: object, x: torch.Tensor, flat: torch.Tensor, spec: dict) -> dict:
        reply, output = self._plain(output)
        x = x.data
        moved = x.data_ptr() != flat.data_ptr() + spec["offset"] * x.element_size()
        shape, strides = list(x.shape), list(x.stride())
        reply["moved"] = (moved and x.numel() > 0) or [shape, strides] != [
            spec["shape"],
            spec["strides"],
        ]
        if output is None:
            return reply
        reply |= {
            "shares_input": share_memory(output, x),
            "shares_earlier": self.earlier is not None and share_memory(output, self.earlier),
        }
        self.output = output
        reply["bytes"] = self.send(output, 0)
        self.send(flat, reply["bytes"])
        return reply

    @staticmethod
    def _plain(output: object) -> tuple[dict, torch.Tensor | None]:
        """What an output is; and itself, detached, if it is a plain tensor."""
        structure, facts, tensors = take_apart([output])
        fact = facts[0] if structure == "[*]" else {"type": type(output).__name__}
        if structure != "[*]" or tensors[0] is None:
            return fact, None
        return fact | form_of(tensors[0]), tensors[0]

    def recall(self, seconds: float) -> dict:
        """The last output once more, some time later."""
        _sleep(seconds)
        return {"bytes": self.send(self.output, 0)}

    def fill(self, slots: int, shape: list[int], dtype: str, seed: int, unit: bool) -> dict:
        """A ring of inputs, drawn row by row."""
        self.earlier = self.x = None
        if len(self.ring) != slots or list(self.ring[0].shape) != shape:
            self.ring = []
            for _ in range(slots):
                blank = torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)
                self.ring.append(blank)
        for slot, x in enumerate(self.ring):
            cases.draw_rows(x, seed + (slot << 32), unit)
        return {}

    def fill_state(self, seed: int, names: list[str], scale: float) -> dict:
        """The parameters, drawn row by row."""
        there = self.module.state_dict()
        draw_state([there[name].data for name in names], seed, scale)
        return {}

    def prepare(self, yardstick: str) -> dict:
        """Sets what can be timed: the module; for "copy" and "product" the yardsticks so named."""
        self.calls = {"module": self.module}
        x = self.ring[0]
        if yardstick == "copy":
            target = torch.empty_like(x).fill_(0)
            self.calls |= relu.copies(target)
        elif yardstick == "product":
            weight = self.module.get_parameter("linear.weight").data
            self.calls[linear.PRODUCT] = lambda x: x @ weight.T
            if x.is_cuda and x.dtype == torch.float32:
                self.calls[linear.THREE] = linear.three_products(self.module, x)
        is_cuda = self.device.type == "cuda"
        self.clock = clock.CudaClock(self.device) if is_cuda else clock.CpuClock()
        return {"names": [name for name in self.calls if name != "module"]}

    def run(self, slot: int) -> dict:
        """One forward on an input of the ring, while the output before is still there."""
        earlier = self.output
        reply, self.output = self._plain(self._forward(self.ring[slot], None))
        if self.output is None:
            return reply
        return reply | {
            "shares_input": share_memory(self.output, self.ring[slot]),
            "shares_earlier": earlier is not None and share_memory(self.output, earlier),
        }

    def rows(self, slot: int, start: int, stop: int) -> dict:
        """These rows of the last output and of its input."""
        size = self.send(self.output[start:stop], 0)
        self.send(self.ring[slot][start:stop], size)
        return {"bytes": size}

    def renew(self, slot: int, seed: int, names: list[str], scale: float, at: float) -> dict:
        """Draws an input, and all parameters, anew for the next timed call.

        A row of each is written last, after the flush of a GPU's L2: a call that works on another
        stream meanwhile reads old values there.

        Args:
            at: which row, from 0 to 1.
        """
        there = self.module.state_dict() if names else {}
        state = [there[name].data for name in names]
        last = [values[int(at * len(values))] for values in (self.ring[slot].data, *state)]
        old = [row.clone() for row in last]
        cases.draw_rows(self.ring[slot].data, seed)
        draw_state(state, seed + SHIFT, scale)
        self.writes = [partial(row.copy_, row.clone()) for row in last]
        for row, values in zip(last, old, strict=True):
            row.copy_(values)
        if self.device.type == "cuda":
            synchronize(self.device)
        return {}

    def touch(self, slot: int, place: list[int], value: float, weight: list) -> dict:
        """Changes an element of an input, and the sign of one of the weight, for a timed call.

        Args:
            weight: its name, row and column; empty where there is none.
        """
        row, column = place
        self.writes = [partial(self.ring[slot].data[row, column].fill_, value)]
        if weight:
            name, row, column = weight
            self.writes.append(self.module.state_dict()[name].data[row, column].neg_)
        return {}

    def suspects(self, slot: int, rows: list[int]) -> dict:
        """These rows of the last output and of its input."""
        reply, output = self._plain(self.output)
        self.output, x = None, self.ring[slot].data
        if output is None or output.shape[:1] != x.shape[:1]:
            return reply | {"bytes": 0}
        size = self.send(output[rows], 0)
        self.send(x[rows], size)
        self.take_away(output, [x])
        return reply | {"bytes": size}

    def arguments(self, slot: int | None) -> list:
        return [self.x if slot is None else self.ring[slot]]

    def call_once(self) -> None:
        self.module(self.x.clone())


def draw_state(state: list[torch.Tensor], seed: int, scale: float) -> None:
    """Draws parameters anew."""
    for turn, values in enumerate(state):
        cases.draw_rows(values, seed + (turn << 32)).mul_(scale)


def _bytes(shape: list[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for side in shape:
        count *= side
    return count
