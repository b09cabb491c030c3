"""Measures the cost of an empty call and its spread: `python -m referee.program.empty_call`.

It prints a line for each size of ReLU. A line has the 10th, 50th and 90th percentile of three
times, in microseconds:

    empty       the time of a request whose call does nothing, by the referee's clock
    call        the time of eager's call, by the process's own clock
    overhead    the time of the same request by the referee's clock, minus that of the call

Each request has one call. A grading measures the same for its own requests, which may have up to 32
calls; "Two clocks" in PROTECTION.md says how. On a GPU:

    python -m referee.program.empty_call cuda
"""

import sys
import tempfile
from pathlib import Path
from statistics import quantiles

import torch

from referee.call_names import MODULE
from referee.devices import choose_device
from referee.engine import referee_at_work
from referee.reference.file import load
from referee.reference.problem import Problem
from referee.resources import Resources
from referee.rounds.timed_requests import TimedCall, empty_call, make_flush, time_and_free

ELEMENTS = (1 << 10, 1 << 20, 1 << 24)
REQUESTS = 200
RELU = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)


def get_inputs():
    return [torch.rand(ELEMENTS)]


def get_init_inputs():
    return []
"""


def percentiles(seconds: list[float]) -> str:
    """Return the 10th, 50th and 90th percentile in microseconds, as columns of text."""
    tenths = quantiles(seconds, n=10, method="inclusive")
    return " ".join(f"{tenths[i] * 1e6:8.0f}" for i in (0, 4, 8))


def measure(elements: int, device: torch.device) -> str:
    """Return the line for a size."""
    with tempfile.TemporaryDirectory() as folder, referee_at_work(separate_builds=True) as server:
        path = Path(folder, "relu.py")
        path.write_text(RELU.replace("ELEMENTS", str(elements)))
        resources = Resources(Problem("relu", load(path), device), server)
        try:
            resources.try_walls()
            resources.eager.start()
            resources.memory.write_inputs([resources.problem.draw()])
            resources.eager.set_precision()
            process = resources.eager.members[0]
            flush = make_flush(resources)
            nothing = empty_call(resources)
            eager = TimedCall("eager", process, MODULE)
            empty = [
                time_and_free(resources, nothing, 1, flush).request_seconds for _ in range(REQUESTS)
            ]
            samples = [time_and_free(resources, eager, 1, flush) for _ in range(REQUESTS)]
        finally:
            resources.close()
    call = [sample.call_seconds[0] for sample in samples]
    overhead = [sample.request_seconds - sample.call_seconds[0] for sample in samples]
    columns = "  |".join(map(percentiles, (empty, call, overhead)))
    return f"{elements:>10,} |{columns}"


def main() -> None:
    """Print a line for each size."""
    try:
        device, _ = choose_device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    except ValueError as error:
        sys.exit(str(error))
    print("  elements |  empty: p10, p50, p90     |  call                      |  overhead")
    for elements in ELEMENTS:
        print(measure(elements, device), flush=True)


if __name__ == "__main__":
    main()
