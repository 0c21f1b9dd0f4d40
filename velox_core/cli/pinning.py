"""What ``velox generate`` lets stay: a system prompt, and what named protectors protect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..protectors import Protector


def protectors(named: Iterable[str]) -> list[Protector]:
    """The protectors that were asked for, each as ``NAME`` or ``NAME:{…}``, its options in JSON."""
    from ..registry import load_protector

    found = []
    for text in named:
        name, brace, rest = text.partition(":{")
        try:
            options = json.loads(brace[1:] + rest or "{}")
        except ValueError as error:
            raise click.UsageError(
                f"--protect {text!r} must be NAME or NAME:{{…}} with options in JSON: {error}"
            ) from error
        found.append(load_protector(name, **options))
    return found


def before_message(encode: Callable[[str], list[int]], message: str) -> int:
    """How many tokens a chat template puts before the user's message: the system prompt, given or
    the template's own, and what opens the message.

    Args:
        encode: gives the tokens of a prompt with that message.
        message: the user's.
    """
    # Templates strip messages, so this one must differ in what is left of it.
    other = "a" if not message.strip().startswith("a") else "b"
    pairs = zip(encode(message), encode(other), strict=False)
    n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not n:
        raise click.UsageError(
            "--pin-system has nothing to pin: the model's chat template puts nothing before the "
            "message"
        )
    return n
