"""One eviction: asking the hooks, and holding them to their word."""

from __future__ import annotations

import mlx.core as mx

from .errors import PolicyHookError
from .hooks import origin
from .policy import Policy
from .rows import Rows


def score_rows(policy: Policy, rows: Rows) -> mx.array:
    """What the policy's ``score`` gives, checked.

    Raises:
        PolicyHookError: it gave nothing, another shape, or another type.
    """
    scores = policy.hooks().hook.score(rows=rows)
    _check(policy, "score", scores, rows.positions.shape, (mx.float32,))
    return scores  # type: ignore[no-any-return]


def choose_rows(policy: Policy, rows: Rows, scores: mx.array, count: int) -> mx.array:
    """Indices of the ``count`` rows to go, ``[batch, heads or 1, count]``.

    Raises:
        PolicyHookError: ``protect`` or ``evict`` gave nothing, another shape, or another type.
    """
    hook = policy.hooks().hook
    shape = rows.positions.shape
    protected = rows.positions == rows.newest
    claims = hook.protect(rows=rows)  # by the last one registered first, and without None
    owners = [impl.plugin for impl in hook.protect.get_hookimpls()[::-1] if not impl.wrapper]
    if len(claims) != len(owners):
        names = " or ".join(map(origin, owners))
        raise PolicyHookError(f"`protect` of {names} gave None. Is a `return` missing?")
    for owner, claim in zip(owners, claims, strict=True):
        _check(owner, "protect", claim, shape, (mx.bool_,))
        protected = protected | claim
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
