"""The three hooks that make an eviction policy, and the manager that calls them."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pluggy

from .discovery import PROTECTORS, origin_of
from .errors import PolicyLoadError
from .rows import Rows, lowest

if TYPE_CHECKING:
    from .policy import Policy

#: Version of the hook specification. It rises when a policy written for the old one would be wrong
#: under the new one; a policy says which one it was written for in its ``hook_version``.
HOOK_VERSION = 1

hookspec = pluggy.HookspecMarker("velox")
hookimpl = pluggy.HookimplMarker("velox")


class EvictionPolicy:
    """The hook specification. Shapes are ``[batch, heads or 1, rows]``: 1 is one choice for the
    whole layer, otherwise each KV head chooses for itself (see ``Policy.scope``)."""

    @hookspec(firstresult=True)
    def score(self, rows: Rows) -> mx.array:
        """How much each row matters: float32, higher stays longer.

        Called once a block, after the model attended to it, when rows must go (or after every
        block where the policy sets ``every_step``; what it returns then comes back next time as
        ``rows.scores``). Where the policy sets ``score_parts``, ``[batch, heads or 1, rows,
        parts]``, of which ``Policy.fuse`` makes one number a row.
        """
        raise NotImplementedError

    @hookspec
    def protect(self, rows: Rows) -> mx.array:
        """Which rows must stay, whatever their score: bool. All results are OR-ed, and the
        newest row of each sequence always stays."""
        raise NotImplementedError

    @hookspec(firstresult=True)
    def evict(self, rows: Rows, scores: mx.array, protected: mx.array, count: int) -> mx.array:
        """Which ``count`` rows go: their indices, ``[batch, heads or 1, count]``, all different.

        Empty rows (position -1, ``scores`` -inf) must be among the first to go. The core's own
        implementation, used where a policy has none, drops the lowest unprotected scores and,
        among equal ones, the oldest.
        """
        raise NotImplementedError


class LowestScores:
    """The core's own ``evict``: the lowest unprotected scores, the oldest row first among ties.
    A NaN score, as a NaN key gives, counts as the lowest: no protected row may go for it."""

    @hookimpl(trylast=True)
    def evict(self, rows: Rows, scores: mx.array, protected: mx.array, count: int) -> mx.array:
        scores = mx.where(mx.isnan(scores), -mx.inf, scores)
        return lowest(mx.where(protected, mx.inf, scores), rows.positions, count)


def origin(plugin: object) -> str:
    """``'name' (distribution version)`` of a policy or protector, for messages."""
    cls = plugin if isinstance(plugin, type) else type(plugin)
    noun, entry = "policy", origin_of(cls)
    if not hasattr(cls, "layer_budget"):
        noun, entry = "protector", origin_of(cls, PROTECTORS)
    where = f"{entry.distribution} {entry.version}" if entry else f"module {cls.__module__}"
    return f"{noun} {cls.__name__!r} ({where})"


def observes_only(plugin: object) -> bool:
    """Whether all its hooks are wrappers, which see what the others give and change nothing."""
    return all(opts["wrapper"] for opts in _marked(plugin).values())


def build_hooks(policy: Policy, extras: Collection[object] = ()) -> pluggy.PluginManager:
    """A manager with the policy, the core's own ``evict``, and protectors or observers beside it.

    Raises:
        PolicyLoadError: a hook is misspelt, unmarked, missing, or takes an argument that it will
            never get; or the policy was written for another hook version.
    """
    _check_version(policy)
    _check_parts(policy)
    for extra in extras:
        _check_extra(extra)
    manager = pluggy.PluginManager("velox")
    manager.add_hookspecs(EvictionPolicy)
    manager.register(LowestScores())
    for plugin in (policy, *extras):
        _register(manager, plugin)
    if not any(impl.plugin is policy for impl in manager.hook.score.get_hookimpls()):
        marked = " (there is a method of that name: mark it with @hookimpl)" * hasattr(
            policy, "score"
        )
        raise PolicyLoadError(f"{origin(policy)} has no `score` hook{marked}; it is required.")
    return manager


def check_protector(cls: type) -> None:
    """Whether a protector of this class may stand beside a policy, whatever its options.

    Raises:
        PolicyLoadError: what ``build_hooks`` would raise of it.
    """
    _check_beside(cls)
    manager = pluggy.PluginManager("velox")
    manager.add_hookspecs(EvictionPolicy)
    _register(manager, cls)


def _register(manager: pluggy.PluginManager, plugin: object) -> None:
    _check_signatures(plugin)
    try:
        manager.register(plugin)
        manager.check_pending()
    except (pluggy.PluginValidationError, TypeError) as error:
        hint = ""
        if isinstance(error, TypeError):
            hint = " Its class must be hashable: decorate with @attrs.frozen(eq=False)."
        hooks = ", ".join(_spec_names())
        raise PolicyLoadError(
            f"{origin(plugin)} has a hook that velox_core doesn't know: "
            f"{_one_line(error)}. The hooks are {hooks}.{hint}"
        ) from error


def _check_version(plugin: object) -> None:
    version_ = getattr(plugin, "hook_version", None)
    if version_ is None:
        raise PolicyLoadError(
            f"{origin(plugin)} doesn't say which hook version it was written for: set "
            f"`hook_version = {HOOK_VERSION}` in the class."
        )
    if version_ != HOOK_VERSION:
        raise PolicyLoadError(
            f"{origin(plugin)} was written for hook version {version_}, and this velox_core "
            f"calls version {HOOK_VERSION}. Install a release of it that fits, or, if "
            f"it is yours, adapt it and set `hook_version = {HOOK_VERSION}` in the class."
        )


def _check_parts(policy: Policy) -> None:
    """Whether ``score_parts``, ``every_step`` and ``fuse`` go together."""
    from .policy import Policy  # which imports this

    parts: object = policy.score_parts
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 0:
        raise PolicyLoadError(
            f"{origin(policy)}: score_parts={parts!r} isn't allowed; it must be a whole number, 0 "
            "where a score is one number."
        )
    if parts and not policy.every_step:
        raise PolicyLoadError(
            f"{origin(policy)}: score_parts={parts} are remembered only with `every_step = True`."
        )
    if not parts and type(policy).fuse is not Policy.fuse:
        raise PolicyLoadError(
            f"{origin(policy)} has a `fuse`, which only parts of a score need: set score_parts."
        )


def _check_extra(extra: object) -> None:
    """Whether it may stand beside a policy: an instance, that protects or observes."""
    if isinstance(extra, type | str):
        name = extra if isinstance(extra, str) else extra.__name__
        mend = f"load_protector({name!r})" if isinstance(extra, str) else f"{name}(…)"
        raise PolicyLoadError(f"protect takes protectors, not {extra!r}. Give it {mend}.")
    _check_beside(extra)


def _check_beside(extra: object) -> None:
    if hasattr(extra, "hook_version"):
        _check_version(extra)
    for name, opts in _marked(extra).items():
        # The last one registered is asked first, so it would take the policy's place.
        if name in ("score", "evict") and not opts["wrapper"]:
            raise PolicyLoadError(
                f"{origin(extra)}: beside a policy there may be no `{name}` of one's own, only "
                "`protect`, or an observer's @hookimpl(wrapper=True)."
            )


def _marked(plugin: object) -> dict[str, dict[str, Any]]:
    """The options of each method that is marked with ``hookimpl``, by the hook's name."""
    marked = ((name, getattr(plugin, name, None)) for name in _spec_names())
    return {name: method.velox_impl for name, method in marked if hasattr(method, "velox_impl")}  # type: ignore[union-attr]


def _check_signatures(plugin: object) -> None:
    # pluggy never passes an argument that has a default, so such a hook would run on the default.
    for name in _spec_names():
        method: Any = getattr(plugin, name, None)
        if method is None or not hasattr(method, "velox_impl"):
            continue
        given = set(inspect.signature(getattr(EvictionPolicy, name)).parameters)
        if not isinstance(plugin, type):  # a class's methods still have it
            given.remove("self")
        parameters = inspect.signature(method).parameters.values()
        unknown = [p.name for p in parameters if p.name not in given]
        if unknown:
            raise PolicyLoadError(
                f"{origin(plugin)}: the hook `{name}` takes {', '.join(unknown)}, which it will "
                f"never get. It may take {', '.join(sorted(given))}."
            )
        defaults = [p.name for p in parameters if p.default is not inspect.Parameter.empty]
        if defaults:
            raise PolicyLoadError(
                f"{origin(plugin)}: the hook `{name}` gives a default to {', '.join(defaults)}, "
                "and an argument with a default is never passed. Remove the default."
            )


def _spec_names() -> list[str]:
    return [name for name in vars(EvictionPolicy) if not name.startswith("_")]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
