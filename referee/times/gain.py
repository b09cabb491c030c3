"""Tells whether a solution's times are a gain over eager's; VERDICTS.md has the rules."""

from statistics import median

from referee.times.ratios import SpeedUp, p10_and_p90, speed_up
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

    VERDICTS.md, "When is a ratio a gain?", has the rule.

    Args:
        eager: eager's seconds of a call, for each round.
        control: the control's.
        solution: the solution's.
        device: "cpu" or "cuda".
        lateness: by which factor late launches lengthen eager's calls, see `Sample.lateness`.
    """
    if len(eager) < MIN_JUDGED_ROUNDS:
        return TOO_NOISY
    control_ratio = speed_up(eager, control)
    shortest_call = min(median(eager), median(solution))
    noise = max(_placement(device, shortest_call), _control(control_ratio))
    if device == "cuda":  # on a CPU, what slows a round slows all timed calls in it
        noise = max(noise, _spread(eager + control), lateness)
    gain = speed_up(eager, solution)
    may_be_equal = gain.low / noise <= 1 <= gain.high * noise
    if may_be_equal:
        return TOO_NOISY if _is_noisy(control_ratio) else TIE
    return FASTER if gain.ratio > 1 else SLOWER


# The factors of the noise: the rows of the table in VERDICTS.md, "When is a ratio a gain?".


def _placement(device: str, shortest_call: float) -> float:
    """Return the factor by which two processes that run the same code differ."""
    return max(PLACEMENT[device], 1 + PLACEMENT_SECONDS[device] / shortest_call)


def _control(control_ratio: SpeedUp) -> float:
    """Return the factor by which eager differs from itself."""
    if _is_noisy(control_ratio):
        return _farthest_end(control_ratio)
    return max(control_ratio.ratio, 1 / control_ratio.ratio)


def _is_noisy(control_ratio: SpeedUp) -> bool:
    """Return whether eager may differ from itself by more than MAX_CONTROL."""
    return _farthest_end(control_ratio) > MAX_CONTROL


def _farthest_end(ratio: SpeedUp) -> float:
    """Return the end of the interval that is farther from 1, as a factor above 1."""
    return max(ratio.high, 1 / ratio.low)


def _spread(eager_times: list[float]) -> float:
    """Return the spread of eager's times over the rounds."""
    p10, p90 = p10_and_p90(eager_times)
    return p90 / p10
