"""Verdicts on files in words: a line each, and a table of several."""

import math
from statistics import median

from referee.judge.verdict import CORRECT, TIE, Verdict
from referee.report.tables import table
from referee.stats import speed_up


def line(verdict: Verdict) -> str:
    """The file, the verdict, and the reason or the times."""
    if verdict.word != CORRECT:
        return f"{verdict.file}: {verdict.word} ({verdict.reason})"
    facts = [verdict.accuracy, f"{verdict.count} cases", *verdict.notes]
    if verdict.refused:
        facts.append(f"refuses {', '.join(verdict.refused)}")
    time, ratio, said, share = _cells(verdict)
    times = f"{time} ms, eager / this {ratio}: {said}; {share} of the limit"
    if step := verdict.runs[0].step:
        names, seconds = step.forward.names, step.seconds()["step"]
        figures = speed_up(seconds[names.eager], seconds[names.solution])
        times += "; training step {:.3f} [{:.3f}, {:.3f}]".format(*figures)
        if names.solution in step.kept:
            kept = step.kept[names.solution], step.kept[names.eager]
            times += ", keeps {:,} bytes, eager {:,}".format(*kept)
    return f"{verdict.file}: correct ({'; '.join(facts)}), {times}"


def ranking(verdicts: list[Verdict]) -> str:
    """All of them, the fastest first, and KernelBench's scores: fast_p is the share of files that
    are correct and more than p times as fast as eager.
    """
    rows = [["file", "verdict", "accuracy", "median ms", "eager / this", "", "of the limit"]]
    for verdict in sorted(verdicts, key=lambda v: -_ratio(v) or math.inf):
        cells = _cells(verdict) if verdict.runs else [""] * 4
        rows.append([str(verdict.file), verdict.word, verdict.accuracy, *cells])
    ratios = list(filter(None, map(_ratio, verdicts)))
    surely = [_ratio(v) for v in verdicts if _ratio(v) and v.runs[0].word != TIE]
    mean = f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}" if ratios else "none"
    fast = (f"fast_{p} {sum(r > p for r in surely) / len(verdicts):.2f}" for p in (1, 2))
    scores = f"{', '.join(fast)}; geometric mean of {len(ratios)} ratios: {mean}"
    return f"{table(rows)}\n{scores}"


def _cells(verdict: Verdict) -> list[str]:
    """Time, ratio, that in a word, and the share of the limit."""
    run = verdict.runs[0]
    seconds, names = run.timings.seconds, run.timings.names
    yardsticks = seconds.keys() - {names.solution, names.eager, names.again}
    ours = median(seconds[names.solution])
    share = 100 * min(median(seconds[name]) for name in yardsticks) / ours
    ratio, low, high = speed_up(seconds[names.eager], seconds[names.solution])
    return [f"{ours * 1e3:.3f}", f"{ratio:.3f} [{low:.3f}, {high:.3f}]", run.word, f"{share:.1f}%"]


def _ratio(verdict: Verdict) -> float:
    """Of the first setting, if the file is correct; 0 if there is none that means anything."""
    ratio = verdict.runs[0].ratio if verdict.runs and verdict.word == CORRECT else None
    return ratio[0] if ratio else 0.0
