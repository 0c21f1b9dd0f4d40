"""Saying so when a text has outgrown the context that a model was trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..policy import Policy


def trained_context(model: Any) -> int | None:
    """The positions that the model was trained on, as its config says; None if it says nothing."""
    args = getattr(model, "args", None)
    inner = getattr(args, "text_config", None) or {}
    said = getattr(args, "max_position_embeddings", None) or inner.get("max_position_embeddings")
    return said if isinstance(said, int) and said > 0 else None


def warn_if_outgrown(model: Any, policy: Policy, tokens: int) -> bool:
    """Say on stderr that the text of so many tokens went beyond the trained context with absolute
    positions, if it did; give whether."""
    trained = trained_context(model)
    outgrown = policy.positions == "absolute" and trained is not None and tokens > trained
    if outgrown:
        click.echo(
            f"The text has {tokens:,} tokens, and the model was trained on {trained:,}. Should it "
            "lose its thread: --option positions=contiguous numbers the kept rows anew.",
            err=True,
        )
    return outgrown
