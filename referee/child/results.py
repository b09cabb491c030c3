"""Takes apart what a solution returns, by functions that were bound before it was imported.

No code of the result's own runs: containers and tensors are of exactly the expected types, hold
nothing but their values, and nothing about their values is still to be computed.
"""

import torch
from torch import nn

from referee.reference_file import MOST_LEAVES

PLAIN = (torch.Tensor, nn.Parameter)  # the types that an output may have
NAMED = {kind for kind in vars(torch.return_types).values() if isinstance(kind, type)}
OVERRIDES = {"__iter__", "__len__", "__getitem__", "__getattribute__", "__class__", "__dict__"}
COMPILER = "_dynamo_"  # begins the names of what torch.compile notes on its results
LATE = "which may compute when it is read"

_type, _issubclass, _vars = type, issubclass, object.__getattribute__
_mro, _members = type.__dict__["__mro__"].__get__, type.__dict__["__dict__"].__get__
_name = type.__dict__["__name__"].__get__
_parts = {tuple: tuple.__iter__, list: list.__iter__}
_detach, _layout = torch.Tensor.detach, torch.Tensor.layout.__get__
_device = torch.Tensor.device.__get__
_keys, _is_copied_late = torch._C._dispatch_keys, torch._C._is_cow_tensor


def take_apart(value: object, keeps_record: bool = False) -> tuple[str, list[dict], list]:
    """The nesting as text, as of `reference_file.flatten`, what lies in it, and the tensors.

    A description has the `type`, and the `fault` of a leaf or a container that is not what it
    seems. For what is no plain tensor there is None. Tensors are detached, unless the record of
    autograd is kept.
    """
    facts, tensors = [], []
    return _walk(value, keeps_record, facts, tensors), facts, tensors


def _walk(value: object, keeps_record: bool, facts: list, tensors: list) -> str:
    """Not a closure: one that calls itself would keep the tensors until garbage is collected."""
    kind = _type(value)
    base = next((base for base in _parts if _issubclass(kind, base)), None)
    if base and len(facts) < MOST_LEAVES:
        if is_container(kind):
            parts = [_walk(x, keeps_record, facts, tensors) for x in _parts[base](value)]
            return f"[{', '.join(parts)}]"
        fault = f"returns a subclass of {base.__name__}, {_name(kind)}, {LATE}"
    else:
        fault = fault_of(value)
    facts.append({"type": _name(kind), "fault": fault})
    is_plain = not fault and kind in PLAIN and _layout(value) == torch.strided
    tensors.append(None if not is_plain else value if keeps_record else _detach(value))
    return "*"


def is_container(kind: type) -> bool:
    """Whether a type is a tuple or a list, or a tuple with names for its parts, and no more."""
    if kind in (tuple, list) or kind in NAMED:
        return True
    own = _members(kind).keys()
    return _mro(kind) == (kind, tuple, object) and "_fields" in own and not OVERRIDES & own


def fault_of(value: object) -> str:
    """Why a value, which is no container, may compute when it is read; "" if it can't."""
    kind = _type(value)
    if kind not in PLAIN:
        is_tensor = _issubclass(kind, torch.Tensor)
        return f"returns a tensor subclass, {_name(kind)}, {LATE}" if is_tensor else ""
    own = [name for name in _vars(value, "__dict__") if not str(name).startswith(COMPILER)]
    if own:
        return f"returns a tensor with an attribute of its own, {own[0]}, {LATE}"
    if _layout(value) != torch.strided:
        return ""
    if _keys(value).raw_repr() & ~_ordinary(_device(value)) or _is_copied_late(value):
        return f"returns a tensor whose values are not in memory yet, {LATE}"
    return ""


def _ordinary(device: torch.device, known: dict = {}) -> int:  # noqa: B006
    """The dispatch keys of a tensor that is just its memory."""
    if device not in known:
        known[device] = _keys(torch.empty(0, device=device)).raw_repr()
    return known[device]
