"""Caches in files, and how a policy is named in them and found again.

A file is what mlx-lm's own ``save_prompt_cache`` writes, and either tool reads the other's. A
layer's state holds all that the layer is, its policy's name and options included, so nothing
depends on who wrote the file; ``save_cache`` adds that it appears whole or not at all, and that
whatever couldn't be loaded again is refused before anything is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakValueDictionary

from .discovery import GROUP, PROTECTORS, origin_of
from .errors import CacheFileError, VeloxError
from .hooks import observes_only

if TYPE_CHECKING:
    from .policy import Policy

#: The entry of a file's metadata in which velox says what is in it.
HEAD = "velox"
#: The layout of a ``VeloxCache``'s state; a file of a later one is refused.
FORMAT = 1

_SUFFIX = ".safetensors"  # mlx-lm appends it to any other name, and reads no other

# A policy that was found again, by its description: a cache's layers share one.
_found: WeakValueDictionary[str, Policy] = WeakValueDictionary()


def save_cache(
    path: str | os.PathLike[str],
    cache: Sequence[Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a cache to a file, which appears whole or not at all. A file that is there already
    is replaced.

    Args:
        path: the file, ``….safetensors``.
        cache: one cache a layer, of ``make_cache`` or of any mlx-lm model; of a batch too.
        metadata: text of your own to go with it.

    Raises:
        CacheFileError: the cache can't be loaded again (its policy comes from no installed
            package, say), or the file can't be written.
    """
    path = _named(path)
    entries = _checked_metadata(metadata or {})
    entries[HEAD] = _head(cache)
    _check_classes(cache)
    from mlx_lm.models.cache import save_prompt_cache

    target = os.path.realpath(path)  # a link stays one
    folder, name = os.path.split(target)
    beside = os.path.join(folder, f".{name}.{os.getpid()}.{secrets.token_hex(4)}{_SUFFIX}")
    try:
        save_prompt_cache(beside, list(cache), entries)
        _sync(beside)
        _read(beside)  # a full disk shows here at the latest
        os.replace(beside, target)
        if os.name == "posix":
            _sync(folder)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CacheFileError(f"The cache can't be written to {path}: {reason}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)


@overload
def load_cache(
    path: str | os.PathLike[str], return_metadata: Literal[False] = False
) -> list[Any]: ...


@overload
def load_cache(
    path: str | os.PathLike[str], return_metadata: Literal[True]
) -> tuple[list[Any], dict[str, str]]: ...


def load_cache(
    path: str | os.PathLike[str], return_metadata: bool = False
) -> list[Any] | tuple[list[Any], dict[str, str]]:
    """A cache as it was when ``save_cache`` or mlx-lm's ``save_prompt_cache`` wrote it.

    What is computed with it from there on is bit for bit what the saved cache would give. A
    policy of another version than the file names is used with a warning: the rows stay as they
    are, and which ones go from now on is the installed version's choice.

    Args:
        path: the file.
        return_metadata: whether to give the metadata too, as ``(cache, metadata)``. Default no.

    Raises:
        CacheFileError: the file can't be read, is cut short, or holds no cache; or its policy
            isn't installed here, or takes other options.
    """
    path = _named(path)
    import mlx.core as mx
    from mlx_lm.models.cache import load_prompt_cache

    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise CacheFileError(f"There is no cache to read in {path}: {error.strerror}.") from error
    try:
        entries = _read(path)
    except Exception as error:  # MLX has an exception for each way of not being such a file
        raise CacheFileError(
            f"{path} isn't a safetensors file, or was cut short: {error}. Save the cache anew."
        ) from error
    if "1.0" not in entries:  # the first layer's class
        raise CacheFileError(
            f"{path} is a safetensors file that holds no cache. Caches are written by "
            "velox_core.save_cache and mlx-lm's save_prompt_cache."
        )
    head = _parse(entries.pop(f"0.{HEAD}", "{}"))
    if head.get("format", FORMAT) != FORMAT:
        raise CacheFileError(
            f"{path} was written by velox-kv {head.get('velox-kv')}, in a layout that this "
            "version doesn't know. Load it with that version."
        )
    _found.clear()  # what is installed may have changed
    try:
        cache: list[Any] = load_prompt_cache(path)
        mx.eval([layer.state for layer in cache])  # now: the file may change
    except VeloxError:
        raise
    except Exception as error:  # a file may hold anything
        raise CacheFileError(
            f"The cache in {path} can't be restored: {type(error).__name__}: {error}. It was "
            "written by another version of mlx-lm or velox, or isn't whole: save it anew."
        ) from error
    if not return_metadata:
        return cache
    return cache, {key[2:]: text for key, text in entries.items() if key.startswith("0.")}


# Policies ------------------------------------------------------------------------------------


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
        policy = _found[text] = _restored(_parse(text))
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


def _parse(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
        if isinstance(parsed, dict):
            return parsed
    except ValueError:
        pass
    raise CacheFileError(f"The file names a policy in a way that can't be read: {text[:80]!r}.")


# Files ---------------------------------------------------------------------------------------


def _named(path: str | os.PathLike[str]) -> str:
    path = os.fspath(path)
    if not path.endswith(_SUFFIX):
        raise CacheFileError(
            f"{path!r}: a cache's file must be named ….safetensors, which mlx-lm knows it by."
        )
    return path


def _read(path: str) -> dict[str, str]:
    """The file's metadata; fails unless all of its arrays are there. Loads none of them."""
    import mlx.core as mx

    loaded: Any = mx.load(path, return_metadata=True)
    metadata: dict[str, str] = loaded[1]
    return metadata


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, text in metadata.items():
        # mlx-lm would read a dot as a step into a dict.
        if not (isinstance(key, str) and isinstance(text, str)) or "." in key or key in ("", HEAD):
            raise CacheFileError(
                f"The metadata {key!r}: {text!r} can't be saved: both must be text, and the name "
                f"without a dot, not empty and not {HEAD!r}."
            )
    return dict(metadata)


def _head(cache: Sequence[Any]) -> str:
    """What is in the file, for people and for other programs."""
    from . import __version__
    from .model import velox_caches

    specs = [json.loads(text) for text in {describe(c.policy): 0 for c in velox_caches(cache)}]
    for spec in specs:
        if spec["policy"] is None:
            raise CacheFileError(f"The cache can't be saved: {spec['why']}")
    return json.dumps({"format": FORMAT, "velox-kv": __version__, "policies": specs})


def _check_classes(cache: Sequence[Any]) -> None:
    from mlx_lm.models import cache as mlx_cache

    if not cache:
        raise CacheFileError("The cache can't be saved: it has no layers.")
    for layer in _layers(cache):
        kind = type(layer)
        if getattr(mlx_cache, kind.__name__, None) is not kind:
            raise CacheFileError(
                f"The cache can't be saved: mlx-lm would not find {kind.__qualname__!r} again, "
                "the class of one of its layers."
            )


def _layers(cache: Sequence[Any]) -> Iterator[Any]:
    for layer in cache:
        yield layer
        yield from _layers(getattr(layer, "caches", ()))
