"""The caches that policies are measured beside: a model's own, and mlx-lm's bounded one."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

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
