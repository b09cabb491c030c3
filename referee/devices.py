"""Which device is measured."""

import torch

from referee.memory import RING


def choose(name: str | None) -> tuple[torch.device, str]:
    """The device asked for, or the best there is, and why that is no GPU; it becomes current.

    Raises:
        ValueError: there is no such device.
    """
    why = "" if name else _no_gpu()
    try:
        device = torch.device(name or ("cpu" if why else "cuda"))
    except RuntimeError:
        raise ValueError(f"{name} is no device: cpu, cuda or cuda:N is meant") from None
    if device.type not in RING:
        raise ValueError(f"device {name} is neither a CPU nor a CUDA GPU")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"device {device} is not there: torch sees no such GPU")
        torch.cuda.set_device(device)
        return device, why
    return torch.device("cpu"), why


def _no_gpu() -> str:
    """Why the best device is no GPU; "" where it is one."""
    if torch.cuda.is_available():
        return ""
    if not torch.backends.cuda.is_built():
        return "no GPU: torch is a CPU build"
    reason = "no reason given"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]
    return f"no GPU: torch.cuda.is_available() is false ({reason})"
