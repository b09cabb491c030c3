"""Times over sizes and dtypes, within a bounded time, beside the device's roofline."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import torch

from referee.clock import CpuClock, CudaClock
from referee.judge.verdict import LEFT_OUT, Task, Verdict
from referee.memory import BUFFERS, LARGEST_SHARE, free_bytes
from referee.report.tables import interval, rates

DTYPES = ("float32", "float16", "bfloat16")  # unless others are asked for
SECONDS = {"cpu": 80.0, "cuda": 300.0}  # for all sizes together; the last one may take longer
COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}  # bytes, beyond the caches
COPIES = 10
WIDTH, NUMBERS = 30, "{:>12}  {:>10}  {}"  # columns of the table

Make = Callable[[float], Task]  # a task for that many seconds


def sweep(
    sizes: list[tuple[dict, int, Make]], device: torch.device, leave_out: Callable[..., None]
) -> Iterator[Task]:
    """The tasks of the sizes that fit in memory and time.

    Args:
        sizes: facts for the record, the bytes that are needed, and how the task is made.
        leave_out: is told the facts of others, and a verdict.
    """
    end = monotonic() + SECONDS[device.type]
    for done, (facts, needed, make) in enumerate(sizes):
        seconds = end - monotonic()
        if reason := _reason(needed, seconds, device):
            leave_out(facts, Verdict(Path(), LEFT_OUT, reason))
        else:
            yield make(seconds / (len(sizes) - done))


def _reason(needed: int, seconds: float, device: torch.device) -> str:
    """Why a size is left out, or ""."""
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
    peaks: dict[tuple, float] = {}
    runs = [
        ((record["problem"], record["dtype"], run["setting"]), run)
        for record in records
        for run in record["runs"]
        if run["forward"]["floor_seconds"]  # an interrupt came before it was known
    ]
    for key, run in runs:
        forward = run["forward"]
        peaks[key] = max(peaks.get(key, 0.0), forward["work"] / forward["floor_seconds"])
    for key, run in runs:
        forward = run["forward"]
        limits = forward["work"] / peaks[key], forward["moved_bytes"] / bandwidth
        forward["roofline_seconds"] = max(limits)


def line(record: dict, verdict: Verdict, is_first: bool) -> str:
    """The line of a size, below a title if it is the first of its problem with times."""
    settings = [run.setting for run in verdict.runs]
    label = " ".join(filter(None, [str(record["shape"]), record["dtype"], *settings]))
    if not verdict.runs:
        return f"{label:<{WIDTH}}  {verdict.word}: {verdict.reason}"
    [timings], title = [run.timings for run in verdict.runs], ""
    if is_first:
        titles = ("median us", timings.rate.unit, f"{timings.names.eager} / this")
        title = f"\n{record['problem']:<{WIDTH}}  {NUMBERS.format(*titles)}\n"
    [row] = (row for row in rates(timings) if row["name"] == timings.names.solution)
    numbers = f"{row['median_ms'] * 1e3:.2f}", f"{row['rate']:.4g}", interval(row)
    return f"{title}{label:<{WIDTH}}  {NUMBERS.format(*numbers)}"
