"""Seeing the model's queries: a wrapper around the attention function of each model module.

mlx-lm's model modules import ``scaled_dot_product_attention`` by name, so it is wrapped in each
module that a model's layers come from. Calls with any other cache pass through untouched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import attrs
import mlx.core as mx

from .cache import VeloxCache
from .errors import UnsupportedModelError
from .rows import Attended, for_heads, is_bias
from .weights import weigh, weigh_replayed, weighable

NAME = "scaled_dot_product_attention"


def observe(model: Any) -> int:
    """Wrap the attention function in every module that ``model``'s layers come from.

    Returns:
        How many modules have one; 0 means that the model's attention can't be observed.
    """
    modules = {sys.modules[type(layer).__module__] for layer in model.modules()}
    named = [module for module in modules if hasattr(module, NAME)]
    for module in named:
        _wrap(module)
    explicit = [module for module in modules if module.__name__ == "mlx_lm.models.gemma2"]
    for module in explicit:
        _wrap_gemma2(module)
    return len(named) + len(explicit)


def _watches(cache: Any) -> bool:
    """Whether the queries are wanted that attend to this cache."""
    return (
        isinstance(cache, VeloxCache)
        and cache.policy.n_queries > 0
        and cache.policy.queries == "model"
    )


def _wrap(module: ModuleType) -> None:
    original: Callable[..., mx.array] = getattr(module, NAME)
    if hasattr(original, "velox_wraps"):
        return

    @functools.wraps(original)
    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        **more: Any,
    ) -> mx.array:
        if sinks is not None:
            more["sinks"] = sinks
        if not isinstance(cache, VeloxCache):
            if isinstance(mask, mx.array) and mask.ndim == 4:
                mask = for_heads(mask, queries.shape[1])  # a layer that shares another one's rows
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)
        rows = (keys[0] if isinstance(keys, tuple) else keys).shape[2]
        # MLX would take fewer under "causal" without a word, and give wrong results.
        assert rows >= queries.shape[2], "fewer keys than queries"
        if cache.renumbers:
            queries = cache.before_rope(queries)
        seen = _attended(queries, keys, cache, scale, mask, sinks) if _watches(cache) else None
        if seen is not None:
            cache.observe(seen)
        mask = cache.attention_mask(mask, queries.shape[1])
        if isinstance(keys, tuple):
            queries = mx.stop_gradient(queries)  # for mlx-lm, which scales them in place
        parts = [(queries, keys, mask)]
        if cache.renumbers:  # the rows come as numbers, even where they are held quantised
            parts = cache.parts(queries, keys, mask)
        held = None if cache.renumbers else cache
        steady = cache.steady
        wanted = not more and (steady or (seen is not None and cache.chooses))
        outputs = []
        for q, k, m in parts:
            if wanted and weighable(m, q, k, values):
                worked_out = weigh_replayed if steady else weigh
                output, weights = worked_out(q, k, values, scale, m, steady)
                if seen is not None and len(parts) == 1:
                    seen.weights = weights
            else:
                output = original(q, k, values, cache=held, scale=scale, mask=m, **more)
            outputs.append(output)
        output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        return cache.attended(output)

    attention.velox_wraps = original  # type: ignore[attr-defined]
    setattr(module, NAME, attention)


def _wrap_gemma2(module: ModuleType) -> None:
    """Gemma 2 writes its softcapped attention out, so its queries are made once more."""
    original = module.Attention.__call__
    if hasattr(original, "velox_wraps"):
        return

    @functools.wraps(original)
    def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if not isinstance(cache, VeloxCache):
            return original(self, x, mask, cache)
        offset = cache.offset
        if isinstance(mask, mx.array):
            mask = cache.make_mask(x.shape[1], return_array=True)  # this layer's own
            if mask.ndim == 4 and self.repeats > 1:
                mask = mask[:, :, None]  # its scores have an axis for the group of each KV head
        output = original(self, x, mask, cache)
        if _watches(cache):
            queries = self.q_proj(x).reshape(*x.shape[:2], self.n_heads, -1).transpose(0, 2, 1, 3)
            queries = self.rope(queries, offset=offset)
            cap = self.attn_logit_softcapping
            cache.observe(Attended(queries, self.scale, softcap=cap))
        return output if cache.renumbers else cache.attended(output)

    attention.velox_wraps = original  # type: ignore[attr-defined]
    module.Attention.__call__ = attention


def _attended(
    queries: mx.array, keys: Any, cache: VeloxCache, scale: float, mask: Any, sinks: Any
) -> Attended:
    seen = Attended(queries, scale, sinks)
    if isinstance(keys, tuple):  # quantised: always those of the cache
        return seen
    if keys.shape[1::2] == (cache.kv_heads, cache.head_dim) and not is_bias(mask):
        return seen
    if cache.kv_heads > 1 and cache.policy.scope == "head":
        raise UnsupportedModelError(
            "This model spreads its KV heads over query heads in a way of its own, so a choice a "
            "head can't be made. Use scope='layer'."
        )
    return attrs.evolve(seen, keys=keys, bias=mask if is_bias(mask) else None)
