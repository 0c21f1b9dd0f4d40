"""The caches that are timed beside each other, and how they are filled."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from ...model import make_cache
from ..caches import full, rotating
from ..policies import PolicySpec
from .plan import Plan

FULL, ROTATING = "KVCache", "RotatingKVCache"
#: Tokens beyond the budget that a bounded cache is filled with: it then evicts at every step.
MORE = 64


def bounded(model: Any, plan: Plan) -> dict[str, Callable[[], list[Any]]]:
    """What makes caches of so many rows, by name: mlx-lm's first, then each policy's."""

    def made(spec: PolicySpec) -> Callable[[], list[Any]]:
        policy = spec.load(plan.budget)
        return lambda: make_cache(model, policy)

    return {
        ROTATING: partial(rotating, model, plan.budget),
        **{spec.text: made(spec) for spec in plan.policies},
    }


def plain(cache: Any) -> bool:
    """Whether it keeps every row, and can be set back."""
    return type(cache) in (KVCache, BatchKVCache)


def filled(model: Any, make: Callable[[], list[Any]], plan: Plan) -> list[Any]:
    """A bounded cache that has read as many tokens as its budget, and ``MORE``."""
    cache = make()
    read(model, made_up(model, plan.budget + MORE), cache, plan.block)
    return cache


def grown(model: Any, lengths: Iterable[int], block: int) -> dict[int, list[Any]]:
    """Full caches that have read so many tokens: one prompt, and a copy at each length."""
    lengths = sorted(set(lengths))
    cache, copies, done = full(model), {}, 0
    tokens = made_up(model, lengths[-1])
    for length in lengths:
        read(model, tokens[:, done:length], cache, block)
        done, copies[length] = length, copy.deepcopy(cache)
    return copies


def made_up(model: Any, n: int) -> mx.array:
    """``[1, n]`` random tokens, always the same ones. No time depends on what they say."""
    vocabulary = model(mx.array([[0]])).shape[-1]
    return mx.random.randint(0, vocabulary, (1, n), key=mx.random.key(0))


def read(model: Any, tokens: mx.array, cache: list[Any], block: int) -> float:
    """Read a prompt in blocks, as mlx-lm does.

    Returns:
        The seconds it took.
    """
    started = time.perf_counter()
    for start in range(0, tokens.shape[1], block):
        model(tokens[:, start : start + block], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
    return time.perf_counter() - started


def decode(model: Any, cache: list[Any], steps: int, batch: int = 1) -> float:
    """Decode greedily, each step begun before the last one is done, as mlx-lm does. Plain caches
    are then set back to as many rows as they had.

    Returns:
        Seconds a step.
    """
    token = _next(model, mx.ones((batch, 1), mx.int32), cache)
    mx.eval(token)
    started = time.perf_counter()
    for _ in range(steps):
        ahead = _next(model, token, cache)
        mx.async_eval(ahead)  # type: ignore[no-untyped-call]
        mx.eval(token)
        token = ahead
    mx.eval(token)
    seconds = (time.perf_counter() - started) / steps
    for layer in cache:
        if plain(layer):
            layer.trim(steps + 1)
    return seconds


def _next(model: Any, token: mx.array, cache: list[Any]) -> mx.array:
    return mx.argmax(model(token, cache=cache)[:, -1], axis=-1, keepdims=True)
