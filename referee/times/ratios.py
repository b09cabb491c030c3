"""Ratios of times with their intervals, and percentiles of times."""

from statistics import quantiles
from typing import NamedTuple

import torch

RESAMPLES = 2000  # of the bootstrap


def p10_and_p90(times: list[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile."""
    tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return tenths[0], tenths[-1]


class SpeedUp(NamedTuple):
    """How many times faster some times are than a baseline's.

    Attributes:
        ratio: the median over the rounds.
        low: the lower end of its 95% interval.
        high: the upper end.
    """

    ratio: float
    low: float
    high: float


def speed_up(baseline: list[float], times: list[float]) -> SpeedUp:
    """Return how many times faster some times are than the baseline's.

    Both lists have one time a round. The ratio is taken in each round, where it does not matter
    what slows the whole round.

    Args:
        baseline: the seconds of the baseline.
        times: the seconds of a timed call.

    Returns:
        The median of the ratios; the interval is a percentile bootstrap.
    """
    ratios = torch.tensor([b / t for b, t in zip(baseline, times, strict=True)], dtype=torch.double)
    generator = torch.Generator().manual_seed(0)  # the same times always give the same interval
    rounds = len(ratios)
    resampled = ratios[torch.randint(rounds, (RESAMPLES, rounds), generator=generator)]
    medians = resampled.quantile(0.5, dim=1)
    low, high = medians.quantile(0.025), medians.quantile(0.975)
    return SpeedUp(ratios.quantile(0.5).item(), low.item(), high.item())
