"""The caches that are measured beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import attrs
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..cache import VeloxCache
from ..model import make_cache
from .policies import PolicySpec, settings_of

#: First rows that the rotating cache keeps, as mlx-lm's own tools have it.
SINKS = 4


def full(model: Any) -> list[Any]:
    """The model's own caches, one a layer."""
    caches: list[Any] = make_prompt_cache(model)
    return caches


def rotating(model: Any, budget: int) -> list[Any]:
    """The same, each plain one replaced by a ``RotatingKVCache`` of so many rows."""
    return [
        RotatingKVCache(budget, keep=SINKS) if type(cache) is KVCache else cache
        for cache in full(model)
    ]


def arrays(cache: list[Any]) -> list[Any]:
    """All that the caches hold, to be evaluated. Reading a ``VeloxCache``'s state would settle its
    newest block, which ends its ``slack``."""
    return [
        (layer.keys, layer.values) if isinstance(layer, VeloxCache) else layer.state
        for layer in cache
    ]


@attrs.frozen
class Contender:
    """One kind of cache with one budget.

    Args:
        policy: ``"full"``, ``"rotating"``, or a policy as it was asked for.
        budget: rows that a layer keeps; None for the full cache.
        make: gives new, empty caches, one a layer.
        options: all that the policy has beside the budget. Default none.
        code: a digest of the policy's code. Default none.
    """

    policy: str
    budget: int | None
    make: Callable[[], list[Any]]
    options: dict[str, Any] = attrs.field(factory=dict)
    code: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """What a record says of it."""
        return attrs.asdict(self, filter=attrs.filters.exclude("make"))

    def __str__(self) -> str:
        return self.policy if self.budget is None else f"{self.policy}, {self.budget:,} rows"


def contenders(
    model: Any, policies: Iterable[PolicySpec], budgets: Iterable[int]
) -> list[Contender]:
    """The full cache, then at each budget the rotating one and each policy.

    Raises:
        VeloxError: what ``load_policy`` and ``make_cache`` raise.
    """
    found = [Contender("full", None, partial(full, model))]
    policies = list(policies)
    for budget in budgets:
        found.append(Contender("rotating", budget, partial(rotating, model, budget)))
        for spec in policies:
            policy = spec.load(budget)
            make = partial(make_cache, model, policy)
            make()  # what it refuses, it refuses now
            found.append(Contender(spec.text, budget, make, **settings_of(policy)))
    return found
