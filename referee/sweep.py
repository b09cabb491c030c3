"""Times over sizes and dtypes, within a bounded time, beside the device's roofline."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

import torch

from referee.clock import CpuClock, CudaClock
from referee.memory import LARGEST_SHARE, free_bytes
from referee.outcome import Run
from referee.progress import Progress
from referee.report.tables import interval, rates
from referee.timing import Rounds, Timings

DTYPES = ("float32", "float16", "bfloat16")  # unless others are asked for
SECONDS = {"cpu": 80.0, "cuda": 300.0}  # for all sizes together; the last one may take longer
COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}  # bytes, beyond the caches
COPIES = 10
WIDTH, NUMBERS = 30, "{:>12}  {:>10}  {}"  # columns of the table


class Series(Protocol):
    """Sizes of a problem in one dtype and setting.

    Attributes:
        shapes: of x.
    """

    setting: str
    shapes: list[tuple[int, ...]]

    def needed(self, shape: tuple[int, ...]) -> int:
        """Bytes of memory that a size takes."""

    def time(self, shape: tuple[int, ...], wanted: Rounds, progress: Progress) -> Timings:
        """The forward's times."""

    def close(self) -> None:
        """Gives up what is kept between sizes."""


@dataclass
class Size:
    """A size of a series, and its times or why it was left out.

    Attributes:
        limit: seconds of the call on the roofline; None until its series is done.
    """

    problem: str
    dtype: str
    setting: str
    shape: tuple[int, ...]
    run: Run | None = None
    left_out: str = ""
    limit: float | None = None

    @property
    def label(self) -> str:
        """Shape, dtype and setting."""
        return " ".join(filter(None, [str(list(self.shape)), self.dtype, self.setting]))

    @property
    def problems(self) -> list[str]:
        """The faults, in words."""
        return self.run.problems if self.run else []


def sweep(
    series: dict[tuple[str, str], list[Series]],
    device: torch.device,
    trials: int | None,
    progress: Progress,
) -> Iterator[Size]:
    """Times every size, or says why not.

    Args:
        series: by the names of problem and dtype.
        trials: as `Rounds.trials`.
    """
    end = monotonic() + SECONDS[device.type]
    bandwidth = copy_bandwidth(device)
    total = sum(len(one.shapes) for several in series.values() for one in several)
    done = 0
    for (problem, dtype), several in series.items():
        for one in several:
            sizes = []
            for shape in one.shapes:
                size = Size(problem, dtype, one.setting, shape)
                seconds, count = end - monotonic(), f"case {done + 1} of {total}"
                if not (reason := _reason(one.needed(shape), seconds, device)):

                    def say(stage: str, detail: str = "", count: str = count) -> None:
                        left = max(end - monotonic(), 0)
                        progress("sweeping,", f"{count}, at most {left:.0f} s left")

                    wanted = Rounds(trials, seconds / (total - done))
                    try:
                        size.run = Run(one.setting, one.time(shape, wanted, say))
                    except torch.OutOfMemoryError:
                        reason = "the memory there is does not do"
                size.left_out = reason
                done += 1
                sizes.append(size)
                yield size
            one.close()
            add_limits(sizes, bandwidth)


def _reason(needed: int, seconds: float, device: torch.device) -> str:
    """Why a size is left out, or ""."""
    free = free_bytes(device)
    if device.type == "cuda":  # what torch holds without using it
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > LARGEST_SHARE * free:
        gib = needed / 2**30, LARGEST_SHARE * free / 2**30
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


def add_limits(sizes: list[Size], bandwidth: float) -> None:
    """The roofline of a series: the highest rate of its baselines, and the memory's bandwidth."""
    timed = [(size, size.run.timings) for size in sizes if size.run]
    if not timed:
        return
    peak = max(timings.work / timings.floor for _, timings in timed)
    for size, timings in timed:
        size.limit = max(timings.work / peak, timings.moved / bandwidth)


def lines(size: Size, earlier: list[Size]) -> str:
    """The line of a size, below a title if it is the first of its problem with times."""
    if size.run is None:
        return f"{size.label:<{WIDTH}}  left out: {size.left_out}"
    timings = size.run.timings
    if not any(other.run and other.problem == size.problem for other in earlier):
        titles = ("median us", timings.rate.unit, f"{timings.names.eager} / this")
        title = f"\n{size.problem:<{WIDTH}}  {NUMBERS.format(*titles)}\n"
    else:
        title = ""
    [row] = (row for row in rates(timings) if row["name"] == timings.names.solution)
    numbers = f"{row['median_ms'] * 1e3:.2f}", f"{row['rate']:.4g}", interval(row)
    wrong = "".join(f"\nWRONG  {size.label}: {problem}" for problem in size.problems)
    return f"{title}{size.label:<{WIDTH}}  {NUMBERS.format(*numbers)}{wrong}"
