"""Caches in files.

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

from .description import describe, forget_found, parse
from .errors import CacheFileError, VeloxError

#: The entry of a file's metadata in which velox says what is in it.
HEAD = "velox"
#: The layout of a ``VeloxCache``'s state; a file of a later one is refused.
FORMAT = 1

_SUFFIX = ".safetensors"  # mlx-lm appends it to any other name, and reads no other


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
    if not os.path.isdir(folder):
        raise CacheFileError(f"The cache can't be written to {path}: there is no folder {folder}.")
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
    head = parse(entries.pop(f"0.{HEAD}", "{}"))
    if head.get("format", FORMAT) != FORMAT:
        raise CacheFileError(
            f"{path} was written by velox-kv {head.get('velox-kv')}, in a layout that this "
            "version doesn't know. Load it with that version."
        )
    forget_found()  # what is installed may have changed
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
