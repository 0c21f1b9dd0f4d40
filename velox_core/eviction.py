"""One eviction: asking the hooks, and holding them to their word."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import attrs
import mlx.core as mx

from . import storage
from .errors import PolicyHookError
from .hooks import origin
from .policy import Policy
from .rows import LATEST, Attended, Rows

_SEEN = [field.name for field in attrs.fields(Attended)]
_REST = [field.name for field in attrs.fields(Rows) if field.name != "attended"]
_OLD: float = mx.finfo(mx.float32).min  # the score of a row that is too old; of empty ones -inf
_take_seen, _take_rest = attrgetter(*_SEEN), attrgetter(*_REST)


def decide(
    policy: Policy, rows: Rows, count: int, stale: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """Indices of the ``count`` rows to go, ``[batch, heads or 1, count]``; all rows' scores; and
    their positions, with room made. ``stale``: the newest token took another one's row, whose
    score stands there still.

    After a decoded token this is the same small work each time. Where the policy says that it is
    ``pure``, its hooks are asked once, and what they built is replayed from then on: MLX makes
    fewer operations of it, and Python none.

    Raises:
        PolicyHookError: a hook of a pure policy waits for a number; or what ``score_rows`` and
            ``choose_rows`` raise.
    """
    if not policy.replayable or rows.n_new > max(policy.slack, 1):
        return ask(policy, rows, count, stale)
    replay = policy._replays.get(rows.layer)
    if replay is None:  # of each layer its own: MLX looks through all that one has recorded
        replay = policy._replays[rows.layer] = mx.compile(partial(_ask_parts, policy))
    seen = None if rows.attended is None else _take_seen(rows.attended)
    try:
        return replay(seen, _take_rest(rows), count, stale)  # type: ignore[no-any-return]
    except ValueError as error:
        if "[eval]" not in str(error):
            raise
        raise PolicyHookError(
            f"{origin(policy)} says that it is pure, and a hook waits for a number (.item(), "
            ".tolist(), float(), `if` of an array). Build arrays only, or take `pure` out."
        ) from error


def _ask_parts(
    policy: Policy, seen: Any, rest: Any, count: int, stale: bool
) -> tuple[mx.array, mx.array, mx.array]:
    attended = None if seen is None else Attended(*seen)
    rows = Rows(attended=attended, **dict(zip(_REST, rest, strict=True)))
    return ask(policy, rows, count, stale)


def ask(policy: Policy, rows: Rows, count: int, stale: bool) -> tuple[mx.array, mx.array, mx.array]:
    """What ``decide`` gives, its hooks asked now."""
    positions, newest = rows.positions[...], rows.newest[...]  # hooks may work in place
    if stale:
        rows = newest_unscored(rows)
    scores = score_rows(policy, rows)
    gone = choose_rows(policy, rows, scores, count)
    return gone, scores, make_room(positions, newest, gone)


def make_room(positions: mx.array, newest: mx.array, gone: mx.array) -> mx.array:
    """The rows' positions. A single row to go has that of the next token already, which comes in
    its place; should a block come, the row is dropped in any case."""
    if gone.shape[-1] != 1:
        return positions
    return mx.where(storage.numbers(positions.shape[-1]) == gone, newest + 1, positions)


def newest_unscored(rows: Rows) -> Rows:
    """Rows whose newest token took another one's row, and with it that one's score: without it."""
    return attrs.evolve(rows, scores=unscored(rows.scores, rows.positions, rows.newest))


def unscored(scores: mx.array, positions: mx.array, newest: mx.array) -> mx.array:
    """Scores with 0 for the newest row."""
    return mx.where(storage.like(positions == newest, scores), 0, scores)


def score_rows(policy: Policy, rows: Rows) -> mx.array:
    """What the policy's ``score`` gives, checked.

    Raises:
        PolicyHookError: it gave nothing, another shape, or another type.
    """
    scores = policy.hooks().hook.score(rows=rows)
    _check(policy, "score", scores, policy.score_shape(rows.positions.shape), (mx.float32,))
    return scores  # type: ignore[no-any-return]


def choose_rows(policy: Policy, rows: Rows, scores: mx.array, count: int) -> mx.array:
    """Indices of the ``count`` rows to go, ``[batch, heads or 1, count]``.

    Raises:
        PolicyHookError: ``fuse``, ``protect`` or ``evict`` gave nothing, another shape, or
            another type.
    """
    hook = policy.hooks().hook
    shape = rows.positions.shape
    if policy.score_parts:
        scores = policy.fuse(scores)
        _check(policy, "fuse", scores, shape, (mx.float32,))
    protected = rows.positions == rows.newest
    claims = hook.protect(rows=rows)  # by the last one registered first, and without None
    owners = [impl.plugin for impl in hook.protect.get_hookimpls()[::-1] if not impl.wrapper]
    if len(claims) != len(owners):
        names = " or ".join(map(origin, owners))
        raise PolicyHookError(f"`protect` of {names} gave None. Is a `return` missing?")
    for owner, claim in zip(owners, claims, strict=True):
        _check(owner, "protect", claim, shape, (mx.bool_,))
        protected = protected | claim
    if policy.max_age is not None:
        too_old = rows.newest - rows.positions > min(policy.max_age, LATEST)
        others = mx.where(scores > _OLD / 2, scores, _OLD / 2)  # -inf and NaN are above it, too
        scores = mx.where(too_old, _OLD, others)
    if rows.padded:
        empty = rows.positions < 0
        scores = mx.where(empty, -mx.inf, scores)
        protected = protected & ~empty
    gone = hook.evict(rows=rows, scores=scores, protected=protected, count=count)
    _check(policy, "evict", gone, (*shape[:2], count), (mx.uint32, mx.int32))
    return gone  # type: ignore[no-any-return]


def _check(
    owner: object, hook: str, given: object, shape: tuple[int, ...], types: tuple[mx.Dtype, ...]
) -> None:
    wanted = f"an mx.array of shape {tuple(shape)} and type {types[0]}"
    if not isinstance(given, mx.array):
        hint = " Is a `return` missing?" if given is None else ""
        raise PolicyHookError(f"{origin(owner)}: `{hook}` gave {given!r}, not {wanted}.{hint}")
    if given.shape != tuple(shape) or given.dtype not in types:
        raise PolicyHookError(
            f"{origin(owner)}: `{hook}` gave shape {given.shape} and type {given.dtype}; "
            f"it must give {wanted} ([batch, heads or 1, …], 1 head for scope='layer')."
        )
