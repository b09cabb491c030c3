"""Results in a contestant's process: kept for the referee, described, copied, and read early."""

import random

import torch

from referee.child.mapping import Mapping
from referee.contestants.descriptions import as_plain_tensor, describe, flatten
from referee.contestants.reading import memory_offset

READ_AT_ONCE = 4  # elements, see `read_at_once`


class KeptResults:
    """Keeps results alive until the referee has read them in this process's memory.

    Args:
        mapping: the memory that the referee shares.
        device: where the results are.
    """

    def __init__(self, mapping: Mapping, device: torch.device) -> None:
        self._mapping = mapping
        self._device = device
        self._leaves_of_calls: list[list] = []
        self._plain_tensors: list[torch.Tensor | None] = []

    def free(self) -> None:
        """Free all results."""
        self._leaves_of_calls = []
        self._plain_tensors = []

    def keep_all(self, returned: list, outputs: list[dict] | None) -> list[dict]:
        """Keep what each call of a request has returned; return a description of each.

        `descriptions` has an example of a description.

        Args:
            returned: a tensor, or nested lists and tuples, for each call.
            outputs: a location for each call, to which its results are copied; None if the referee
                can read results where they are.
        """
        output_locations = [None] * len(returned) if outputs is None else outputs
        descriptions = []
        for value, output_location in zip(returned, output_locations, strict=True):
            nesting, leaves = flatten(value)
            self._leaves_of_calls.append(leaves)
            results = [self._keep(leaf) for leaf in leaves]
            if output_location is not None:
                self._copy(leaves, output_location)
            descriptions.append({"nesting": nesting, "results": results})
        return descriptions

    def copy_again(self, outputs: list[dict]) -> None:
        """Copy the results of the first calls since `free` as they are now.

        Args:
            outputs: a location for each of these calls.
        """
        for leaves, location in zip(self._leaves_of_calls, outputs, strict=False):
            self._copy(leaves, location)

    def _keep(self, leaf: object) -> dict:
        """Keep a result; return a description of it."""
        plain_tensor = as_plain_tensor(leaf)
        self._plain_tensors.append(plain_tensor)
        description = describe(leaf if plain_tensor is None else plain_tensor)
        # On a CPU and for an empty tensor there is no "handle". It is None if CUDA IPC cannot share
        # the memory, for example because that is the referee's own, as an input's is.
        cannot_be_shared = description.get("handle", "") is None
        if cannot_be_shared:
            description |= self._mapping.export(description["address"])
        return description

    def _copy(self, leaves: list, location: dict) -> None:
        """Copy a call's results into shared memory.

        Results with another shape or dtype than their target are not copied: they are wrong anyway.
        """
        for leaf, target in zip(leaves, self._mapping.tensors(location), strict=False):
            are_tensors = isinstance(leaf, torch.Tensor) and isinstance(target, torch.Tensor)
            if are_tensors and leaf.shape == target.shape and leaf.dtype == target.dtype:
                target.copy_(leaf.detach())
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def read_at_once(returned: object, device: torch.device, generator: random.Random) -> dict:
    """Read some elements of one of a call's results on the current stream, as its caller may do.

    If another stream still has to write the elements, and the call has not made the current stream
    wait for it, old values are read. The referee reads the same elements later and compares.

    Args:
        returned: what the call has returned.
        device: where the results are.
        generator: chooses the elements.

    Returns:
        The index of a result among the leaves, the elements' indices in the flattened result, and
        their bytes; an empty dictionary on a CPU, and if no result is a dense tensor.
    """
    if device.type == "cpu":
        return {}
    tensors = {}
    for result_index, leaf in enumerate(flatten(returned)[1]):
        x = as_plain_tensor(leaf)
        if x is not None and x.is_cuda and x.numel():
            tensors[result_index] = x
    if not tensors:
        return {}
    result_index, x = generator.choice(list(tensors.items()))
    indices = [generator.randrange(x.numel()) for _ in range(READ_AT_ONCE)]
    data: list[int] = []
    for index in indices:
        offset = x.storage_offset() + memory_offset(index, x.shape, x.stride())
        # A copy of one element needs no kernel. A kernel could start only when the other stream
        # leaves it room on the GPU, and would then read values that are already new.
        data += x.as_strided((1,), (1,), offset).view(torch.uint8).tolist()
    return {"result": result_index, "indices": indices, "bytes": bytes(data).hex()}
