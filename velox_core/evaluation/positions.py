"""What each way of numbering rows does far beyond the context that a model was trained on.

A record, of kind ``"positions"``, holds one reading of a long text:

- ``text``, ``digest``, ``tokens``, ``block``: what was read and how, as for ``"perplexity"``;
- ``stretch``: tokens that are scored together; ``budget``: rows a layer keeps;
- ``policy`` as it was asked for, ``options``, all that it has beside the budget, and ``code``;
- ``start``: ``"running"``, the text from its beginning without a break, or ``"afresh"``, each
  stretch read by a new cache that begins one stretch before it, so that no position is high;
- ``perplexity``, ``seconds`` (per token) and ``bytes`` (that the caches hold): a number for each
  stretch. Of the first stretch ``"afresh"`` has none (null): there it is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx

from ..errors import VeloxError
from ..model import make_cache, velox_caches
from ..policy import Policy
from .perplexity import perplexity, stream_nll

SCHEMES = ("absolute", "contiguous", "compressed")


@attrs.frozen
class Reading:
    """One reading of the text.

    Args:
        model: an mlx-lm model.
        tokens: the text.
        policy: with the positions to use.
        block: tokens fed at a time.
        stretch: tokens that are scored together.
        afresh: whether each stretch begins with a new cache, one stretch before it.
    """

    model: Any
    tokens: Sequence[int]
    policy: Policy
    block: int
    stretch: int
    afresh: bool

    @property
    def cost(self) -> int:
        """Tokens that are read in all."""
        return (2 * (self.stretches - 1) if self.afresh else self.stretches) * self.stretch

    @property
    def stretches(self) -> int:
        return len(self.tokens) // self.stretch

    def measure(self, progress: Callable[[int], object] | None = None) -> dict[str, Any]:
        """Read; give what the record says of it: ``perplexity``, ``seconds``, ``bytes``.

        Args:
            progress: told after each block how many tokens it had.
        """
        said = progress or (lambda done: None)
        found: list[tuple[float, float, int] | None] = [None] if self.afresh else []
        cache = make_cache(self.model, self.policy)
        for number in range(len(found), self.stretches):
            if self.afresh:
                cache = make_cache(self.model, self.policy)
                self._read(cache, number - 1, said, scored=False)
            found.append(self._read(cache, number, said))
        columns = zip(*(each or (None, None, None) for each in found), strict=True)
        return dict(zip(("perplexity", "seconds", "bytes"), map(list, columns), strict=True))

    def _read(
        self, cache: list[Any], number: int, said: Callable[[int], object], scored: bool = True
    ) -> tuple[float, float, int]:
        """Feed a stretch: its perplexity, seconds a token and bytes held at its end."""
        first = number * self.stretch
        # The token before the stretch was foretold, and foretells the first of it.
        piece = self.tokens[max(first - 1, 0) : first + self.stretch]
        began = time.perf_counter()
        if scored:
            value = perplexity(stream_nll(self.model, piece, cache, self.block, 1, said))
        else:
            stream_nll(self.model, piece, cache, self.block, len(piece) - 1, said)
            value = 0.0
        seconds = (time.perf_counter() - began) / len(piece)
        mx.clear_cache()
        return value, seconds, sum(layer.nbytes for layer in velox_caches(cache))


def check_length(tokens: Sequence[int], stretch: int) -> None:
    """Raise ``VeloxError`` unless there are two stretches to compare."""
    if len(tokens) < 2 * stretch:
        raise VeloxError(
            f"{len(tokens):,} tokens don't make two stretches of {stretch:,}: give a longer text, "
            "more --tokens, or a shorter --stretch."
        )
