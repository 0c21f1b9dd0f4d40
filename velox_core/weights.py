"""The model's attention with its weights, where MLX has no kernel that keeps them to itself."""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx

from .rows import Attended, is_bias

_CPU = mx.Device(mx.cpu)


def weighable(mask: Any, *arrays: Any) -> bool:
    """Whether ``weigh`` does what MLX does with these: in float32, on a CPU, without a bias."""
    return (
        mx.default_device() == _CPU
        and not is_bias(mask)
        and all(isinstance(each, mx.array) and each.dtype == mx.float32 for each in arrays)
    )


def weigh(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    grouped: bool,
) -> tuple[mx.array, mx.array]:
    """Attention as MLX writes it out on a CPU, the same numbers bit for bit, with its weights. To
    score rows they then needn't be worked out again.

    Args:
        queries: ``[batch, query_heads, n, head_dim]``
        keys: ``[batch, kv_heads, rows, head_dim]``
        values: ``[batch, kv_heads, rows, value_dim]``
        mask: bool, broadcast to ``[batch, query_heads, n, rows]``; ``"causal"``; or None.
        grouped: the query heads that share a KV head are one product, which takes a single token
            two thirds of the time; the last bits may then differ.

    Returns:
        The output, ``[batch, query_heads, n, value_dim]``, and the weights: those of
        ``[batch, query_heads, n, rows]``, in that order, with axes as they come.
    """
    batch, heads, n, dim = queries.shape
    kv_heads, rows = keys.shape[1:3]
    queries = queries * scale
    if grouped:
        queries = queries.reshape(batch, kv_heads, -1, dim)
    elif heads > kv_heads:
        queries = queries.reshape(batch, kv_heads, -1, n, dim)
        keys, values = keys[:, :, None], values[:, :, None]
    products = (*queries.shape[:-1], rows)
    logits = queries @ keys.swapaxes(-1, -2)
    if mask is not None:
        if isinstance(mask, str):  # "causal"
            mask = mx.arange(rows - n, rows)[:, None] >= mx.arange(rows)
        logits = logits.reshape(batch, heads, n, rows)
        logits = mx.where(mask, logits, mx.finfo(mx.float32).min).reshape(products)
    weights = mx.softmax(logits, axis=-1)
    output = (weights @ values).reshape(batch, heads, n, -1)
    return output, weights


#: The same for a decode step, recorded once.
weigh_replayed = mx.compile(weigh)


def weights_replayed(seen: Attended, keys: mx.array) -> mx.array:
    """``seen.over(keys)`` for a decode step, recorded once: the weights alone, where the model's
    attention is a kernel that keeps them to itself."""
    return _over(attrs.astuple(seen, recurse=False), keys)


_over = mx.compile(lambda seen, keys: Attended(*seen).over(keys))
