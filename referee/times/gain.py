"""Tells whether a solution's times are a gain over eager's; VERDICTS.md has the rules."""

from statistics import median

from referee.times.ratios import p10_and_p90, speed_up
from referee.verdict_words import FASTER, SLOWER, TIE, TOO_NOISY

# Two processes that run the same code differ by this factor, because they got other addresses. In a
# short call they differ by this many seconds.
PLACEMENT = {"cpu": 1.1, "cuda": 1.01}
PLACEMENT_SECONDS = {"cpu": 0.0, "cuda": 3e-7}
# If eager differs from itself by a larger factor, the machine is noisy.
MAX_CONTROL = 1.3
MIN_JUDGED_ROUNDS = 3  # rounds: fewer do not tell a difference from noise


def compare_times(
    eager: list[float],
    control: list[float],
    solution: list[float],
    device: str,
    lateness: float = 1.0,
) -> str:
    """Return FASTER, SLOWER, TIE or TOO_NOISY for a solution's times beside eager's.

    VERDICTS.md, "When is a ratio a gain?", has the rule. The spread of eager's times counts only
    on a GPU: on a CPU, what slows a round slows all timed calls in it.

    Args:
        eager: eager's seconds of a call, for each round.
        control: the control's.
        solution: the solution's.
        device: "cpu" or "cuda".
        lateness: by which factor late launches lengthen eager's calls, see `Sample.lateness`.
    """
    if len(eager) < MIN_JUDGED_ROUNDS:
        return TOO_NOISY
    eager_to_itself = speed_up(eager, control)
    farthest_control = max(eager_to_itself.high, 1 / eager_to_itself.low)
    is_noisy = farthest_control > MAX_CONTROL
    shortest = min(median(eager), median(solution))
    noise_of_placement = max(PLACEMENT[device], 1 + PLACEMENT_SECONDS[device] / shortest)
    noise_of_control = max(eager_to_itself.ratio, 1 / eager_to_itself.ratio)
    noise = max(noise_of_placement, noise_of_control)
    if is_noisy:
        noise = max(noise, farthest_control)
    if device == "cuda":
        p10, p90 = p10_and_p90(eager + control)
        noise = max(noise, p90 / p10, lateness)
    gain = speed_up(eager, solution)
    may_be_equal = gain.low / noise <= 1 <= gain.high * noise
    if may_be_equal:
        return TOO_NOISY if is_noisy else TIE
    return FASTER if gain.ratio > 1 else SLOWER
