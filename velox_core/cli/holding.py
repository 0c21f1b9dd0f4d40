"""What the caches hold, for people."""

from __future__ import annotations

from typing import Any


def held(cache: list[Any]) -> dict[str, Any]:
    """What the caches hold, one a layer. Layers that velox left alone count with their bytes."""
    from ..cache import VeloxCache

    ours = [layer for layer in cache if isinstance(layer, VeloxCache)]
    others = sum(layer.nbytes for layer in cache if not isinstance(layer, VeloxCache))
    kept = sum(layer.kept_bytes for layer in ours) + others
    full = sum(layer.full_bytes for layer in ours) + others
    return {
        "tokens_seen": max((layer.tokens_seen for layer in ours), default=0),
        "rows_kept": [layer.tokens_kept for layer in ours],
        "kept_bytes": kept,
        "full_bytes": full,
        "compression_ratio": full / kept if kept else 1.0,
    }


def describe_cache(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of a table that say what the cache holds."""
    rows = sorted(set(result["rows_kept"])) or [0]
    span = f"{rows[0]:,}" if len(rows) == 1 else f"{rows[0]:,} to {rows[-1]:,}"
    size = megabytes(result["kept_bytes"])
    if rows[0] < result["tokens_seen"]:  # else KVCache's spare room would be all the difference
        full, ratio = megabytes(result["full_bytes"]), result["compression_ratio"]
        size += f", against {full} without eviction ({ratio:.1f}x)"
    return [
        ("tokens seen", f"{result['tokens_seen']:,}"),
        ("rows kept", f"{span} a layer"),
        ("cache", size),
    ]


def megabytes(n: int) -> str:
    """A number of bytes for people."""
    return f"{n / 1e6:,.1f} MB"
