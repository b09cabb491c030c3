"""Seeds the global generators of torch, Python and NumPy."""

import random
import sys

import torch


def seed_generators(seed: int) -> None:
    """Give all global generators this seed; NumPy's only if NumPy has been imported."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
