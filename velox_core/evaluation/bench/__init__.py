"""How fast each cache is, beside mlx-lm's own and beside the model's own work.

A record, of kind ``"bench"``, holds one measure:

- ``measure``: ``"speed"``, ``"context"``, ``"batch"``, ``"hooks"`` or ``"import"``;
- ``device``, ``mlx`` and ``mlx_lm`` (their versions): what it ran on;
- ``rounds``: how often each case was timed, in turn with the others;
- for all but ``"import"``: ``policies``, as they were asked for, ``budget``, ``steps`` (decoded a
  round) and ``block`` (tokens of a prompt that are read at once);
- ``prompt`` (tokens) for ``"speed"``, ``contexts`` for ``"context"``, ``long`` (rows of a full
  cache) and ``sequences`` (of a batch of those) for ``"batch"``;
- ``cases``: what was measured, a cache each, as the function of that measure says. Times are in
  seconds, one a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

import attrs
import mlx.core as mx

from .decoding import PROMPT_ROUNDS, batch, context, speed
from .hooks import hooks
from .imports import imports
from .plan import Plan, Progress


@attrs.frozen
class Unit:
    """One record to be.

    Args:
        settings: all of the record but ``cases`` (and ``kind``, ``model`` and ``code``).
        work: how often ``measure`` tells of its progress.
        measure: gives the cases; it takes the model, which ``"import"`` doesn't need, and what is
            called at each step forward.
    """

    settings: dict[str, Any]
    work: int
    measure: Callable[[Any, Progress], list[dict[str, Any]]]


def units(
    measures: Iterable[str],
    plan: Plan,
    prompt: int,
    contexts: Sequence[int],
    long: int,
    batches: Iterable[int],
) -> list[Unit]:
    """What there is to measure: a unit a measure, and for ``"batch"`` one a number of sequences."""
    base = {
        "device": mx.default_device().type.name,
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "rounds": plan.rounds,
    }
    texts = [spec.text for spec in plan.policies]
    timed = {**base, "policies": texts, "budget": plan.budget}
    timed |= {"steps": plan.steps, "block": plan.block}
    caches, times = len(texts) + 2, plan.rounds + 1

    def batched(n: int) -> Callable[[Any, Progress], list[dict[str, Any]]]:
        return lambda model, progress: batch(model, plan, long, n, progress)

    made = {
        "speed": [
            Unit(
                {"measure": "speed", **timed, "prompt": prompt},
                caches * (PROMPT_ROUNDS + 1 + times),
                lambda model, progress: speed(model, plan, prompt, progress),
            )
        ],
        "context": [
            Unit(
                {"measure": "context", **timed, "contexts": contexts},
                (caches + len(contexts)) * times,
                lambda model, progress: context(model, plan, contexts, progress),
            )
        ],
        "batch": [
            Unit(
                {"measure": "batch", **timed, "long": long, "sequences": n},
                caches * times,
                batched(n),
            )
            for n in batches
        ],
        "hooks": [
            Unit(
                {"measure": "hooks", **timed},
                len(texts) * 3 * times,
                lambda model, progress: hooks(model, plan, progress),
            )
        ],
        "import": [
            Unit(
                {"measure": "import", **base},
                2 * plan.rounds,
                lambda model, progress: imports(plan.rounds, progress),
            )
        ],
    }
    return [unit for measure in measures for unit in made[measure]]
