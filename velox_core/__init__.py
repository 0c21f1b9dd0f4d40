"""velox: eviction policies as plugins for the KV cache of mlx-lm."""

from .cache import VeloxCache
from .errors import (
    CacheFileError,
    PolicyConfigError,
    PolicyHookError,
    PolicyLoadError,
    UnknownPolicyError,
    UnobservedAttentionError,
    UnsupportedModelError,
    VeloxError,
)
from .hooks import HOOK_VERSION, EvictionPolicy, hookimpl
from .lookback import LookbackCache
from .model import apply, make_cache
from .policy import Policy, at_least, one_of
from .protectors import Pin, Protector
from .quantized import QuantizedVeloxCache
from .registry import InstalledPolicy, installed_policies, load_policy, load_protector
from .rows import Rows
from .saving import load_cache, save_cache

__version__ = "0.1.0"

__all__ = [
    "HOOK_VERSION",
    "CacheFileError",
    "EvictionPolicy",
    "InstalledPolicy",
    "LookbackCache",
    "Pin",
    "Policy",
    "PolicyConfigError",
    "PolicyHookError",
    "PolicyLoadError",
    "Protector",
    "QuantizedVeloxCache",
    "Rows",
    "UnknownPolicyError",
    "UnobservedAttentionError",
    "UnsupportedModelError",
    "VeloxCache",
    "VeloxError",
    "apply",
    "at_least",
    "hookimpl",
    "installed_policies",
    "load_cache",
    "load_policy",
    "load_protector",
    "make_cache",
    "one_of",
    "save_cache",
]
