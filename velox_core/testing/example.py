"""Rows made by hand, for a policy's own tests."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from ..rows import Attended, Rows


def example_rows(
    keys: mx.array,
    values: mx.array | None = None,
    queries: mx.array | None = None,
    *,
    scores: mx.array | None = None,
    scope: Literal["layer", "head"] = "layer",
    budget: int | None = None,
    layer: int = 0,
) -> Rows:
    """The view that hooks would see of these rows, none of them empty. They are in order, of
    positions 0, 1, …, so ``newest`` is the last one's.

    Args:
        keys: ``[batch, kv_heads, rows, head_dim]``
        values: ``[batch, kv_heads, rows, value_dim]``. Default the keys.
        queries: ``[batch, query_heads, n, head_dim]``, those of the newest ``n`` rows, which are
            then the newest block. Default none, and a block of one.
        scores: ``[batch, heads or 1, rows]``, what ``score`` gave last time (with ``score_parts``
            ``[…, rows, parts]``). Default zeros.
        scope: the policy's. Default ``"layer"``.
        budget: rows to keep. Default one less than there are.
        layer: index of the layer. Default 0.
    """
    batch, heads, n = keys.shape[:3]
    shape = (batch, heads if scope == "head" else 1, n)
    fresh = 1 if queries is None else queries.shape[2]
    last = mx.arange(n - fresh, n, dtype=mx.int32)
    return Rows(
        keys=keys,
        values=keys if values is None else values,
        positions=mx.broadcast_to(mx.arange(n, dtype=mx.int32), shape),
        scores=mx.zeros(shape) if scores is None else scores,
        query_positions=mx.broadcast_to(last, (batch, fresh)),
        newest=mx.full((batch, 1, 1), n - 1, dtype=mx.int32),
        n_new=fresh,
        budget=n - 1 if budget is None else budget,
        layer=layer,
        scope=scope,
        attended=None if queries is None else Attended(queries, keys.shape[-1] ** -0.5),
        padded=False,
    )
