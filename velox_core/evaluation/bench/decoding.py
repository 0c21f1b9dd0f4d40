"""Speed: of each policy beside mlx-lm's caches, over the context's length, and of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ...errors import VeloxError
from ..caches import full
from .caches import FULL, bounded, decode, filled, grown, made_up, plain, read
from .plan import Plan, Progress
from .rounds import interleave

PROMPT_ROUNDS = 3  # a prompt takes seconds, where a round of decoding takes one


def speed(model: Any, plan: Plan, prompt: int, progress: Progress) -> list[dict[str, Any]]:
    """Prompt, decoding and memory of each cache, the full one first.

    Every cache reads the whole prompt. For decoding the full one is cut down to ``budget`` rows,
    so that all have equally many, and what differs is the eviction.

    Returns:
        Cases with ``prompt_seconds`` and ``seconds`` (of a step) by round, ``peak_bytes``, the most
        beyond the weights that reading the prompt took, and ``bytes``, the cache's at the end.
    """
    if prompt <= plan.budget:
        raise VeloxError(
            f"a prompt of {prompt:,} tokens fits into {plan.budget:,} rows, so nothing would be "
            "evicted: give a longer one, or a smaller budget"
        )
    make: dict[str, Callable[[], list[Any]]] = {
        FULL: partial(full, model),
        **bounded(model, plan),
    }
    tokens = made_up(model, prompt)
    caches: dict[str, list[Any]] = {}
    peaks: dict[str, int] = {}

    def reading(name: str) -> float:
        caches.pop(name, None)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        caches[name] = make[name]()
        took = read(model, tokens, caches[name], plan.block)
        peaks[name] = mx.get_peak_memory() - before
        return took

    prompts = interleave({name: partial(reading, name) for name in make}, PROMPT_ROUNDS, progress)
    for layer in filter(plain, caches[FULL]):
        layer.trim(layer.offset - plan.budget)
    runs = {name: partial(decode, model, caches[name], plan.steps) for name in make}
    times = interleave(runs, plan.rounds, progress)
    return [
        {
            "cache": name,
            "prompt_seconds": prompts[name],
            "seconds": times[name],
            "peak_bytes": peaks[name],
            "bytes": sum(layer.nbytes for layer in caches[name]),
        }
        for name in make
    ]


def context(
    model: Any, plan: Plan, contexts: Sequence[int], progress: Progress
) -> list[dict[str, Any]]:
    """Decoding over the context's length: full caches with so many rows, the bounded ones with
    ``budget``, and a full one with a single row, which is the model's own work: no eviction can
    be quicker.

    The full caches are copies of one, made as it read a prompt; a bounded one's time doesn't
    depend on how much it has read beyond its budget.

    Returns:
        Cases with ``rows`` and ``seconds`` (of a step) by round.
    """
    copies = grown(model, [1, *contexts], plan.block)
    sized = {(FULL, rows): cache for rows, cache in copies.items()}
    for name, make in bounded(model, plan).items():
        sized[name, plan.budget] = filled(model, make, plan)
    runs = {
        f"{name}, {rows}": partial(decode, model, cache, plan.steps)
        for (name, rows), cache in sized.items()
    }
    times = interleave(runs, plan.rounds, progress)
    return [
        {"cache": name, "rows": rows, "seconds": seconds}
        for (name, rows), seconds in zip(sized, times.values(), strict=True)
    ]


def batch(
    model: Any, plan: Plan, long: int, sequences: int, progress: Progress
) -> list[dict[str, Any]]:
    """Decoding many sequences in the same memory: ``sequences`` full caches of ``long`` rows, or
    as many bounded ones as have no more rows together.

    Every sequence of a batch is a copy of one.

    Returns:
        Cases with ``batch``, ``rows`` (of each sequence) and ``seconds`` (of a step) by round.
    """
    if long < plan.budget:
        raise VeloxError(
            f"{long:,} rows are fewer than a budget of {plan.budget:,}: no policy would save memory"
        )
    many = sequences * long // plan.budget
    merged = {FULL: _copies(grown(model, [long], plan.block)[long], sequences)}
    for name, make in bounded(model, plan).items():
        merged[name] = _copies(filled(model, make, plan), many)
    size = dict.fromkeys(merged, many) | {FULL: sequences}
    runs = {
        name: partial(decode, model, cache, plan.steps, size[name])
        for name, cache in merged.items()
    }
    times = interleave(runs, plan.rounds, progress)
    return [
        {
            "cache": name,
            "batch": size[name],
            "rows": long if name == FULL else plan.budget,
            "seconds": times[name],
        }
        for name in merged
    ]


def _copies(cache: list[Any], n: int) -> list[Any]:
    merged = [layer.merge([layer] * n) for layer in cache]
    mx.eval([layer.state for layer in merged])
    return merged
