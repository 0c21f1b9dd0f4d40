"""The tokens of a text that is measured with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import VeloxError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; a mark at its beginning isn't part of it.

    Raises:
        VeloxError: it can't be read, or isn't UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise VeloxError(f"the text in {path} isn't UTF-8: {error}") from error
    except OSError as error:
        raise VeloxError(f"can't read the text in {path}: {error.strerror}") from error


def first_tokens(tokenizer: Any, text: str, n: int | None = None) -> list[int]:
    """The first ``n`` tokens of the text, or all.

    Raises:
        VeloxError: it has fewer than ``n``, or fewer than 2, of which none could be foretold.
    """
    # A tokenizer with verbose=True warns of texts longer than its model's context.
    tokens: list[int] = tokenizer.encode(text, verbose=False)
    least = 2 if n is None else n
    if len(tokens) < least:
        raise VeloxError(
            f"the text has {len(tokens):,} tokens and {least:,} are wanted: give a longer text"
            + ("." if n is None else f", or ask for {len(tokens):,} or fewer.")
        )
    return tokens[:n]


def digest(parts: Sequence[int | str]) -> str:
    """What tells these tokens, or sentences, from others: 12 hexadecimal digits."""
    return hashlib.sha256(str(list(parts)).encode()).hexdigest()[:12]
