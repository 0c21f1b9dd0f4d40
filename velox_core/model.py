"""Giving a model bounded caches: by hand, or to every tool that asks the model for a cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from .architectures import (
    BOUNDED,
    LATENT,
    ONE_MASK,
    REFUSED,
    SHARED,
    SPLITTABLE,
    WHOLE_BLOCKS,
)
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
from .rope import watch


def make_cache(model: Any, policy: Policy, *, lookback: int = 0) -> list[Any]:
    """The model's own list of caches, with each plain ``KVCache`` replaced by a ``VeloxCache``.

    Args:
        model: an mlx-lm model.
        policy: from ``load_policy``.
        lookback: for speculative decoding, at least the tokens of one round (drafted ones and one
            more): each layer then gets a ``LookbackCache``, which takes back that many tokens
            exactly and evicts in such blocks token by token, as if nothing were speculative. It
            equals plain decoding only with ``lookback >= num_draft_tokens + 1``; longer blocks,
            as of a prompt, are cut once, with any ``lookback``.
            Default 0: a block is attended whole and cut once, and only the newest block's tokens
            can be taken back once rows have gone.

    Returns:
        One cache a layer, for ``prompt_cache=`` of mlx-lm's functions.

    Raises:
        UnsupportedModelError: the model has no layers, or caches that can't be bounded correctly.
        UnobservedAttentionError: the policy needs queries and the model's can't be observed.
        PolicyConfigError: a budget sequence of another length than the model's layers.
    """
    if not isinstance(policy, Policy):
        raise PolicyConfigError(f"{policy!r} isn't a policy; load_policy(name, …) gives one.")
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
    if name in LATENT and policy.n_queries > 1 and policy.queries == "model":
        raise UnobservedAttentionError(
            f"The model {name} attends with other keys than it stores (MLA), so the older queries "
            f"of {type(policy).__name__} can't be scored again. Use a policy that needs the last "
            "one, as TOVA."
        )
    if name == "plamo" and policy.n_queries and policy.scope == "head":
        raise UnsupportedModelError(
            "The model plamo spreads its KV heads over query heads in a way of its own, so a "
            "choice a head can't be made. Use scope='layer'."
        )
    if policy.slack and (lookback or _attends_otherwise(name, policy)):
        why = "lookback" if lookback else f"the model {name}'s attention"
        raise UnsupportedModelError(f"slack={policy.slack} doesn't go with {why}. Use slack=0.")
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
    if policy.positions != "absolute":
        _rehearse(name, model, copy.deepcopy(bounded), policy)
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


def _attends_otherwise(model: str, policy: Policy) -> bool:
    """Whether the model attends with other keys than it stores, where the policy looks at that."""
    return model in LATENT or (model == "plamo" and policy.n_queries > 0)


def _check_lookback(model: str, caches: list[Any], policy: Policy) -> None:
    why = WHOLE_BLOCKS.get(model)
    if _attends_otherwise(model, policy):
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


def _rehearse(name: str, model: Any, caches: list[Any], policy: Policy) -> None:
    """Let one token go through the model, which computes nothing as long as nobody evaluates it:
    whatever keeps its rows from being numbered anew shows."""
    watch(model)
    if name not in SHARED:
        model(mx.array([[0]]), cache=caches)
        if not any(cache.waits for cache in velox_caches(caches)):
            return
    raise UnsupportedModelError(
        f"The model {name} can't run with positions={policy.positions!r}: some of its attention "
        "to a layer's rows isn't seen, so its queries can't be moved along with the rows. Use "
        "positions='absolute'."
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
