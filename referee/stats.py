"""Medians, spreads and ratios of repeated timings."""

import random
from statistics import median, quantiles

RESAMPLES = 2000


def spread(times: list[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    if len(times) < 2:
        return times[0], times[0]
    tenths = quantiles(times, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def speed_up(baseline: list[float], times: list[float]) -> tuple[float, float, float]:
    """How many times faster than the baseline: the median over rounds, and its 95% interval.

    Both lists hold one time a round, so that what slows a whole round cancels in the pair. The
    interval is a percentile bootstrap of the median.
    """
    ratios = [b / t for b, t in zip(baseline, times, strict=True)]
    draw = random.Random(0)  # the same report for the same times
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
