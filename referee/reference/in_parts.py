"""Changes the elements of a tensor in place, a part at a time, to save memory."""

from collections.abc import Callable

import torch

PART = 1 << 22  # elements that are changed at a time


def change_in_parts(x: torch.Tensor, change: Callable[[torch.Tensor], object]) -> None:
    """Change all elements of a tensor in place.

    Args:
        x: the tensor, of any strides.
        change: is called with flat tensors of at most PART elements, and changes them in place.
    """
    flat = x.reshape(-1)  # a copy if the elements are not in the order of memory
    for part in flat.split(PART):
        change(part)
    if not x.is_contiguous():
        x.copy_(flat.view(x.shape))
