"""The rows of one layer's cache, as the hooks see them."""

from __future__ import annotations

from typing import Any, Literal

import attrs
import mlx.core as mx

from .errors import PolicyHookError

LATEST = 2**31 - 1  # no position is higher
_SLICE = 256  # queries whose attention `received` holds at once


@attrs.define(eq=False)
class Attended:
    """What the model attended to the newest block with."""

    #: ``[batch, query_heads, n, head_dim]``, the newest last.
    queries: mx.array
    #: What the model multiplies ``queries @ keys.T`` with.
    scale: float
    #: ``[query_heads]``: a logit more in each softmax's denominator (attention sinks).
    sinks: mx.array | None = None
    #: The model squeezes logits as ``cap * tanh(logits / cap)``; 0 where it doesn't.
    softcap: float = 0.0
    #: The keys, where the model attends with others than it stores (MLA).
    keys: mx.array | None = None
    #: ``[batch, heads, n, rows]``: what the model adds to the logits.
    bias: mx.array | None = None
    #: The newest queries' weights, where the model's attention gives them (in float32 on a CPU):
    #: numbers of ``[batch, query_heads, newest, rows]`` in any axes.
    weights: mx.array | None = None

    def over(self, keys: mx.array, mask: mx.array | None = None) -> mx.array:
        """The softmaxed attention over rows with these keys, or its own; 0 where ``mask`` hides
        one: ``[batch, query_heads, n, rows]`` float32."""
        queries = self.queries.astype(mx.float32)
        keys = (keys if self.keys is None else self.keys).astype(mx.float32)
        batch, query_heads, n, dim = queries.shape
        grouped = queries.reshape(batch, keys.shape[1], -1, dim) * self.scale
        logits = (grouped @ keys.swapaxes(-1, -2)).reshape(batch, query_heads, n, -1)
        if self.softcap:
            logits = mx.tanh(logits / self.softcap) * self.softcap
        if self.bias is not None:
            logits = logits + self.bias.astype(mx.float32)
        if mask is not None:
            logits = mx.where(mask, logits, mx.finfo(mx.float32).min)
        if self.sinks is None:
            weights = mx.softmax(logits, axis=-1)
        else:
            sinks = self.sinks.astype(mx.float32)[:, None, None]
            sinks = mx.broadcast_to(sinks, (*logits.shape[:-1], 1))
            weights = mx.softmax(mx.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]
        return weights if mask is None else mx.where(mask, weights, 0)

    def without_last(self, n: int) -> Attended:
        """The same without the newest ``n`` tokens."""
        keys = None if self.keys is None else self.keys[:, :, :-n]
        bias = None if self.bias is None else self.bias[..., :-n, :-n]
        return attrs.evolve(self, queries=self.queries[:, :, :-n], keys=keys, bias=bias)


@attrs.define(eq=False, kw_only=True)
class Rows:
    """What a hook sees. Everything is lazy: nothing here is computed unless a hook asks for it,
    and a hook must not make the host wait (no ``.item()``, ``.tolist()``, ``mx.eval``).

    Rows needn't be in the order of time: go by ``positions``.
    """

    #: ``[batch, kv_heads, rows, head_dim]``, as the model attends to them: RoPE applied, at the
    #: places that the policy's ``positions`` give the rows.
    keys: mx.array
    #: ``[batch, kv_heads, rows, value_dim]``
    values: mx.array
    #: ``[batch, heads or 1, rows]`` int32: each row's true position in its sequence; -1 is empty.
    positions: mx.array
    #: ``[batch, heads or 1, rows]`` float32: for a policy with ``every_step``, what ``score``
    #: returned last time, moved along with the rows, 0 for rows that weren't there yet; else 0.
    #: With ``score_parts``, ``[batch, heads or 1, rows, parts]``.
    scores: mx.array
    #: ``[batch or 1, n]`` int32: the queries' positions; -1 is no query.
    query_positions: mx.array
    #: ``[batch or 1, 1, 1]`` int32: the position of each sequence's newest token.
    newest: mx.array
    #: How many tokens the newest block had (padding of a batch counted).
    n_new: int
    #: Rows that this layer keeps.
    budget: int
    #: Index of the layer.
    layer: int
    #: The policy's scope.
    scope: Literal["layer", "head"]
    #: The latest queries and what else the attention has; ``None`` with ``n_queries = 0``.
    attended: Attended | None
    #: Whether some rows are empty or some queries missing, so that they must be masked.
    padded: bool

    @property
    def queries(self) -> mx.array:
        """``[batch, query_heads, n, head_dim]``: the latest queries, the newest last."""
        if self.attended is None:
            raise PolicyHookError(
                "A policy sees queries only if it asks: set n_queries in its class to at least 1."
            )
        return self.attended.queries

    def attention(self, last: int = 1) -> mx.array:
        """The softmaxed attention of the ``last`` newest queries over the rows, causal.

        Returns:
            ``[batch, query_heads, last, rows]`` float32. Empty rows, rows newer than the query
            and missing queries have 0.
        """
        queries, seen = self.queries, self.attended
        assert seen is not None
        if self._has_weights(last):
            assert seen.weights is not None
            return seen.weights.reshape(*queries.shape[:2], -1, self.keys.shape[2])[:, :, -last:]
        seen = attrs.evolve(
            seen,
            queries=queries[..., -last:, :],
            bias=None if seen.bias is None else seen.bias[..., -last:, :],
        )
        return seen.over(self.keys, self._visible(last, queries.shape[1]))

    def received(self, last: int) -> mx.array:
        """What each row got from the ``last`` newest queries together: their attention, summed.

        However many queries, the weights of a few only are in memory at once.

        Returns:
            ``[batch, query_heads, rows]`` float32
        """
        heads, seen = self.queries.shape[:2], self.attended
        assert seen is not None
        if last == 1:
            if self.n_new == 1 and self._has_weights(1):
                assert seen.weights is not None
                return seen.weights.reshape(*heads, -1)
            return self.attention().squeeze(2)
        if last <= _SLICE or self._has_weights(last):
            return self.attention(last).sum(axis=2)
        total = mx.zeros((*heads, self.keys.shape[2]))
        for start in range(0, last, _SLICE):
            part = slice(start - last, min(start - last + _SLICE, 0) or None)
            queries = mx.depends([seen.queries[..., part, :]], [total])[0]  # one after another
            bias = None if seen.bias is None else seen.bias[..., part, :]
            view = attrs.evolve(
                self,
                attended=attrs.evolve(seen, queries=queries, bias=bias),
                query_positions=self.query_positions[:, part],
                padded=True,
            )
            total = total + view.attention(queries.shape[2]).sum(axis=2)
        return total

    def pool(self, weights: mx.array) -> mx.array:
        """The mean over query heads: over all of them for scope ``"layer"``, over each KV head's
        group for ``"head"``.

        Args:
            weights: ``[batch, query_heads, …]``; of KV heads, as rules over keys alone have, too.

        Returns:
            ``[batch, 1 or kv_heads, …]``
        """
        if self.scope == "layer":
            return weights.mean(axis=1, keepdims=True)
        batch, kv_heads = self.keys.shape[:2]
        return weights.reshape(batch, kv_heads, -1, *weights.shape[2:]).mean(axis=2)

    def _has_weights(self, last: int) -> bool:
        """Whether the model's own attention has the ``last`` queries' weights, as they are."""
        seen = self.attended
        if seen is None or seen.weights is None or self.padded:
            return False
        batch, query_heads = seen.queries.shape[:2]
        return last * batch * query_heads * self.keys.shape[2] <= seen.weights.size

    def _visible(self, last: int, query_heads: int) -> mx.array | None:
        if last == 1 and not self.padded:
            return None  # the newest query sees every row
        mask = visible(self.positions, self.query_positions[:, -last:])
        return for_heads(mask, query_heads)  # [batch, query_heads or 1, last, rows]


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


def is_bias(mask: Any) -> bool:
    """Whether a mask is of numbers that are added to the logits."""
    return isinstance(mask, mx.array) and mask.dtype != mx.bool_


def for_heads(mask: mx.array, query_heads: int) -> mx.array:
    """A mask ``[batch, kv_heads or 1, …]`` with each KV head's part repeated for its group."""
    heads = mask.shape[1]
    return mask if heads in (1, query_heads) else mx.repeat(mask, query_heads // heads, axis=1)


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
        return mx.argmin(mx.where(scores <= least, positions, LATEST), axis=-1, keepdims=True)
    by_age = mx.argsort(positions, axis=-1)
    order = mx.argsort(mx.take_along_axis(scores, by_age, axis=-1), axis=-1)  # stable
    return mx.take_along_axis(by_age, order[..., :count], axis=-1)
