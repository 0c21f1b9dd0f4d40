"""Checks of what the hooks themselves give."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from ..policy import Policy
from ..protectors import Pin
from ..rows import Rows
from .check import Check
from .failure import CheckFailed
from .held import held, short, stayed
from .together import Together
from .trial import Trial
from .watcher import Calm, Evicting, Watcher, number


def watch_all(trial: Trial, calm: Calm | None = None) -> Watcher:
    """Watch a policy at a prompt, at steps and in a padded batch, in each scope that it takes."""
    watcher = Watcher()
    for scope in trial.subject.scopes:
        policy = trial.policy(watcher, *[calm] * bool(calm), scope=scope)
        if calm:
            claims = policy.hooks().hook.protect.get_hookimpls()
            calm.claims = sum(not impl.wrapper for impl in claims)
        cache = trial.cache(policy=policy)
        trial.stream(trial.budget + 26).feed(cache, [5, trial.budget + 7, 1, 1, 1, 5, *[1] * 6])
        cache._settle()
        padded(trial, policy, steps=4)
    return watcher


def padded(trial: Trial, policy: Policy, steps: int) -> None:
    """Feed three sequences: a prompt of unequal lengths in blocks, two beyond the budget, and
    then steps."""
    lengths = [trial.budget + 6, trial.budget // 2, trial.budget + 1]
    streams = [trial.stream(trial.budget + 30, more=i) for i in range(3)]
    together = Together.of([trial.cache(policy=policy) for _ in lengths], streams)
    together.prompts(lengths, [trial.budget - 3, 3, 6])
    together.steps(steps)
    together.cache._settle()


def all_finite(rows: Rows, scores: mx.array, giver: str = "score") -> None:
    """Fail unless each row has a finite score, or parts of one."""
    scores = scores.reshape(*rows.positions.shape, -1)
    wrong = ~mx.isfinite(scores) & (rows.positions >= 0)[..., None]
    n = number(wrong.any(axis=-1).sum())
    if n:
        first = number(mx.argmax(wrong.flatten()))
        position = rows.positions.flatten()[first // scores.shape[-1]].item()
        raise CheckFailed(
            f"`{giver}` gives a finite number for each row",
            f"{scores.flatten()[first].item()} for {n} of {rows.positions.size} rows, "
            f"first for that of position {position}, after a block of "
            f"{rows.n_new} (scope={rows.scope!r}, {rows.keys.dtype})",
        )


def _score(trial: Trial) -> str:
    watcher = watch_all(trial, Calm())
    for scoring in watcher.scorings:
        all_finite(scoring.rows, scoring.scores)
    if trial.subject.make().score_parts:
        for evicting in watcher.evictions:
            all_finite(evicting.rows, evicting.scores, "fuse")
    if not watcher.scorings:
        raise CheckFailed("`score` is asked when rows must go", "no call of it")
    return ""


score = Check(
    "score",
    "`score` gives finite float32 numbers of the shape of rows.positions: at prompts, steps and in "
    "padded batches, in each scope that the policy takes",
    _score,
)


def valid_choice(evicting: Evicting) -> None:
    """Fail unless the indices are different ones, and of empty rows first."""
    chosen = mx.sort(evicting.gone.astype(mx.int32), axis=-1)
    if mx.any(chosen[..., 1:] == chosen[..., :-1]).item():
        raise CheckFailed(
            f"`evict` gives {evicting.count} different rows", f"one twice: {chosen.tolist()}"
        )
    empty = evicting.rows.positions < 0
    could = mx.minimum(empty.sum(axis=-1), evicting.count)
    went = mx.take_along_axis(empty, evicting.gone, axis=-1).sum(axis=-1)
    if not mx.array_equal(could, went).item():
        raise CheckFailed(
            "`evict` lets empty rows (position -1, scores -inf) go before others",
            f"of {could.tolist()} empty rows that could go in each sequence, {went.tolist()} went",
        )


def _evict(trial: Trial) -> str:
    for evicting in watch_all(trial, Calm(evict_too=False)).evictions:
        valid_choice(evicting)
    return ""


evict = Check(
    "evict",
    "`evict` gives the indices of `count` different rows, empty ones first",
    _evict,
    needs=(score,),
)


def no_protected_gone(evicting: Evicting) -> None:
    """Fail if a protected row goes while others could."""
    lost = mx.take_along_axis(evicting.protected, evicting.gone, axis=-1)
    stay = number(evicting.protected.sum(axis=-1).max())
    if stay > evicting.rows.budget:
        raise CheckFailed(
            "`protect` claims no more rows than reserved() says",
            f"{stay} rows protected, with a budget of {evicting.rows.budget}",
        )
    if mx.any(lost).item():
        positions = mx.take_along_axis(evicting.rows.positions, evicting.gone, axis=-1)
        gone = cast(list[int], mx.where(lost, positions, -1).flatten().tolist())
        raise CheckFailed(
            "no protected row goes",
            f"the protected rows {short([p for p in gone if p >= 0])} go "
            f"({evicting.count} of {evicting.rows.positions.shape[-1]} rows had to)",
        )


def _protected(trial: Trial) -> str:
    watcher, budget = Watcher(), trial.budget
    pinned = trial.policy().n_sink + 1
    pin = Pin([pinned])
    cache = trial.cache(watcher, pin)
    reserved = sum(cache.policy.claimed(budget).values()) + 1  # the newest
    for n in (5, budget + 7, 1, 1, 1, 4, *[1] * 6):
        trial.stream(budget + 30).feed(cache, [n])
        stayed(cache, f"after a block of {n}, {cache.offset} tokens seen")
        if cache.offset > pinned and any(pinned not in head for head in held(cache)):
            raise CheckFailed(
                "a row stays that a protector beside the policy protects",
                f"position {pinned} is gone after {cache.offset} tokens",
            )
    padded(trial, trial.policy(watcher, pin), steps=4)
    for evicting in watcher.evictions:
        no_protected_gone(evicting)
        stay = number(evicting.protected.sum(axis=-1).max())
        if stay > reserved:
            raise CheckFailed(
                f"`protect` claims at most the rows that reserved() says: {reserved} in all",
                f"{stay} rows protected",
            )
    return ""


protected = Check(
    "protected",
    "protected rows never go: the first n_sink, the newest, what `protect` says and what a "
    "protector beside the policy says; and reserved() says how many they may be",
    _protected,
    needs=(score, evict),
)


HOOK_CHECKS = [score, evict, protected]
