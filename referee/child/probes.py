"""Probes: a module is called once to find something out about it."""

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from referee.contestants.autograd import with_gradient_leaves
from referee.contestants.descriptions import flatten

CHECKED_AT_ONCE = 1 << 24  # elements of a large tensor


def has_finite_results(module: nn.Module, arguments: list) -> bool:
    """Return whether all floats in a module's results are finite."""
    _, leaves = flatten(module(*arguments))
    floats = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return all(map(_has_finite_elements, floats))


def _has_finite_elements(x: torch.Tensor) -> bool:
    """Return whether all elements are finite. A large tensor is checked part by part."""
    return all(bool(part.isfinite().all()) for part in x.reshape(-1).split(CHECKED_AT_ONCE))


def count_saved_bytes(module: nn.Module, arguments: list) -> int:
    """Return how many bytes a module's forward saves for its backward.

    Inputs and parameters do not count, for they are in memory anyway.
    """
    leaves = with_gradient_leaves(arguments)
    bytes_of: dict[int, int] = {}  # from a storage's address to its size

    def count(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        bytes_of[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.enable_grad(), saved_tensors_hooks(count, lambda saved: saved):
        module(*leaves)
    for x in (*leaves, *module.parameters()):
        if isinstance(x, torch.Tensor):
            bytes_of.pop(x.untyped_storage().data_ptr(), None)
    return sum(bytes_of.values())
