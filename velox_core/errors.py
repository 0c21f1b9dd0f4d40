"""What velox raises. Everything is a ``VeloxError``; each message says what was wrong, what is
allowed, and what to do."""


class VeloxError(Exception):
    """The root of every error that velox raises on purpose."""


class UnknownPolicyError(VeloxError, LookupError):
    """No installed distribution offers a policy of that name."""


class PolicyLoadError(VeloxError):
    """A policy is installed but can't be used: its import fails, two distributions claim its
    name, its hooks are misspelt or incomplete, or it was written for another hook version."""


class PolicyConfigError(VeloxError, ValueError):
    """An option that the policy doesn't have, or a value out of its range."""


class PolicyHookError(VeloxError):
    """A hook gave something else than it must: nothing, another shape, another type."""


class UnsupportedModelError(VeloxError):
    """The model has no layers, or caches that can't be bounded correctly."""


class UnobservedAttentionError(UnsupportedModelError):
    """The policy needs the model's queries and the model's attention can't be observed."""


class CacheFileError(VeloxError):
    """A saved cache is cut short, isn't one of velox's, or belongs to a missing policy."""
