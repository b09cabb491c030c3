"""Parameters and buffers of one contestant, in memory that the referee writes.

A solution's state is matched with the reference's: by names, or else by shapes and by what both
constructors drew under one seed. What is matched moves into a region, and gets new values there
before every call; what a solution has beyond that, a reciprocal or a packed table, is its own.
"""

import torch

from referee.contestant import Contestant
from referee.problem import Problem, shape_and_dtype
from referee.reading import BadDescriptionError, UnreadableError, checked
from referee.results import span_of
from referee.shared import Pool, Region, dtype_name, pack

# The storages of a solution's state may be larger than its tensors: so many times the reference's
# state, and so many bytes more.
MOST_TIMES_STATE = 4
MORE_STATE = 1 << 28
CLOSE = 1e-6  # relative and absolute: by how much two constructors' roundings may differ


class StateError(Exception):
    """The solution's state is not the reference's; the message says how."""


class State:
    """Parameters and buffers of one contestant: a module's `state_dict()`.

    Args:
        contestant: whose.
        pool: where the memory comes from.

    Attributes:
        names: the contestant's names for the reference's state, by the reference's.
    """

    def __init__(self, contestant: Contestant, pool: Pool) -> None:
        self._contestant = contestant
        self._region = Region(pool)
        self.names: dict[str, str] = {}

    def construct(
        self,
        problem: Problem,
        seed: int,
        module: torch.nn.Module,
        args: list,
        compare: bool = False,
    ) -> None:
        """Have the contestant construct its module, and move its state into the region.

        Args:
            problem: its file says the dtype.
            seed: of the constructor, that `module` was constructed under, too.
            module: the reference.
            args: of the constructor.
            compare: the values that the constructors drew must be the same.

        Raises:
            StateError: the states do not match.
        """
        dtype = problem.file.dtype
        name = dtype_name(dtype) if dtype is not None and dtype.is_floating_point else ""
        reply = self._contestant.ask("construct", arguments=pack(args), seed=seed, dtype=name)
        described = {str(description.get("name")): description for description in reply["state"]}
        reference_state = module.state_dict()
        self.names = self._match(described, reference_state)
        if not reference_state:
            return
        descriptions = [described[self.names[name]] for name in reference_state]
        _check_repeats(descriptions, reference_state)
        if compare:
            self._compare(descriptions, reference_state)
        most = MOST_TIMES_STATE * sum(x.nbytes for x in reference_state.values()) + MORE_STATE
        self._region.arrange(*_arrangement(descriptions, most))
        self.write(list(reference_state.values()))
        self._contestant.ask("adopt", names=list(self.names.values()), form=self._region.form)

    def write(self, values: list[torch.Tensor]) -> None:
        """Write new values, in the order of the reference's state."""
        if self.names:
            self._region.write(values)

    def rewrite(self) -> None:
        """Write the same values once more."""
        if self.names:
            self._region.rewrite()

    def changed(self, buffers: set[str]) -> list[str]:
        """Return the parameters, by the reference's names, that are not what was written.

        Args:
            buffers: names that a forward may change.
        """
        if not self.names:
            return []
        names = list(self.names)
        changed = [names[i] for i in self._region.changed_values()]
        return [name for name in changed if name not in buffers]

    def close(self) -> None:
        """Give the memory back to the pool; the contestant has ended."""
        self._region.close()
        self.names = {}

    def _compare(self, descriptions: list[dict], reference_state: dict[str, torch.Tensor]) -> None:
        """Raise StateError unless the contestant's state starts with the reference's values."""
        for description, (name, value) in zip(descriptions, reference_state.items(), strict=True):
            if not self._holds(description, value):
                raise StateError(f"its {name} does not start with the values of the reference's")

    def _match(
        self, described: dict[str, dict], reference_state: dict[str, torch.Tensor]
    ) -> dict[str, str]:
        """Return the contestant's names by the reference's."""
        left = dict(described)
        names = {}
        for name, value in reference_state.items():
            if name in left and _is_alike(left[name], value):
                names[name] = name
                del left[name]
        for name, value in reference_state.items():
            if name not in names:
                own = self._find(left, value)
                if own is None:
                    form = shape_and_dtype(list(value.shape), value.dtype)
                    reason = f"its state is not the reference's: nothing in it is {name}, {form}"
                    raise StateError(reason)
                names[name] = own
                del left[own]
        return {name: names[name] for name in reference_state}

    def _find(self, left: dict[str, dict], value: torch.Tensor) -> str | None:
        """Return the name of a tensor of the state with this value; None if there is none."""
        for name, description in left.items():
            if _is_alike(description, value) and self._holds(description, value):
                return name
        return None

    def _holds(self, description: dict, value: torch.Tensor) -> bool:
        """Return whether a tensor of the state has this value, but for roundings."""
        try:
            found = self._contestant.reader.whole(description).to(value.device)
        except (BadDescriptionError, UnreadableError):
            return False
        if torch.equal(found, value):
            return True
        return torch.allclose(found.double(), value.double(), CLOSE, CLOSE, equal_nan=True)


def _is_alike(description: dict, value: torch.Tensor) -> bool:
    """Return whether a description has a tensor's shape and dtype."""
    shape, dtype = description.get("shape"), description.get("dtype")
    return shape == list(value.shape) and dtype == dtype_name(value.dtype)


def _check_repeats(descriptions: list[dict], reference_state: dict[str, torch.Tensor]) -> None:
    """Raise StateError where elements that have values of their own would share memory."""
    for description, (name, value) in zip(descriptions, reference_state.items(), strict=True):
        try:
            strides = checked(description)["strides"]
        except BadDescriptionError as error:
            raise StateError(f"its {name} is no tensor: {error}") from None
        pairs = zip(value.shape, strides, value.stride(), strict=True)
        if any(side > 1 and not own and theirs for side, own, theirs in pairs):
            raise StateError(f"elements of its {name} share memory")


def _arrangement(descriptions: list[dict], most: int) -> tuple[list[int], list[dict]]:
    """Return sizes of storages and forms for `Region.arrange`.

    Tensors that share memory, as tied weights and a recurrent network's flat ones, share it
    afterwards.

    Args:
        descriptions: checked descriptions.
        most: bytes that all storages together may have.
    """
    sizes: list[int] = []
    known: dict[int, int] = {}
    forms = []
    for description in descriptions:
        numbers = [description.get(key) for key in ("storage", "bytes", "offset")]
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise StateError("the memory of its state is described by no numbers")
        storage, size, offset = numbers
        item_bytes = getattr(torch, description["dtype"]).itemsize
        span = span_of(description["shape"], description["strides"], item_bytes)
        if offset * item_bytes + span > size:
            raise StateError("a tensor of its state reaches beyond its memory")
        if storage not in known or not size:
            known[storage] = len(sizes)
            sizes.append(size)
        if sum(sizes) > most:
            raise StateError("its parameters lie in much more memory than they need")
        form = {key: description[key] for key in ("offset", "shape", "strides", "dtype")}
        forms.append({"storage": known[storage], **form})
    return sizes, forms
