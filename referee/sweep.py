"""What bounds a sweep over sizes: memory and time; and the device's roofline beside its times."""

import torch

from referee.clock import CpuClock, CudaClock
from referee.memory import BUFFERS, LARGEST_SHARE, free_bytes

DTYPES = ("float32", "float16", "bfloat16")  # unless others are asked for
SECONDS = {"cpu": 80.0, "cuda": 300.0}  # for all sizes together; the last one may take longer
COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}  # bytes, beyond the caches
COPIES = 10


def why_left_out(needed: int, seconds: float, device: torch.device) -> str:
    """Why a size is left out whose largest tensor has so many bytes, or ""."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    free = LARGEST_SHARE * free_bytes(device)
    if BUFFERS[device.type] * needed > free:
        gib = BUFFERS[device.type] * needed / 2**30, free / 2**30
        return "needs {:,.1f} GiB of memory, {:,.1f} GiB can be used".format(*gib)
    if seconds <= 0:
        return f"the {SECONDS[device.type]:.0f} s of a sweep are over"
    return ""


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes, beyond the caches."""
    clock = CudaClock(device) if device.type == "cuda" else CpuClock()
    source, target = (
        torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device).fill_(1)
        for _ in range(2)
    )
    return 2 * source.nbytes / min(clock.time(target.copy_, source)[1] for _ in range(COPIES))


def add_limits(records: list[dict], bandwidth: float) -> None:
    """The roofline of each series: the highest rate of its floors, and the memory's bandwidth."""
    series: dict[tuple, list[dict]] = {}
    for record in records:
        for run in record["runs"]:
            if run["forward"]["floor_seconds"]:  # an interrupt came before it was known
                key = record["problem"], record["dtype"], run["setting"]
                series.setdefault(key, []).append(run["forward"])
    for forwards in series.values():
        peak = max(forward["work"] / forward["floor_seconds"] for forward in forwards)
        for forward in forwards:
            limits = forward["work"] / peak, forward["moved_bytes"] / bandwidth
            forward["roofline_seconds"] = max(limits)
