"""Timing several cases side by side: where the machine is busy for a while, it slows them all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from .plan import Progress


def interleave(
    cases: Mapping[str, Callable[[], float]], rounds: int, progress: Progress
) -> dict[str, list[float]]:
    """Run every case once a round, in every second round in the opposite order. A first round,
    which warms up, doesn't count.

    Args:
        cases: by name, what gives a case's seconds.
        rounds: how many count.
        progress: called after each case of each round; ``(rounds + 1) * len(cases)`` times.

    Returns:
        By name, the seconds of each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds + 1):
        for name in list(cases)[:: 1 if i % 2 else -1]:
            took = cases[name]()
            if i:
                seconds[name].append(took)
            progress()
    return seconds


def speed_ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """How many times as fast as the reference: the median of the rounds' ratios."""
    return statistics.median(r / s for s, r in zip(seconds, reference, strict=True))
