"""The rows that a cache holds, in Python's numbers."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from .. import storage
from ..cache import VeloxCache
from .failure import CheckFailed
from .stream import Stream


def held(cache: VeloxCache, sequence: int = 0) -> list[list[int]]:
    """Positions of a sequence's rows, in order, by head (or once for the layer)."""
    positions = cache.positions
    if positions is None:
        return [[]]
    heads = cast(list[list[int]], positions[sequence].tolist())
    return [sorted(position for position in head if position >= 0) for head in heads]


def same(expected: str, one: str, a: list[list[int]], other: str, b: list[list[int]]) -> None:
    """Fail unless both hold the same rows.

    Args:
        expected: what is checked.
        one: where ``a`` comes from, in words; ``other`` likewise.
    """
    for head, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y:
            only_x, only_y = sorted(set(x) - set(y)), sorted(set(y) - set(x))
            raise CheckFailed(
                expected,
                f"{one} holds positions {short(only_x)}, and {other} {short(only_y)} in their "
                f"place (head {head}; the others are the same)",
            )


def same_scores(expected: str, one: VeloxCache, other: str, two: VeloxCache) -> None:
    """Fail unless the scores that go on with the same rows of two caches are the same, but for
    rounding. Rows that stay don't always show them.

    Args:
        expected: what is checked.
        other: where ``two`` comes from, in words.
    """
    if not one.policy.every_step:
        return
    scores = []
    for cache in (one, two):
        assert cache.positions is not None
        assert cache._scores is not None
        order = mx.argsort(cache.positions[0], axis=-1)
        scores.append(storage.take(cache._scores[:1], order[None]))
    off = ~mx.isclose(scores[0], scores[1], rtol=1e-3, atol=1e-4, equal_nan=True)
    if off.any().item():
        row = mx.argmax(off.flatten())
        a, b = (cast(float, each.flatten()[row].item()) for each in scores)
        raise CheckFailed(expected, f"a row that has the score {a:.4g} alone has {b:.4g} {other}")


def short(numbers: list[int]) -> str:
    """A list of numbers for people."""
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, … ({len(numbers)})" if len(numbers) > 8 else shown or "none"


def stayed(cache: VeloxCache, when: str) -> None:
    """Fail unless the first ``n_sink`` tokens' rows and the newest one are held."""
    assert isinstance(cache.offset, int)
    must = {*range(min(cache.policy.n_sink, cache.offset)), cache.offset - 1}
    for head in held(cache):
        lost = sorted(must - set(head))
        if lost:
            raise CheckFailed(
                f"the first n_sink={cache.policy.n_sink} rows and the newest one stay",
                f"positions {short(lost)} are gone {when}",
            )


def full(cache: VeloxCache, when: str) -> None:
    """Fail unless the cache holds as many rows as its budget takes, and no more."""
    assert isinstance(cache.offset, int)
    budget = cache.policy.budget
    assert isinstance(budget, int)
    rows = min(cache.budget, cache.offset)
    for head in held(cache):
        if len(set(head)) != rows or rows > budget:
            raise CheckFailed(
                f"{min(budget, cache.offset)} rows are held: budget={budget}, {cache.offset} "
                "tokens seen",
                f"{len(set(head))} different rows {when}",
            )


def untouched(cache: VeloxCache, stream: Stream, when: str) -> None:
    """Fail unless each row is the one that the stream has at its position."""
    positions = cache.positions
    assert positions is not None
    keys, values = cache.keys_and_values()
    index = mx.broadcast_to(positions[..., None], (*keys.shape[:3], 1))
    for name, rows, all_rows in (("keys", keys, stream.keys), ("values", values, stream.values)):
        given = mx.take_along_axis(all_rows, mx.maximum(index, 0), axis=2)
        alike = mx.array_equal(rows, given, equal_nan=True)
        if rows.dtype != all_rows.dtype or not alike.item():
            raise CheckFailed(
                "each row is stored as it came, with its true position",
                f"the {name} held aren't those of their positions {when}: hooks must not change "
                "what they are shown (`rows.keys *= 2` changes the cache's own array)",
            )
