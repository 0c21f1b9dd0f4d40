"""How well a model with a given cache foretells a text: the measure that the tools share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx


def stream_nll(
    model: Any,
    tokens: Sequence[int],
    cache: list[Any],
    block: int,
    first_scored: int,
    progress: Callable[[int], object] | None = None,
) -> mx.array:
    """Feed the tokens in blocks, as mlx-lm feeds a prompt; give ``tokens[first_scored:]``'s nll.

    Each is the negative log-probability that the model gave the token, in nats, float32. The last
    token is scored but not fed, so that the
    cache is then ready for ``mlx_lm.generate`` with ``tokens[-1:]`` as its prompt.
    ``progress`` is told after each block how many tokens it had.
    """
    if not 1 <= first_scored < len(tokens):
        raise ValueError(f"first_scored={first_scored}: wanted 1 to {len(tokens) - 1}")
    sequence = mx.array(list(tokens))
    scored = []
    for start in range(0, len(tokens) - 1, block):
        stop = min(start + block, len(tokens) - 1)
        logits = model(sequence[None, start:stop], cache=cache)
        # MLX is lazy: where no logits are asked for, the output layer costs nothing.
        skip = max(first_scored - 1 - start, 0)
        if skip < stop - start:
            scored.append(token_nll(logits[0, skip:], sequence[start + skip + 1 : stop + 1]))
        mx.eval(scored[-1:], [layer.state for layer in cache])
        if progress is not None:
            progress(stop - start)
    return mx.concatenate(scored)


def token_nll(logits: mx.array, targets: mx.array) -> mx.array:
    """The negative log-probability of each target under its row of logits."""
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(-1)
    return mx.logsumexp(logits, axis=-1) - chosen


def perplexity(nll: mx.array) -> float:
    """The perplexity of tokens with these negative log-probabilities."""
    mean: Any = mx.mean(nll).item()
    return math.exp(mean)
