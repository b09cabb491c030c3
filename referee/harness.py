"""A public harness's clock on identical code: `python -m referee.harness [--rows N]`; needs a GPU.

KernelBench times a candidate right after its check, and the reference later: 3 calls to warm up,
`empty_cache()`, one call that is thrown away, and the mean of the rest, each between two events and
after 256 MiB have been overwritten. This does the same with `torch.relu` on both sides, with that
`empty_cache()` and without it, and then times both sides as `run.py` does.
"""

import argparse
import sys
from statistics import mean, median

import torch

from model import PROBLEMS
from referee import report
from referee.pairs import Modules, alternate, samplers_of
from referee.stats import speed_up
from referee.timing import Names

TRIALS = (20, 100)  # KernelBench's scripts differ
SLOW = 1.05  # of the median of the later half; of 20 trials that half may be slow too


def relu(x: torch.Tensor) -> torch.Tensor:
    """Both sides."""
    return torch.relu(x)


def check(x: torch.Tensor) -> None:
    """The harness's comparison, which leaves its memory to torch's cache."""
    assert torch.allclose(relu(x), relu(x), atol=1e-4, rtol=1e-4)


def harness_times(x: torch.Tensor, trials: int, frees: bool) -> list[float]:
    """Milliseconds of each trial by the harness's clock."""
    for _ in range(3):
        relu(x)
        torch.cuda.synchronize()
    if frees:
        torch.cuda.empty_cache()
    times = []
    for trial in range(trials + 1):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.empty((32, 1024, 1024), dtype=torch.int64, device=x.device).fill_(42)
        start.record()
        relu(x)
        end.record()
        torch.cuda.synchronize()
        if trial > 0:
            times.append(start.elapsed_time(end))
    return times


def count_slow(times: list[float]) -> int:
    """How many calls took longer than those of the later half."""
    usual = median(times[len(times) // 2 :])
    return sum(time > SLOW * usual for time in times)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=PROBLEMS["relu"].rows)
    rows = parser.parse_args(arguments).rows
    if not torch.cuda.is_available():
        print("expected a CUDA device, found none", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    [x] = (tensor.to(device) for tensor in PROBLEMS["relu"].get_inputs_at(rows))
    about = report.environment(device)
    print(f"{about['device']}, torch {about['torch']}, torch.relu twice, x {list(x.shape)}")

    table = [["clock", "trials", "candidate ms", "reference ms", "ratio", "slow calls"]]
    for frees in (True, False):
        for trials in TRIALS:
            check(x)
            sides = [harness_times(x, trials, frees) for _ in range(2)]
            candidate, reference = map(mean, sides)
            name = "harness" if frees else "harness, memory kept"
            slow = ", ".join(str(count_slow(times)) for times in sides)
            figures = [f"{candidate:.3f}", f"{reference:.3f}", f"{reference / candidate:.3f}"]
            table.append([name, str(trials), *figures, slow])
    check(x)
    torch.cuda.empty_cache()
    names = Names(solution="candidate", eager="reference")
    candidate, reference = alternate(samplers_of(Modules(names, relu, relu), x)).values()
    ratio, low, high = speed_up(reference, candidate)
    figures = [f"{median(times) * 1e3:.3f}" for times in (candidate, reference)]
    slow = ", ".join(str(count_slow(times)) for times in (candidate, reference))
    interval = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
    table.append(["this project", str(len(candidate)), *figures, interval, slow])
    print(report.table(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
