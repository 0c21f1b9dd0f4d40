"""What all measures share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from ..policies import PolicySpec

#: Called at each step forward, with nothing.
Progress = Callable[[], object]


@attrs.frozen(kw_only=True)
class Plan:
    """How caches are timed.

    Args:
        policies: beside mlx-lm's caches.
        budget: rows that each layer keeps.
        rounds: how often each case is timed, in turn with the others.
        steps: tokens that a case decodes in a round.
        block: tokens of a prompt that are read at once.
    """

    policies: Sequence[PolicySpec]
    budget: int
    rounds: int
    steps: int
    block: int
