"""The requests of this project's problems: one input, whose rows are drawn from seeds."""

import time
from collections.abc import Callable
from functools import partial

import torch

from referee import cases, clock, correctness, relu
from referee import linear_relu_divide as linear
from referee.child.worker import PLAIN, Worker, share_memory, synchronize

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
        kind = type(output)
        lazy = issubclass(kind, torch.Tensor) and kind not in PLAIN
        reply: dict = {"type": kind.__name__, "subclass": lazy}
        moved = x.data_ptr() != flat.data_ptr() + spec["offset"] * x.element_size()
        shape, strides = list(x.shape), list(x.stride())
        reply["moved"] = (moved and x.numel() > 0) or [shape, strides] != [
            spec["shape"],
            spec["strides"],
        ]
        if kind not in PLAIN or output.layout != torch.strided:
            return reply
        output = output.detach()
        reply |= {
            "dtype": str(output.dtype).removeprefix("torch."),
            "device": str(output.device),
            "shape": list(output.shape),
            "strides": list(output.stride()),
            "shares_input": share_memory(output, x),
            "shares_earlier": self.earlier is not None and share_memory(output, self.earlier),
        }
        self.output = output
        reply["bytes"] = self.send(output, 0)
        self.send(flat, reply["bytes"])
        return reply

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
            cases.draw_rows(x, seed + slot * len(x), unit)
        return {}

    def fill_state(self, seed: int, names: list[str], scale: float) -> dict:
        """The parameters, drawn row by row."""
        there = self.module.state_dict()
        for turn, name in enumerate(names):
            cases.draw_rows(there[name].data, seed + (turn << 32)).mul_(scale)
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
        earlier, self.output = self.output, self._forward(self.ring[slot], None)
        output = self.output
        if type(output) not in PLAIN:
            return {"type": type(output).__name__}
        return {
            "type": "Tensor",
            "dtype": str(output.dtype).removeprefix("torch."),
            "device": str(output.device),
            "shape": list(output.shape),
            "strides": list(output.stride()),
            "shares_input": share_memory(output, self.ring[slot]),
            "shares_earlier": type(earlier) in PLAIN and share_memory(output, earlier),
        }

    def rows(self, slot: int, start: int, stop: int) -> dict:
        """These rows of the last output and of its input."""
        size = self.send(self.output[start:stop], 0)
        self.send(self.ring[slot][start:stop], size)
        return {"bytes": size}

    def alter(
        self, slot: int, start: int, stop: int, seed: int, weight: list | None, scale: float
    ) -> dict:
        """Draws rows of an input anew for the next timed call, and alters the weight.

        See `alterations`.
        """
        rows = self.ring[slot].data[start:stop]
        self.writes = [partial(rows.copy_, cases.draw_rows(torch.empty_like(rows), seed))]
        if weight:
            there = next(iter(self.module.state_dict().values())).data
            self.writes += alterations(there, seed, weight, scale)
        if self.device.type == "cuda":
            synchronize(self.device)
        return {}

    def suspects(self, slot: int, rows: list[int]) -> dict:
        """These rows of the last output and of its input."""
        output, x = self.output, self.ring[slot]
        if type(output) not in PLAIN or len(output) != len(x):
            return {"type": type(output).__name__}
        size = self.send(output.detach()[rows], 0)
        self.send(x[rows], size)
        self.take_away(output, [x])
        self.output = None
        return {"type": "Tensor", "bytes": size}

    def call_once(self) -> None:
        self.module(self.x.clone())


def alterations(weight: torch.Tensor, seed: int, places: list, scale: float) -> list[Callable]:
    """Draws a row of the weight anew; calls that write it, and change the sign of one element.

    Args:
        places: the row; row and column of the element, which no look at some elements finds.
    """
    row, at, column = places
    drawn = cases.draw_rows(torch.empty_like(weight[row]), seed + 1).mul_(scale)
    return [partial(weight[row].copy_, drawn), weight[at, column].neg_]


def _bytes(shape: list[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for side in shape:
        count *= side
    return count
