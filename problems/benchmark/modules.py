"""This project's module and eager's, for a comparison."""

import torch
from torch import nn

from model import PROBLEMS


def make_modules(
    problem: str, device: str, dtype: torch.dtype, arguments: list
) -> dict[str, nn.Module]:
    """Return this project's module, "ours", and the reference's, "eager", with equal parameters.

    Args:
        problem: the problem's name.
        device: "cpu" or "cuda".
        dtype: the parameters' dtype.
        arguments: of both modules' constructors.
    """
    from model_new import SOLUTIONS  # builds the kernels

    with torch.device(device):
        ours = SOLUTIONS[problem](*arguments).to(dtype)
        eager = PROBLEMS[problem].reference(*arguments).to(dtype)
    ours.load_state_dict(eager.state_dict())
    return {"ours": ours, "eager": eager}
