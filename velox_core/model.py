"""Giving a model bounded caches: by hand, or to every tool that asks the model for a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache

from .attention import observe
from .cache import VeloxCache
from .errors import (
    PolicyConfigError,
    UnobservedAttentionError,
    UnsupportedModelError,
    VeloxError,
)
from .lookback import LookbackCache
from .policy import Policy

#: Caches that are bounded by the model itself: they stay as they are.
BOUNDED = ("RotatingKVCache", "ArraysCache", "ChunkedKVCache")

#: Models that keep the plain caches of a layer in a CacheList and use each by itself.
SPLITTABLE = ("baichuan_m1", "falcon_h1", "longcat_flash", "longcat_flash_ngram")

#: Models that would go wrong, without a word, on rows with gaps between them.
REFUSED = {
    "afm7": "its reuse layers take the number of rows for the position",
    "deepseek_v32": "its indexer picks rows by their place in the cache",
    "glm_moe_dsa": "its indexer picks rows by their place in the cache",
    "minimax_m3_vl": "its indexer picks rows by their place in the cache",
    "phi3small": "its block-sparse layers mask rows by their place in the cache",
}

#: Models that attend with other keys than they store, under a mask of their own making: multi-head
#: latent attention.
LATENT = (
    "bailing_hybrid",
    "bailing_moe_v3",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k25",
    "kimi_k3",
    "kimi_linear",
    "kimi_vl",
    "longcat_flash",
    "longcat_flash_ngram",
    "mistral4",
)

#: Models that use the first layer's mask where it can't be replaced by a layer's own.
ONE_MASK = (*LATENT, "gemma4", "gemma4_text", "iquestloopcoder")

#: Models whose blocks can't evict token by token.
WHOLE_BLOCKS = {
    "gemma2": "it writes its attention out",
    "gemma3n": "its last layers attend to the rows of earlier ones",
    "gemma4": "its last layers attend to the rows of earlier ones",
    "gemma4_text": "its last layers attend to the rows of earlier ones",
    "iquestloopcoder": "its second loop attends to the rows of the first",
    "plamo2": "it writes its attention out",
}


def make_cache(model: Any, policy: Policy, *, lookback: int = 0) -> list[Any]:
    """The model's own list of caches, with each plain ``KVCache`` replaced by a ``VeloxCache``.

    Args:
        model: an mlx-lm model.
        policy: from ``load_policy``.
        lookback: for speculative decoding, at least the tokens of one round (drafted ones and one
            more): each layer then gets a ``LookbackCache``, which takes back that many tokens
            exactly and evicts in such blocks token by token, as if nothing were speculative.
            Default 0: a block is attended whole and cut once, and only the newest block's tokens
            can be taken back once rows have gone.

    Returns:
        One cache a layer, for ``prompt_cache=`` of mlx-lm's functions.

    Raises:
        UnsupportedModelError: the model has no layers, or caches that can't be bounded correctly.
        UnobservedAttentionError: the policy needs queries and the model's can't be observed.
        PolicyConfigError: a budget sequence of another length than the model's layers.
    """
    policy.hooks()
    if isinstance(lookback, bool) or not isinstance(lookback, int) or lookback < 0:
        raise PolicyConfigError(f"lookback={lookback!r} isn't allowed; 0 or more tokens are.")
    make = partial(LookbackCache, lookback=lookback) if lookback else VeloxCache
    caches = _own_caches(model)
    name = type(model).__module__.rpartition(".")[2]
    if not caches:
        raise UnsupportedModelError(f"The model {name} has no layers, so nothing can be bounded.")
    if name in REFUSED:
        raise UnsupportedModelError(f"The model {name} can't be bounded: {REFUSED[name]}.")
    bounded = [
        _bounded(name, cache, partial(make, policy, policy.layer_budget(layer, len(caches)), layer))
        for layer, cache in enumerate(caches)
    ]
    if name in ONE_MASK and len({cache.budget for cache in velox_caches(bounded)}) > 1:
        raise UnsupportedModelError(
            f"The model {name} uses one mask for all layers, so they must keep equally many rows: "
            "give one budget for all."
        )
    if lookback:
        _check_lookback(name, bounded, policy)
    if not any(velox_caches(bounded)):
        kinds = ", ".join(sorted({type(cache).__name__ for cache in caches}))
        raise UnsupportedModelError(
            f"The model {name} has no cache to bound: its layers have {kinds}, which don't grow "
            "with the text."
        )
    if not observe(model) and policy.n_queries and policy.queries == "model":
        raise UnobservedAttentionError(
            f"The attention of the model {name} can't be observed: its modules don't use mlx-lm's "
            "scaled_dot_product_attention. Use queries='keys', which takes the incoming keys in "
            "the queries' place, or a policy that needs no queries."
        )
    return bounded


def velox_caches(caches: Iterable[Any]) -> Iterator[VeloxCache]:
    """The ``VeloxCache``s of a cache list, those inside a ``CacheList`` too."""
    for cache in caches:
        if isinstance(cache, VeloxCache):
            yield cache
        elif isinstance(cache, CacheList):
            yield from velox_caches(cache.caches)


def _bounded(model: str, cache: Any, make: Callable[[], VeloxCache]) -> Any:
    kind = type(cache).__name__
    if type(cache) is KVCache:
        return make()
    if kind in BOUNDED:
        return cache
    if type(cache) is CacheList and model in SPLITTABLE:
        return CacheList(*(_bounded(model, part, make) for part in cache.caches))
    raise UnsupportedModelError(
        f"The model {model} can't be bounded: a layer has a cache of type {kind}, and velox "
        f"replaces only plain KVCache entries and keeps {', '.join(BOUNDED)} as they are."
    )


def _check_lookback(model: str, caches: list[Any], policy: Policy) -> None:
    why = WHOLE_BLOCKS.get(model)
    if model in LATENT or (model == "plamo" and policy.n_queries):
        why = "it attends with other keys than it stores"
    if why:
        raise UnsupportedModelError(
            f"The model {model} can't let a block's tokens evict one by one: {why}. Use lookback=0."
        )
    for cache in caches:
        kind = type(cache).__name__
        if kind in ("RotatingKVCache", "ArraysCache", "CacheList"):
            raise UnsupportedModelError(
                f"The model {model} has layers with a {kind}, which in mlx-lm itself can't take "
                "tokens back, so speculative decoding won't work. Use lookback=0."
            )


def _own_caches(model: Any) -> list[Any]:
    if not hasattr(model, "layers"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layers: velox needs an mlx-lm model."
        )
    make = getattr(type(model), "make_cache", None)
    return make(model) if make else [KVCache() for _ in model.layers]


class apply:
    """Let every tool that asks the model for a cache get bounded ones.

    Works at once; undone by ``remove()`` or at the end of a ``with`` block. Caches made in the
    meantime stay as they are.

    Args:
        model: an mlx-lm model.
        policy: from ``load_policy``.
        lookback: as for ``make_cache``.

    Raises:
        VeloxError: a policy is applied to the model already; and what ``make_cache`` raises.
    """

    def __init__(self, model: Any, policy: Policy, *, lookback: int = 0) -> None:
        if "make_cache" in vars(model):
            raise VeloxError("A policy is applied to this model already: remove() it first.")
        make_cache(model, policy, lookback=lookback)  # whatever can be wrong is found now
        self.model = model
        model.make_cache = lambda: make_cache(model, policy, lookback=lookback)

    def remove(self) -> None:
        """Give the model its own caches back. Doing so twice does no harm."""
        vars(self.model).pop("make_cache", None)

    def __enter__(self) -> apply:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()
