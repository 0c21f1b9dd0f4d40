"""Loading the one policy that was asked for.

Whatever goes wrong comes out as a ``VeloxError`` that names the policy, its distribution and the
mend. Which policies there are is ``discovery``'s.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import sys
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from .discovery import (
    DISABLE,
    GROUP,
    PROTECTORS,
    InstalledPolicy,
    installed_policies,
    normal,
    one_line,
    origin_of,
    scan,
)
from .errors import PolicyConfigError, PolicyLoadError, UnknownPolicyError, VeloxError

if TYPE_CHECKING:
    from .policy import Policy
    from .protectors import Protector

_T = TypeVar("_T")

__all__ = [
    "InstalledPolicy",
    "check_protector",
    "installed_policies",
    "load_policy",
    "load_protector",
    "origin_of",
]

#: Our own policies and where they come from. Only these names ever lead to a `pip install`: any
#: other name may be registered on the package index by anyone.
OURS = {
    "tova": "velox-tova",
    "h2o": "velox-h2o",
    "morphkv": "velox-morphkv",
    "streaming": "velox-streaming",
}


def load_policy(name: str, /, *, protect: Iterable[object] = (), **options: Any) -> Policy:
    """Import a policy, set its options and check its hooks.

    Args:
        name: the policy's name, or ``"distribution:name"`` where two distributions claim it.
        protect: protectors or observers whose hooks run beside the policy's. Default none.
        options: the policy's own options; those that are left out have the policy's defaults.

    Raises:
        UnknownPolicyError: no installed distribution offers it.
        PolicyLoadError: it is disabled, two distributions claim it, its import fails, or its
            class or hooks aren't what they must be.
        PolicyConfigError: an option that it doesn't have, or a value out of range.
    """
    from .policy import Policy  # not above: to say that a policy is unknown takes no MLX

    entry = _find(name)
    policy = _make(entry, Policy, options)
    if not isinstance(protect, Iterable) or isinstance(protect, str):
        raise PolicyConfigError(f"protect={protect!r} isn't a list: [Pin(tokens=range(120))] is.")
    extras = tuple(protect)
    try:
        policy.hooks(extras)
    except VeloxError:
        raise
    except Exception as error:
        raise PolicyLoadError(
            f"{entry}: its hooks can't be set up: {one_line(error)}. {_other_version(entry)}"
        ) from error
    return policy


def load_protector(name: str, /, **options: Any) -> Protector:
    """Import a protector and set its options, for ``load_policy(protect=[…])``.

    Args:
        name: its name in the entry-point group ``velox.protectors``, or ``"distribution:name"``.
            ``"pin"`` is velox's own.
        options: its options.

    Raises:
        VeloxError: what ``load_policy`` raises.
    """
    entry = _find(name, PROTECTORS)
    from .protectors import Protector

    return _make(entry, Protector, options)


def check_protector(name: str, /) -> None:
    """Import a protector and check its hooks. Its options aren't set: some have no default.

    Args:
        name: as for ``load_protector``.

    Raises:
        VeloxError: what ``load_policy`` raises.
    """
    entry = _find(name, PROTECTORS)
    from .hooks import check_protector
    from .protectors import Protector

    check_protector(_import(entry, Protector))


def _make(entry: InstalledPolicy, base: type[_T], options: dict[str, Any]) -> _T:
    cls = _import(entry, base)
    _check_names(entry, cls, options)
    try:
        return cls(**options)
    except VeloxError:
        raise
    except Exception as error:
        raise PolicyConfigError(f"{entry} refuses its options: {one_line(error)}.") from error


def _find(name: str, group: str = GROUP) -> InstalledPolicy:
    policies = scan(group)
    matches = [policy for policy in policies if policy.name == name]
    if not matches:
        dist, _, short = name.rpartition(":")
        matches = [
            policy
            for policy in policies
            if policy.name == short and normal(policy.distribution) == normal(dist)
        ]
    if not matches:
        raise UnknownPolicyError(_unknown(name, policies, group))
    # One that is stale or disabled doesn't stand in another's way.
    healthy = [policy for policy in matches if policy.status == "ok"]
    if len(healthy) > 1:
        claims = " and ".join(f"{policy.distribution} {policy.version}" for policy in healthy)
        forms = " or ".join(repr(policy.full_name) for policy in healthy)
        noun = _noun(group)
        raise PolicyLoadError(f"{noun} {name!r} is claimed by {claims}: choose with {forms}.")
    if healthy:
        return healthy[0]
    policy = matches[0]
    if policy.status == "disabled":
        raise PolicyLoadError(
            f"{policy} is disabled by {DISABLE}={os.environ[DISABLE]!r}: "
            "take it out of that variable to use it."
        )
    raise PolicyLoadError(
        f"{policy} can't be used: {policy.status}. Reinstall {policy.distribution}, or remove "
        f"it: {sys.executable} -m pip uninstall {policy.distribution}"
    )


def _noun(group: str) -> str:
    return "protector" if group == PROTECTORS else "policy"


def _unknown(name: str, policies: list[InstalledPolicy], group: str) -> str:
    installed = list(dict.fromkeys(policy.name for policy in policies))
    full = [policy.full_name for policy in policies] if ":" in name else []
    ours_too = OURS if group == GROUP else {}
    near = _near(name, [*installed, *full, *ours_too])
    parts = [f"no {_noun(group)} {name!r} is installed for {sys.executable}."]
    if near:
        parts.append(f"Did you mean {near!r}?")
    parts.append(f"Installed: {', '.join(installed) or 'none'}.")
    if "=" in name and group == GROUP:
        parts.append("Options don't belong to the name: --option key=value, or load_policy's own.")
    elif "=" in name:
        parts.append("""Options come in JSON, as in --protect 'pin:{"tokens": [[0, 120]]}'.""")
    elif name.partition(":")[0] in installed:
        parts.append("An option needs a value: key=value.")
    ours = near or name
    if ours in ours_too and ours not in installed:
        parts.append(
            f"{ours!r} comes with {OURS[ours]}: {sys.executable} -m pip install {OURS[ours]}"
        )
    return " ".join(parts)


def _import(entry: InstalledPolicy, base: type[_T]) -> type[_T]:
    module, _, attr = entry.target.partition(":")
    try:
        cls: Any = functools.reduce(getattr, attr.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # a module may do anything on import
        mend = _other_version(entry)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and missing.partition(".")[0] != module.partition(".")[0]:
            mend = f"Install what it needs (the module {missing!r}), or another version of it."
        raise PolicyLoadError(f"{entry} can't be imported: {one_line(error)}. {mend}") from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        what = f"class {cls.__name__}" if isinstance(cls, type) else f"{type(cls).__name__} object"
        raise PolicyLoadError(
            f"{entry}: {entry.target} must be a subclass of velox_core.{base.__name__} "
            f"and is a {what}. {_other_version(entry)}"
        )
    # pluggy goes by identity, and attrs makes classes that compare by value unless told.
    if cls.__eq__ is not object.__eq__ or cls.__hash__ is not object.__hash__:
        raise PolicyLoadError(
            f"{entry}: {cls.__name__} compares by value, and hooks' owners must be told apart and "
            "hashable. Decorate it with @attrs.frozen(eq=False, kw_only=True)."
        )
    return cls


def _check_names(entry: InstalledPolicy, cls: type, given: Collection[str]) -> None:
    known = {field.alias: field.default for field in attrs.fields(cls) if field.init}
    for option in given:
        if option not in known:
            near = _near(option, known)
            hint = f" Did you mean {near!r}?" if near else ""
            has = ", ".join(f"{name}={_default(value)}" for name, value in known.items())
            raise PolicyConfigError(f"{entry} has no option {option!r}.{hint} It has: {has}.")
    for name, default in known.items():
        if default is attrs.NOTHING and name not in given:
            raise PolicyConfigError(f"{entry} needs the option {name!r}, {name}=….")


def _default(value: object) -> str:
    if value is attrs.NOTHING:
        return "(required)"
    return "…" if isinstance(value, attrs.Factory) else repr(value)  # type: ignore[arg-type]


def _near(word: str, words: Iterable[str]) -> str | None:
    by_case = {known.casefold(): known for known in words}
    near = difflib.get_close_matches(word.casefold(), by_case, n=1)
    return by_case[near[0]] if near and by_case[near[0]] != word else None


def _other_version(entry: InstalledPolicy) -> str:
    return f"Install another version of {entry.distribution}, or tell its authors."
