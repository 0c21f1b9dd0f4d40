"""The rows of one layer's cache, as the hooks see them."""

from __future__ import annotations

from typing import Literal

import attrs
import mlx.core as mx

_LAST = 2**31 - 1


@attrs.define(eq=False, kw_only=True)
class Rows:
    """What a hook sees. Everything is lazy: nothing here is computed unless a hook asks for it,
    and a hook must not make the host wait (no ``.item()``, ``.tolist()``, ``mx.eval``).

    Rows needn't be in the order of time: go by ``positions``.
    """

    #: ``[batch, kv_heads, rows, head_dim]``, as the model stored them (RoPE applied).
    keys: mx.array
    #: ``[batch, kv_heads, rows, value_dim]``
    values: mx.array
    #: ``[batch, heads or 1, rows]`` int32: each row's true position in its sequence; -1 is empty.
    positions: mx.array
    #: ``[batch, heads or 1, rows]`` float32: what ``score`` returned last time, moved along with
    #: the rows; 0 for rows that weren't there yet.
    scores: mx.array
    #: ``[batch, query_heads, n, head_dim]``: the latest queries, the newest last; ``None`` for a
    #: policy with ``n_queries = 0``.
    queries: mx.array | None
    #: ``[batch, n]`` int32: the queries' positions; -1 is no query.
    query_positions: mx.array
    #: ``[batch, 1, 1]`` int32: the position of each sequence's newest token.
    newest: mx.array
    #: How many tokens the newest block had (padding of a batch counted).
    n_new: int
    #: What the model multiplies ``queries @ keys.T`` with.
    scale: float
    #: ``[query_heads]``: the model's attention sinks (a logit in each softmax's denominator).
    sinks: mx.array | None
    #: Rows that this layer keeps.
    budget: int
    #: Index of the layer.
    layer: int
    #: The policy's scope.
    scope: Literal["layer", "head"]
    #: Whether some rows are empty or some queries missing, so that they must be masked.
    padded: bool

    def attention(self, last: int = 1) -> mx.array:
        """The softmaxed attention of the ``last`` newest queries over the rows, causal.

        Returns:
            ``[batch, query_heads, last, rows]`` float32. Empty rows, rows newer than the query
            and missing queries have 0.
        """
        assert self.queries is not None, "set n_queries to at least 1 to see queries"
        queries = self.queries[..., -last:, :].astype(mx.float32)
        batch, query_heads, last, dim = queries.shape
        kv_heads = self.keys.shape[1]
        grouped = queries.reshape(batch, kv_heads, -1, dim) * self.scale
        logits = grouped @ self.keys.astype(mx.float32).swapaxes(-1, -2)
        # [batch, kv_heads, group, last, rows]
        logits = logits.reshape(batch, kv_heads, query_heads // kv_heads, last, -1)
        visible = self._visible(last)
        if visible is not None:
            logits = mx.where(visible, logits, mx.finfo(mx.float32).min)
        if self.sinks is not None:
            sinks = self.sinks.astype(mx.float32).reshape(1, kv_heads, -1, 1, 1)
            sinks = mx.broadcast_to(sinks, (*logits.shape[:-1], 1))
            weights = mx.softmax(mx.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]
        else:
            weights = mx.softmax(logits, axis=-1)
        if visible is not None:
            weights = mx.where(visible, weights, 0)
        return weights.reshape(batch, query_heads, last, -1)

    def pool(self, weights: mx.array) -> mx.array:
        """The mean over query heads: over all of them for scope ``"layer"``, over each KV head's
        group for ``"head"``.

        Args:
            weights: ``[batch, query_heads, …]``

        Returns:
            ``[batch, 1 or kv_heads, …]``
        """
        if self.scope == "layer":
            return weights.mean(axis=1, keepdims=True)
        batch, kv_heads = self.keys.shape[:2]
        return weights.reshape(batch, kv_heads, -1, *weights.shape[2:]).mean(axis=2)

    def _visible(self, last: int) -> mx.array | None:
        if last == 1 and not self.padded:
            return None  # the newest query sees every row
        mask = visible(self.positions, self.query_positions[:, -last:])
        return mask[:, :, None]  # [batch, heads or 1, 1, last, rows]


def visible(
    positions: mx.array,
    queries: mx.array,
    *,
    padding_sees_all: bool = False,
    window: int | None = None,
) -> mx.array:
    """Which rows a query may attend to: those that are there and not newer than itself.

    Args:
        positions: ``[batch, heads or 1, rows]``; -1 is an empty row.
        queries: ``[batch or 1, n]`` positions; -1 is no query.
        padding_sees_all: a query that is padding sees every row, not none: a softmax over nothing
            would be NaN, and its NaN would spread.
        window: of the rows, only those less than ``window`` before the query.

    Returns:
        ``[batch, heads or 1, n, rows]`` bool
    """
    rows, queries = positions[:, :, None, :], queries[:, None, :, None]
    mask = (rows >= 0) & (rows <= queries)
    if window is not None:
        mask = mask & (rows > queries - window)
    return mask | (queries < 0) if padding_sees_all else mask


def lowest(scores: mx.array, positions: mx.array, count: int) -> mx.array:
    """Indices of the ``count`` lowest scores; among equal ones the oldest.

    Args:
        scores: ``[batch, heads or 1, rows]`` float32.
        positions: the same shape, int32.

    Returns:
        ``[batch, heads or 1, count]``
    """
    if count == 1:  # each decode step: no sort
        least = scores.min(axis=-1, keepdims=True)
        return mx.argmin(mx.where(scores <= least, positions, _LAST), axis=-1, keepdims=True)
    by_age = mx.argsort(positions, axis=-1)
    order = mx.argsort(mx.take_along_axis(scores, by_age, axis=-1), axis=-1)  # stable
    return mx.take_along_axis(by_age, order[..., :count], axis=-1)
