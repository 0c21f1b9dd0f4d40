"""How a policy is described in a cache's state, and found again from that."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from .discovery import GROUP, PROTECTORS, origin_of
from .errors import CacheFileError, VeloxError
from .hooks import observes_only

if TYPE_CHECKING:
    from .policy import Policy

# A policy that was found again, by its description: a cache's layers share one.
_found: WeakValueDictionary[str, Policy] = WeakValueDictionary()


def forget_found() -> None:
    """Look policies up anew from here on."""
    _found.clear()


def describe(policy: Policy) -> str:
    """The policy's name, distribution, version and options, and those of its protectors, as JSON.

    Never fails, as mlx-lm asks for it whenever it evaluates a cache: what can't be found again
    is described with the reason, which ``save_cache`` and ``restore`` then raise.
    """
    if policy._spec is None:
        try:
            spec = _entry(policy, GROUP, "policy")
            protectors = [extra for extra in policy.extras if not observes_only(extra)]
            if protectors:
                spec["protectors"] = [_entry(each, PROTECTORS, "protector") for each in protectors]
            text = json.dumps(spec)
        except (CacheFileError, TypeError, ValueError) as error:
            text = json.dumps({"policy": None, "why": _why(policy, error)})
        object.__setattr__(policy, "_spec", text)
    assert policy._spec is not None
    return policy._spec


def restore(text: str) -> Policy:
    """The policy that ``describe`` described, with its protectors; the same one for the same text
    as long as it is in use.

    Raises:
        CacheFileError: it isn't installed here, or doesn't take those options.
    """
    policy = _found.get(text)
    if policy is None:
        policy = _found[text] = _restored(parse(text))
    return policy


def _entry(thing: Any, group: str, noun: str) -> dict[str, Any]:
    entry = origin_of(type(thing), group)
    if entry is None:
        raise CacheFileError(
            f"the {noun} {type(thing).__name__!r} comes from no installed package, so it couldn't "
            "be found again. Give it a package with an entry point in the group "
            f"{group!r}, and install that"
        )
    return {
        noun: entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "options": thing.options(),
    }


def _why(policy: Policy, error: Exception) -> str:
    if isinstance(error, CacheFileError):
        return f"{error}."
    return f"an option of {type(policy).__name__!r} or its protectors can't be written: {error}."


def _restored(spec: dict[str, Any]) -> Policy:
    from .registry import load_policy, load_protector  # imports what imports this

    if spec.get("policy") is None:
        raise CacheFileError(
            "The saved cache's policy can't be found again: "
            f"{spec.get('why', 'the file names none.')}"
        )
    noun, named = "policy", spec
    try:
        protectors = []
        for noun, named in (("protector", each) for each in spec.get("protectors", ())):
            protectors.append(load_protector(_full_name(named, noun), **named["options"]))
            _compare_version(protectors[-1], PROTECTORS, named, noun)
        noun, named = "policy", spec
        policy = load_policy(_full_name(spec, noun), protect=protectors, **spec["options"])
        _compare_version(policy, GROUP, spec, noun)
    except VeloxError as error:
        raise CacheFileError(
            f"The cache was saved with the {noun} {named[noun]!r} of {named['distribution']} "
            f"{named['version']}, which can't be loaded here: {error}"
        ) from error
    return policy


def _full_name(named: dict[str, Any], noun: str) -> str:
    # Another distribution's policy of the same name is another policy.
    return f"{named['distribution']}:{named[noun]}"


def _compare_version(thing: object, group: str, named: dict[str, Any], noun: str) -> None:
    entry = origin_of(type(thing), group)
    if entry is not None and entry.version != named["version"]:
        warnings.warn(
            f"The cache was saved with the {noun} {named[noun]!r} of {named['distribution']} "
            f"{named['version']}, and version {entry.version} is installed here: from now on it "
            "may choose other rows.",
            stacklevel=2,
        )


def parse(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
        if isinstance(parsed, dict):
            return parsed
    except ValueError:
        pass
    raise CacheFileError(f"The file names a policy in a way that can't be read: {text[:80]!r}.")
