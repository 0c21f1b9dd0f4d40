"""Saying so when a text has outgrown the context that a model was trained on."""

from __future__ import annotations

from typing import Any

from .policy import Policy


def trained_context(model: Any) -> int | None:
    """The positions that the model was trained on, as its config says; None if it says nothing."""
    args = getattr(model, "args", None)
    inner = getattr(args, "text_config", None) or {}
    said = getattr(args, "max_position_embeddings", None) or inner.get("max_position_embeddings")
    return said if isinstance(said, int) and said > 0 else None


def outgrown(model: Any, policy: Policy, tokens: int) -> str | None:
    """What to tell the user if a text of so many tokens went beyond the trained context with
    options that aren't made for that; None otherwise."""
    trained = trained_context(model)
    if trained is None or tokens <= trained:
        return None
    mends = []
    if policy.positions == "absolute":
        mends.append("--option positions=compressed numbers the kept rows anew")
    if policy.max_age is None and policy.n_queries:
        mends.append(f"--option max_age={max(trained // 2, 1)} lets go of old ones")
    if not mends:
        return None
    return (
        f"The text has {tokens:,} tokens, and the model was trained on {trained:,}. Should it lose "
        f"its thread: {', and '.join(mends)}."
    )
