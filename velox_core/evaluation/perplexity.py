"""How well a model foretells a text with each cache.

A record, of kind ``"perplexity"``, holds one cache's reading of a text:

- ``text`` (its name), ``digest`` (of its tokens), ``tokens`` (how many were read), ``block``
  (tokens fed at a time) and ``first_scored`` (the first token that counts): what was read and how;
- ``policy``: ``"full"``, ``"rotating"`` or ``"truncated"``, or a policy as it was asked for,
  ``"morphkv:window=8"`` for instance; ``options``, all that it has beside the budget; and
  ``code``, a digest of the files that it comes from;
- ``budget``: rows a layer keeps, or null for the full cache;
- ``nll``: the mean negative log-probability of the scored tokens, in nats, ``perplexity``, its
  exponential, and ``seconds``, what the reading took.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import mlx.core as mx

from ..errors import VeloxError
from .caches import Contender, arrays, contenders, full
from .policies import PolicySpec

Progress = Callable[[int], object]


@attrs.frozen
class Reading:
    """A text, read with one kind of cache.

    Args:
        contender: the cache; the full one's, where ``budget`` tokens are read afresh.
        cost: tokens that are read in all.
        read: gives the nll of the scored tokens; it takes what is told of the tokens read.
    """

    contender: Contender
    cost: int
    read: Callable[[Progress | None], mx.array]

    def measure(self, progress: Progress | None = None) -> dict[str, Any]:
        """Read the text; give what the record says of it: ``nll``, ``perplexity``, ``seconds``.

        Raises:
            VeloxError: the model gives no numbers, and so no perplexity.
        """
        started = time.perf_counter()
        nll = self.read(progress)
        mean: Any = mx.mean(nll).item()
        if not math.isfinite(mean):
            raise VeloxError(f"{self.contender}: the model's logits aren't numbers")
        return {
            "nll": mean,
            "perplexity": perplexity(nll),
            "seconds": time.perf_counter() - started,
        }


def readings(
    model: Any,
    tokens: Sequence[int],
    policies: Iterable[PolicySpec],
    budgets: Sequence[int],
    block: int,
    first_scored: int,
    opening: int = 0,
) -> list[Reading]:
    """With the full cache, with the text truncated to each budget, and with each bounded cache.

    Args:
        tokens: the text.
        block: tokens fed at a time.
        first_scored: the first token that counts, at least 1: nothing foretells token 0.
        opening: as for ``truncated_nll``.

    Raises:
        VeloxError: what ``load_policy`` and ``make_cache`` raise, before anything is read.
    """
    feed = {"block": block, "first_scored": first_scored}

    def whole(contender: Contender) -> Reading:
        def read(progress: Progress | None) -> mx.array:
            return stream_nll(model, tokens, contender.make(), **feed, progress=progress)

        return Reading(contender, len(tokens) - 1, read)

    def truncated(budget: int) -> Reading:
        contender = Contender("truncated", budget, partial(full, model))

        def read(progress: Progress | None) -> mx.array:
            return truncated_nll(
                model, tokens, contender.make, budget, **feed, opening=opening, progress=progress
            )

        return Reading(contender, truncated_work(len(tokens), budget, block), read)

    first, *bounded = contenders(model, policies, budgets)
    return [whole(first), *map(truncated, budgets), *map(whole, bounded)]


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
    token is scored but not fed, so that the cache is then ready for ``mlx_lm.generate`` with
    ``tokens[-1:]`` as its prompt.

    Args:
        progress: told after each block how many tokens it had.
    """
    check_first_scored(first_scored, tokens)
    sequence = mx.array(list(tokens))
    scored = []
    for start in range(0, len(tokens) - 1, block):
        stop = min(start + block, len(tokens) - 1)
        scored += block_nll(model, sequence, cache, start, stop, first_scored)
        mx.eval(scored[-1:], arrays(cache))
        if progress is not None:
            progress(stop - start)
    return mx.concatenate(scored)


def truncated_nll(
    model: Any,
    tokens: Sequence[int],
    make: Callable[[], list[Any]],
    budget: int,
    block: int,
    first_scored: int,
    opening: int = 0,
    progress: Callable[[int], object] | None = None,
) -> mx.array:
    """The same of a user who evicts nothing and cuts the text instead: before each block the cache
    is thrown away, and the last ``budget`` tokens are read afresh, from position 0.

    A layer then holds what it holds with a policy: ``budget`` rows, and the block beside them. The
    price is time, ``budget + block`` tokens read for each block of ``block``.

    Args:
        make: gives a new, empty cache.
        opening: tokens at the text's beginning that stand before each cut too, and count in
            ``budget``: the one that the tokenizer begins each text with, if it does. Default 0.
        progress: told after each block how many tokens were read for it.
    """
    check_first_scored(first_scored, tokens)
    sequence = mx.array(list(tokens))
    scored, cache = [], make()
    for start in range(0, len(tokens) - 1, block):
        stop = min(start + block, len(tokens) - 1)
        before = 0
        if start > budget:
            cache, before = make(), budget
            cut = start - budget + opening
            kept = mx.concatenate([sequence[:opening], sequence[cut:start]])
            model(kept[None], cache=cache)
            mx.eval(arrays(cache))
        scored += block_nll(model, sequence, cache, start, stop, first_scored)
        mx.eval(scored[-1:], arrays(cache))
        if progress is not None:
            progress(before + stop - start)
    return mx.concatenate(scored)


def truncated_work(tokens: int, budget: int, block: int) -> int:
    """How many tokens ``truncated_nll`` reads."""
    starts = range(0, tokens - 1, block)
    return tokens - 1 + budget * sum(start > budget for start in starts)


def check_first_scored(first_scored: int, tokens: Sequence[int]) -> None:
    """Raise ``ValueError`` unless there is a token to score."""
    if not 1 <= first_scored < len(tokens):
        raise ValueError(f"first_scored={first_scored}: wanted 1 to {len(tokens) - 1}")


def block_nll(
    model: Any, sequence: mx.array, cache: list[Any], start: int, stop: int, first_scored: int
) -> list[mx.array]:
    """Feed ``sequence[start:stop]``; give the nll of those that it foretells and that count, as a
    list of one array, or of none."""
    logits = model(sequence[None, start:stop], cache=cache)
    # MLX is lazy: where no logits are asked for, the output layer costs nothing.
    skip = max(first_scored - 1 - start, 0)
    if skip >= stop - start:
        return []
    return [token_nll(logits[0, skip:], sequence[start + skip + 1 : stop + 1])]


def token_nll(logits: mx.array, targets: mx.array) -> mx.array:
    """The negative log-probability of each target under its row of logits."""
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(-1)
    return mx.logsumexp(logits, axis=-1) - chosen


def perplexity(nll: mx.array) -> float:
    """The perplexity of tokens with these negative log-probabilities."""
    mean: Any = mx.mean(nll).item()
    return math.exp(mean)
