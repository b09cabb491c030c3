"""The roofline of a sweep: the least time that the measured rates allow for each size."""

from time import perf_counter

import torch

COPIED_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}  # of one copy: more than caches hold
COPIES = 10  # of which the fastest counts


def copy_bandwidth(device: torch.device) -> float:
    """Return how many bytes a second a large copy moves: it reads half of them, and writes half."""
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = source.clone()
    fastest = min(_seconds_of_copy(target, source) for _ in range(COPIES))
    return 2 * source.nbytes / fastest


def _seconds_of_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    """Copy once and return the seconds."""
    if source.device.type == "cpu":
        start = perf_counter()
        target.copy_(source)
        return perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def add_roofline(sweep_records: list[dict], bandwidth: float) -> None:
    """Set "roofline_seconds" of each forward of a sweep.

    It is the larger of two times: that of the work at the peak rate, and that of the moved bytes at
    the memory's bandwidth. For each size, "floor_seconds" is the time of the work at the highest
    rate that was measured there. The peak rate is the highest of these rates over all sizes of the
    same problem, dtype and setting.

    Args:
        sweep_records: the records of the sweep, changed in place.
        bandwidth: the memory's bandwidth in bytes a second.
    """
    forwards_of: dict[tuple, list[dict]] = {}
    for record in sweep_records:
        for run in record["runs"]:
            if run["forward"]["floor_seconds"]:  # missing if an interrupt came before
                series = record["problem"], record["dtype"], run["setting"]
                forwards_of.setdefault(series, []).append(run["forward"])
    for forwards in forwards_of.values():
        peak_rate = max(forward["work"] / forward["floor_seconds"] for forward in forwards)
        for forward in forwards:
            seconds_to_compute = forward["work"] / peak_rate
            seconds_to_move = forward["moved_bytes"] / bandwidth
            forward["roofline_seconds"] = max(seconds_to_compute, seconds_to_move)
