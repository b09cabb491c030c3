"""Seeds the global generators of torch, Python and NumPy."""

import random
import sys

import torch


def seed_generators(seed: int) -> None:
    """Give the global generators this seed; NumPy's only if NumPy has been imported."""
    # torch.manual_seed also seeds the generators of other kinds of devices. For each kind that is
    # not in use, it takes a millisecond to note from where it was called.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
