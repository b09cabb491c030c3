"""Chooses the device that the user names, or the best one."""

import torch


def choose_device(name: str | None) -> tuple[torch.device, str]:
    """Return a device; if it is the CPU only for lack of a GPU, also why there is none.

    A GPU becomes torch's current device. The reason is written for `tables.headline`: "; no GPU:
    torch is a CPU build" for example. It is "" if there is a GPU or if the user names a device.

    Args:
        name: "cpu", "cuda" or "cuda:N"; None for a GPU, or the CPU if there is none.

    Raises:
        ValueError: there is no such device.
    """
    why_no_gpu = ""
    if not name:
        name = "cuda"
        if not torch.cuda.is_available():
            name = "cpu"
            why_no_gpu = f"; no GPU: {_why_no_gpu()}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name} is no device; expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name} is of another kind; expected cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu"), why_no_gpu
    device = torch.device("cuda", device.index or 0)
    if device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        last = f"cuda:{count - 1}" if count else "cpu"
        raise ValueError(f"device {device} is not there: torch sees {count} GPUs; try {last}")
    torch.cuda.set_device(device)
    return device, why_no_gpu


def _why_no_gpu() -> str:
    """Return the reason why torch sees no GPU."""
    if not torch.backends.cuda.is_built():
        return "torch is a CPU build"
    reason = "no reason given"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]
    return f"torch.cuda.is_available() is false ({reason})"
