"""Checks of the rows that one sequence's cache holds."""

from __future__ import annotations

import attrs
import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..cache import VeloxCache
from ..lookback import LookbackCache
from .check import Check
from .failure import CheckFailed
from .held import full, held, same, untouched
from .hook_checks import evict, protected, score
from .stream import step
from .trial import LAYERS, Trial


def mixes(budget: int) -> list[list[int]]:
    """Blocks and steps in several mixes, each well beyond the budget."""
    return [
        [1] * (budget + 8),
        [2 * budget + 3, 1, 1, 1],
        [budget - 1, 1, 1, 1, 1],
        [budget, budget, 1, 1],
        [3, 1, 4, 1, 5, 9, 2, 6, budget, 1, 1, 5, 1],
    ]


def _budget(trial: Trial) -> str:
    layer_budgets(trial)
    stream = trial.stream(2 * trial.budget + 40)
    policy = trial.policy()
    for mix in mixes(trial.budget):
        cache = trial.cache(policy=policy)
        for i, n in enumerate(mix):
            stream.feed(cache, [n])
            if n > 1 or mix[i + 1 : i + 2] != [1] or i % 4 == 3:
                full(cache, f"after blocks of {', '.join(map(str, mix[: i + 1]))}")
    return ""


def layer_budgets(trial: Trial) -> None:
    """Fail unless layers, however unequal, keep no more than ``budget`` rows on average, and each
    has room for what must stay."""
    policy = trial.policy()
    for n in (2, LAYERS[-1] + 1):
        rows = [policy.layer_budget(layer, n) for layer in range(n)]
        stay = [1 + sum(policy.claimed(budget).values()) for budget in rows]
        short = [layer for layer in range(n) if rows[layer] < stay[layer]]
        if sum(rows) > n * trial.budget:
            raise CheckFailed(
                f"layers keep no more than budget={trial.budget} rows on average",
                f"layer_budget gives {sum(rows)} rows to {n} layers",
            )
        if short:
            layer = short[0]
            raise CheckFailed(
                "each layer has room for the rows that must stay",
                f"layer_budget({layer}, {n}) is {rows[layer]}, and {stay[layer]} rows must",
            )


budget = Check(
    "budget",
    "the cache holds budget rows once that many tokens came, never more, in any mix of blocks and "
    "steps; where layers get unequal numbers, budget is their mean or more",
    _budget,
    needs=(score, evict, protected),
)


def _offsets(trial: Trial) -> str:
    stream = trial.stream(2 * trial.budget + 40)
    policy = trial.policy()
    for mix in mixes(trial.budget):
        cache, seen = trial.cache(policy=policy), 0
        for n in mix:
            stream.feed(cache, [n])
            seen += n
            if cache.offset != seen:
                raise CheckFailed(f"offset is {seen} after {seen} tokens", f"{cache.offset}")
        untouched(cache, stream, f"after blocks of {', '.join(map(str, mix))}")
    return ""


offsets = Check(
    "offsets",
    "offset counts all tokens seen, and each row held is the one that came, with its true position",
    _offsets,
    needs=(score, evict, protected),
)


def _deterministic(trial: Trial) -> str:
    stream = trial.stream(trial.budget + 24)
    blocks = [trial.budget + 4, *[1] * 18]
    first, second = (held(stream.feed(trial.cache(), blocks)) for _ in range(2))
    same(
        "the same tokens leave the same rows, run after run",
        "one run",
        first,
        "the next",
        second,
    )
    return ""


deterministic = Check(
    "deterministic",
    "the same tokens leave the same rows, run after run",
    _deterministic,
    needs=(score, evict, protected),
)


def _stateless(trial: Trial) -> str:
    policy, blocks = trial.policy(), [trial.budget + 4, *[1] * 12]
    # Two sequences in this layer, and as many in others, in turn, as in a model.
    trials = [attrs.evolve(trial, layer=layer) for layer in (trial.layer, *LAYERS)]
    streams = [trial.stream(trial.budget + 24, more=i) for i in range(len(trials))]
    alone = [
        held(stream.feed(each.cache(), blocks))
        for each, stream in zip(trials, streams, strict=True)
    ]
    caches = [each.cache(policy=policy) for each in trials]
    for n in blocks:
        for stream, cache in zip(streams, caches, strict=True):
            stream.feed(cache, [n])
    expected = "one policy serves many caches at once and remembers nothing of any"
    for alone_, cache in zip(alone, caches, strict=True):
        same(
            expected, "a cache with the policy to itself", alone_, "one that shares it", held(cache)
        )
    return ""


stateless = Check(
    "stateless",
    "one policy serves all layers and sequences at once: it remembers nothing of any",
    _stateless,
    needs=(score, evict, protected, deterministic),
)


def _read(cache: VeloxCache) -> VeloxCache:
    assert cache.nbytes
    mx.eval([part for part in cache.state if isinstance(part, mx.array)])
    return cache


def _chunking(trial: Trial) -> str:
    prompt, policy = trial.budget - 2, trial.policy()
    pieces = [3, prompt - 8, 1, 1, 3]
    expected = "decode steps leave the same rows however they are fed"
    for more, steps in enumerate((4, 8, 20)):
        stream = trial.stream(trial.budget + 24, more)
        plain = held(stream.feed(trial.cache(policy=policy), [prompt, *[1] * steps]))
        read = stream.feed(trial.cache(policy=policy), [prompt, *[1] * steps], after=_read)
        pieced = stream.feed(trial.cache(policy=policy), [*pieces, *[1] * steps])
        others = {
            "the one whose state and size were read after each step": read,
            f"the one whose prompt came in blocks of {pieces}": pieced,
        }
        for sizes in ([4] * (steps // 4), [1, 3, *[8] * (steps // 8)]):
            if sum(sizes) == steps:
                rows = policy.layer_budget(0, 1)
                cache = LookbackCache(policy, rows, trial.layer, lookback=8)
                looks = stream.feed(cache, [prompt, *sizes])
                others[f"one that looks back, fed in blocks of {sizes}"] = looks
        for what, cache in others.items():
            after = f"after a prompt of {prompt} and {steps} steps"
            same(expected, f"{after}, the cache", plain, what, held(cache))
    # A block lets many rows go at once, which shows more of their order; and in a long prompt even
    # what differs by little a block adds up.
    policy = trial.policy(budget=4 * trial.budget)
    prompt, last = policy.layer_budget(0, 1) - 2, 2 * trial.budget
    for more in range(3, 5):
        stream = trial.stream(prompt + last, more)
        plain, singly = (
            held(stream.feed(trial.cache(policy=policy), [*blocks, last]))
            for blocks in ([prompt], [1] * prompt)
        )
        after = f"after a prompt of {prompt} in one block, and {last} tokens more,"
        what = "the one whose prompt came in blocks of 1"
        same(expected, f"{after} the cache", plain, what, singly)
    return ""


chunking = Check(
    "chunking",
    "decode steps leave the same rows one by one, in the blocks of speculative decoding, with the "
    "state read in between, and after a prompt within the budget in any pieces",
    _chunking,
    needs=(score, evict, protected, deterministic, stateless, offsets),
)


def _kvcache(trial: Trial) -> str:
    tokens = max(trial.budget, 32)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        stream = trial.stream(tokens, dtype=dtype)
        policy = trial.policy(budget=tokens)
        cache, whole = trial.cache(policy=policy), KVCache()
        start = 0
        for n in (5, 1, 1, 11, *[1] * (tokens - 18)):
            block = stream.block(start, n)
            ours, theirs = step(cache, block), whole.update_and_fetch(block.keys, block.values)
            start += n
            for name, a, b in zip(("keys", "values"), ours, theirs, strict=True):
                if a.dtype != b.dtype or not mx.array_equal(a, b).item():
                    raise CheckFailed(
                        f"with budget={tokens}, {tokens} tokens give just what mlx-lm's KVCache "
                        "gives",
                        f"other {name} after {start} tokens ({dtype}): {a.shape} {a.dtype} against "
                        f"{b.shape} {b.dtype}",
                    )
    return ""


kvcache = Check(
    "kvcache",
    "while no more tokens came than the budget takes, all is bit for bit as with mlx-lm's KVCache",
    _kvcache,
    needs=(score, evict, protected),
)

ROW_CHECKS = [budget, offsets, deterministic, stateless, chunking, kvcache]
