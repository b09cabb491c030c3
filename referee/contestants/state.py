"""Parameters and buffers of one contestant, in memory that the referee writes.

    the referee                                      the contestant
    asks it to "construct" its module           ->   describes each tensor of its state_dict
    matches them with the reference's tensors
    makes room in shared memory, writes values
    asks it to "adopt" the matched tensors      ->   moves their data there
    writes new values before each round

Each tensor of the reference's state is matched with one of the contestant's: by its name, or else
by its shape and by the values that both constructors drew under one seed. Other tensors of a
solution, such as a reciprocal or a packed table, are its own.

A description is what the contestant tells of one of its tensors: name, shape, strides, dtype, and
where it is. It may be false.
"""

import torch

from referee.contestants.contestant import Contestant
from referee.contestants.descriptions import span_of
from referee.contestants.forms import dtype_name, pack
from referee.contestants.pool import Pool
from referee.contestants.reading import BadDescriptionError, UnreadableError, layout_of
from referee.contestants.region import Region

# The storages under a solution's state may be larger than its tensors. Together they may take
# MAX_TIMES_STATE times the bytes of the reference's state, plus MORE_STATE bytes.
MAX_TIMES_STATE = 4
MORE_STATE = 1 << 28
# Relative and absolute tolerance of values that two constructors compute with different roundings.
CLOSE = 1e-6


class StateError(Exception):
    """The solution's state is not the reference's; the message says how it differs."""


class State:
    """Parameters and buffers of one contestant: a module's `state_dict()`.

    Args:
        contestant: the process that has the module.
        pool: the shared memory.

    Attributes:
        own_name_of: the contestant's names of its matched tensors, by the reference's names.
    """

    def __init__(self, contestant: Contestant, pool: Pool) -> None:
        self._contestant = contestant
        self._region = Region(pool)
        self.own_name_of: dict[str, str] = {}

    @property
    def location(self) -> dict:
        """The location of the tensors in shared memory; empty if there are none."""
        return self._region.location

    def construct(
        self,
        dtype: torch.dtype | None,
        seed: int,
        module: torch.nn.Module,
        arguments: list,
        check_first_values: bool = False,
    ) -> None:
        """Have the contestant construct its module and move its state into shared memory.

        Args:
            dtype: the problem's dtype, to which the module is converted if it is a floating one;
                None if the problem has none.
            seed: the seed of the constructor; `module` was constructed under it, too.
            module: the reference's module.
            arguments: the constructor's arguments.
            check_first_values: whether both constructors must have drawn the same values.

        Raises:
            StateError: the states do not match.
        """
        is_converted = dtype is not None and dtype.is_floating_point
        reply = self._contestant.ask(
            "construct",
            arguments=pack(arguments),
            seed=seed,
            dtype=dtype_name(dtype) if is_converted else "",
        )
        by_name = {str(description.get("name")): description for description in reply["state"]}
        reference_state = module.state_dict()
        self.own_name_of = self._match(by_name, reference_state)
        descriptions = [by_name[self.own_name_of[name]] for name in reference_state]
        _check_repeats(descriptions, reference_state)
        if check_first_values:
            self._check_first_values(descriptions, reference_state)
        if reference_state:
            self._move(descriptions, list(reference_state.values()))

    def move_back(self) -> None:
        """Have the contestant move its tensors into the shared memory once more.

        A forward may have assigned a new tensor to a buffer.
        """
        if self.own_name_of:
            self._contestant.ask(
                "adopt", names=list(self.own_name_of.values()), location=self._region.location
            )

    def write(self, values: list[torch.Tensor]) -> None:
        """Write new values, in the order of the reference's state."""
        if self.own_name_of:
            self._region.write(values)

    def rewrite(self) -> None:
        """Write the same values once more."""
        if self.own_name_of:
            self._region.rewrite()

    def fill_with_nan(self) -> None:
        """Fill all values with NaN, see `Region.fill_with_nan`; `rewrite` restores them."""
        if self.own_name_of:
            self._region.fill_with_nan()

    def changed_parameters(self, buffers: set[str]) -> list[str]:
        """Return the reference's names of the changed tensors, except for buffers.

        A tensor has changed if it has other bits than those that were written.

        Args:
            buffers: the reference's names of its buffers, which a forward may change.
        """
        if not self.own_name_of:
            return []
        names = list(self.own_name_of)
        changed_names = [names[i] for i in self._region.changed_values()]
        return [name for name in changed_names if name not in buffers]

    def close(self) -> None:
        """Give the memory back to the pool; the contestant has ended."""
        self._region.close()
        self.own_name_of = {}

    def _move(self, descriptions: list[dict], values: list[torch.Tensor]) -> None:
        """Move the contestant's matched tensors into the region, with the reference's values."""
        reference_bytes = sum(x.nbytes for x in values)
        most_bytes = MAX_TIMES_STATE * reference_bytes + MORE_STATE
        sizes, forms = _forms_in_region(descriptions, most_bytes)
        self._region.make_room_for(sizes, forms)
        self.write(values)
        self.move_back()

    def _check_first_values(
        self, descriptions: list[dict], reference_state: dict[str, torch.Tensor]
    ) -> None:
        """Raise StateError unless the contestant's constructor drew the reference's values."""
        for description, (name, value) in zip(descriptions, reference_state.items(), strict=True):
            if not self._has_value(description, value):
                raise StateError(
                    f"its {name} does not start with the values of the reference's; its "
                    "constructor must draw the same values, in the same order"
                )

    def _match(
        self, by_name: dict[str, dict], reference_state: dict[str, torch.Tensor]
    ) -> dict[str, str]:
        """Match the contestant's tensors with the reference's: first by names, then by values.

        Args:
            by_name: the descriptions of the contestant's tensors.
            reference_state: the reference's tensors by name.

        Returns:
            The contestant's names by the reference's, in the reference's order.
        """
        unmatched = dict(by_name)
        names = {}
        for name, value in reference_state.items():
            if name in unmatched and _is_alike(unmatched[name], value):
                names[name] = name
                del unmatched[name]
        for name, value in reference_state.items():
            if name not in names:
                names[name] = self._find(unmatched, name, value)
                del unmatched[names[name]]
        return {name: names[name] for name in reference_state}

    def _find(self, unmatched: dict[str, dict], name: str, value: torch.Tensor) -> str:
        """Return the name of an unmatched tensor of the contestant that has the reference's value.

        Args:
            unmatched: the descriptions of the contestant's tensors that have no match yet.
            name: the reference's name of its tensor.
            value: the reference's tensor.

        Raises:
            StateError: there is none.
        """
        for candidate_name, description in unmatched.items():
            if _is_alike(description, value) and self._has_value(description, value):
                return candidate_name
        form = f"{list(value.shape)} {dtype_name(value.dtype)}"
        raise StateError(
            "its state is not the reference's: no tensor of its state_dict is "
            f"{name}, {form}, by name or by value"
        )

    def _has_value(self, description: dict, value: torch.Tensor) -> bool:
        """Return whether a tensor of the contestant has this value, except for roundings.

        If the system lets the referee read no such memory, the tensor is taken to have the value.
        """
        if not self._contestant.is_readable:
            return True
        try:
            got = self._contestant.reader.read_whole(description).to(value.device)
        except (BadDescriptionError, UnreadableError):
            return False
        if torch.equal(got, value):
            return True
        wide = torch.complex128 if value.is_complex() else torch.float64
        return torch.allclose(got.to(wide), value.to(wide), CLOSE, CLOSE, equal_nan=True)


def _is_alike(description: dict, value: torch.Tensor) -> bool:
    """Return whether a description has a tensor's shape and dtype."""
    shape, dtype = description.get("shape"), description.get("dtype")
    return shape == list(value.shape) and dtype == dtype_name(value.dtype)


def _check_repeats(descriptions: list[dict], reference_state: dict[str, torch.Tensor]) -> None:
    """Raise StateError if a stride of 0 repeats elements that differ in the reference."""
    for description, (name, value) in zip(descriptions, reference_state.items(), strict=True):
        try:
            strides = layout_of(description).strides
        except BadDescriptionError as error:
            raise StateError(f"its {name} is no tensor: {error}") from None
        for side, stride, reference_stride in zip(
            value.shape, strides, value.stride(), strict=True
        ):
            if side > 1 and stride == 0 and reference_stride != 0:
                raise StateError(
                    f"elements of its {name} share memory (a stride of 0), the reference's do not"
                )


def _forms_in_region(descriptions: list[dict], most_bytes: int) -> tuple[list[int], list[dict]]:
    """Return the storages and forms that the contestant's tensors get in a region.

    Tensors that share memory, as tied weights and the flat weights of a recurrent network do, share
    it in the region, too.

    Args:
        descriptions: checked descriptions of the tensors.
        most_bytes: how many bytes all storages may take together.

    Returns:
        The storages' sizes in bytes and the tensors' forms, as `Region.make_room_for` takes them.

    Raises:
        StateError: a description does not fit its storage, or the storages are too large.
    """
    sizes: list[int] = []
    indices: dict[tuple[int, int], int] = {}  # of storages in `sizes`, by their address and size
    forms = []
    for description in descriptions:
        _check_reach(description)
        storage = description["storage"], description["bytes"]
        if storage not in indices:
            indices[storage] = len(sizes)
            sizes.append(description["bytes"])
        form = {key: description[key] for key in ("offset", "shape", "strides", "dtype")}
        forms.append({"storage": indices[storage], **form})
    if sum(sizes) > most_bytes:
        raise StateError(
            f"the memory behind its state exceeds {most_bytes:,} bytes; keep no views of large "
            "tensors there"
        )
    return sizes, forms


def _check_reach(description: dict) -> None:
    """Raise StateError unless a tensor is within its storage, as its description says."""
    numbers = [description.get(key) for key in ("storage", "bytes", "offset")]
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise StateError("its reply says where its state is by something else than numbers")
    item_bytes = getattr(torch, description["dtype"]).itemsize
    span = span_of(description["shape"], description["strides"], item_bytes)
    end = description["offset"] * item_bytes + span
    if end > description["bytes"]:
        raise StateError("its reply says that a tensor of its state reaches beyond its memory")
