"""How a policy is named in a saved cache, and found again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .discovery import origin_of
from .errors import CacheFileError, VeloxError

if TYPE_CHECKING:
    from .policy import Policy


def describe(policy: Policy) -> str:
    """The policy's name, distribution, version and options, as JSON."""
    if policy._spec is None:
        entry = origin_of(type(policy))
        named = (entry.name, entry.distribution, entry.version) if entry else (None, None, None)
        spec = dict(zip(("policy", "distribution", "version"), named, strict=True))
        # Options first turn to JSON here: one that can't is an error now and not after a load.
        text = json.dumps({**spec, "options": policy.options()})
        object.__setattr__(policy, "_spec", text)
    assert policy._spec is not None
    return policy._spec


def restore(text: str) -> Policy:
    """The policy that ``describe`` named.

    Raises:
        CacheFileError: it isn't installed here, or doesn't take those options.
    """
    from .registry import load_policy  # imports what imports this

    spec = json.loads(text)
    if spec["policy"] is None:
        raise CacheFileError(
            "The cache's policy was no installed one when it was saved, so it can't be found "
            "again. Install the policy as a package with an entry point, and save anew."
        )
    try:
        return load_policy(spec["policy"], **spec["options"])
    except VeloxError as error:
        raise CacheFileError(
            f"The cache was saved with the policy {spec['policy']!r} of {spec['distribution']} "
            f"{spec['version']}, which can't be loaded here: {error}"
        ) from error
