"""A long English text that is on every machine: the help topics that CPython carries."""

from __future__ import annotations

import re
from pydoc_data.topics import topics
from typing import Any


def long_text() -> str:
    """All of Python's help topics, over 400 KB, in an order that is the same everywhere.

    The words vary a little with the version of Python: compare figures of one machine only.
    """
    return "\n\n".join(clean(topics[name]) for name in sorted(topics))


def clean(topic: str) -> str:
    """A topic without the traces of its markup."""
    topic = re.sub(r"(?m)^[ ]*([*=~^-])\1{2,}[ ]*$\n?", "", topic)  # lines under headings
    topic = re.sub(r"(?<![\w*])\*{1,2}([^*\s][^*\n]*)\*{1,2}(?![\w*])", r"\1", topic)  # emphasis
    return re.sub(r"\n{3,}", "\n\n", topic).strip()


def tokens(tokenizer: Any, n: int, text: str | None = None) -> list[int]:
    """The first n tokens of the text, by default the long one."""
    # A tokenizer with verbose=True warns of texts longer than its model's context.
    ids: list[int] = tokenizer.encode(long_text() if text is None else text, verbose=False)
    if len(ids) < n:
        raise ValueError(f"the text has {len(ids):,} tokens, and {n:,} are wanted")
    return ids[:n]
