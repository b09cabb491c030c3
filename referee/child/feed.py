"""The requests that bring inputs and parameters to a process."""

import base64
import pickle
from collections.abc import Callable
from functools import partial

import torch

from referee import cases

PART = 16  # what changes last before a timed call is a sixteenth of a tensor, or as much as fits in
LARGEST_PART = 1 << 22  # bytes
MOST_PARTS = 16  # that change last: launched while a GPU's L2 is flushed
TRIPLED = 3  # as far as the other sign is, and sqrt and log still take it

_unpickle, _from_base64 = pickle.loads, base64.b64decode
_synchronize = torch.cuda.synchronize


def unpack(text: str) -> object:
    """What `remote.pack` made a text of."""
    return _unpickle(_from_base64(text))


class Feed:
    """These requests, of a `Worker`. A slot of the `ring` holds the arguments of a forward."""

    def __init__(self, arena: torch.Tensor, device: torch.device) -> None:
        half = len(arena) // 2  # of the bytes of the mapped file
        self.incoming, self.outgoing, self.device = arena[:half], arena[half:], device
        self.ring: list[list] = []
        self.staged: list[torch.Tensor] = []
        self.base: dict[str, torch.Tensor] = {}  # parameters, of which others are made
        self.there: dict[str, torch.Tensor] = {}  # the module's state, which no call looks up again
        self.writes: list[Callable[[], object]] = []  # what is altered in the next timed call
        self.output: object = None  # of the last timed call
        self.results: list[torch.Tensor | None] = []  # of the last other call, and gradients
        self.given: list[torch.Tensor] = []  # gradients of the outputs of timed steps

    def allocate(self, slots: int, inputs: str) -> None:
        """A ring of inputs, which are packed as of `oracle.form_of`."""
        self.output, self.results, self.ring = None, [], []
        self.given, self.writes = [], []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for _ in range(slots):
            self.ring.append([self._blank(spec, self.device) for spec in unpack(inputs)])

    def stage(self, tensors: str) -> None:
        """Room for a state, or for inputs, that come in, as `allocate` has it."""
        self.staged = [self._blank(spec, torch.device("cpu")) for spec in unpack(tensors)]

    def feed(self, slot: int | None, index: int, start: int, size: int) -> None:
        """Bytes of an input's memory, or of what is staged; no version tells of them."""
        into = self.staged if slot is None else self.ring[slot]
        flat_bytes(into[index])[start : start + size].copy_(self.incoming[:size])

    def sums(self) -> dict:
        """The sum of each tensor of the state, in order."""
        return {"sums": [x.double().sum().item() for x in self.module.state_dict().values()]}

    def load_state(self, names: list[str]) -> None:
        """Loads what is staged, or nothing; keeps it, that other parameters can be made of it."""
        if state := dict(zip(names, self.staged, strict=False)):
            more = {} if len(state) == len(self.module.state_dict()) else {"strict": False}
            self.module.load_state_dict(state, **more)
        self.staged, self.there = [], self.module.state_dict(keep_vars=True)
        loaded = state or self.there
        self.base = {name: loaded[name].detach().to(self.device, copy=True) for name in names}

    def renew(
        self, slot: int, draw: int | None, names: list, seed: int, at: float, is_timed: bool
    ) -> None:
        """Gives the inputs of a slot, and the parameters, values that no version tells of.

        Args:
            draw: the seed of the inputs; None for those that are staged, or none.
            names: of the parameters, each with what is added to its seed.
            at: where the part begins that changes last, from 0 to 1, if they are for a timed call.
        """
        self.output = None
        fresh, self.staged = self.staged, []
        if draw is not None:
            fresh = self.source.draw(draw, self.device)
        for x, values in zip(self.ring[slot], fresh, strict=False):
            if isinstance(x, torch.Tensor):
                self._replace(x.data, values.to(self.device), at)
        for name, turn in names:
            self._replace(self.there[name].data, cases.redraw(self.base[name], seed + turn), at)
        if not is_timed:
            self.write()
        if self.device.type == "cuda":
            _synchronize(self.device)

    def _replace(self, x: torch.Tensor, values: torch.Tensor, at: float) -> None:
        """Overwrites x, a part of it not before `write`: after the flush of a GPU's L2.

        A call that works on another stream meanwhile reads old values there. The part is small, for
        what is written last lies in the L2.
        """
        same = x.dtype == values.dtype and x.stride() == values.stride()
        if not (same and x.numel()) or len(self.writes) == MOST_PARTS:
            x.copy_(values)
            return
        old, new = flat(x), flat(values)
        size = max(1, min(len(old) // PART, LARGEST_PART // x.element_size()))
        start = int(at * (len(old) - size))
        part = slice(start, start + size)
        late = new[part].clone()
        new[part] = old[part]
        old.copy_(new)
        self.writes.append(partial(old[part].copy_, late))

    def touch(self, slot: int, names: list[str | None], places: list[list[int]]) -> None:
        """Triples an element of each parameter late; that of the first input, None, is negated."""
        for name, place in zip(names, places, strict=True):
            x, factor = (self.there[name], TRIPLED) if name else (self.ring[slot][0], -1)
            self.writes.append(partial(x.data[tuple(place)].mul_, factor))

    def write(self) -> None:
        """Alters what the timed call reads."""
        for write in self.writes:
            write()
        self.writes = []

    def send(self, x: torch.Tensor, start: int) -> int:
        """Writes the elements in order to the outgoing half; how many bytes."""
        every = x.contiguous().view(-1).view(torch.uint8)
        self.outgoing[start : start + len(every)].copy_(every)
        return len(every)

    @staticmethod
    def _blank(spec: tuple, device: torch.device) -> object:
        if len(spec) == 1:
            return spec[0]
        shape, strides, dtype, offset, size = spec
        return torch.zeros(size, dtype=dtype, device=device).as_strided(shape, strides, offset)


def flat_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory under x, with what a view skips."""
    return flat(x).view(torch.uint8)


def flat(x: torch.Tensor) -> torch.Tensor:
    """The elements in the memory under x."""
    size = x.untyped_storage().nbytes() // x.element_size()
    return x.data.as_strided((size,), (1,), 0)
