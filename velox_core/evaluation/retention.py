"""Which tokens survive: a policy reads a text, and each token's row is watched until it goes.

A record, of kind ``"retention"``, holds one policy's run:

- ``text`` (its name), ``digest`` (of its tokens), ``tokens`` (how many were read), ``block``
  (tokens a step), ``policy``, ``options``, ``code`` and ``sinks`` (``n_sink`` where ``options``
  don't say): what was run;
- ``layers``: the layers that were watched, and ``budgets``, the rows that each keeps;
- ``classes``: a letter a token, as ``survival.CLASSES`` has them;
- ``evicted_at``: for each layer, for each head that chooses (one, with scope ``"layer"``), for each
  token the step after which its row was gone, or null where it stayed to the end. Step ``s`` is the
  one in which token ``s`` was read, so a token at ``p`` is held after the steps ``p`` to
  ``evicted_at - 1``.

What follows from those (maps, shares, lives) is in ``survival``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import VeloxError
from ..hooks import hookimpl
from ..model import make_cache, velox_caches
from ..policy import Policy
from ..registry import load_policy
from ..rows import Rows

#: Steps after which what was watched is read, so that no step waits for it.
CHUNK = 64


class Departures:
    """An observer that notes which rows of some layers go, and when. It changes nothing, and no
    step waits for it: ``read`` does."""

    def __init__(self, tokens: int, layers: Sequence[int]) -> None:
        self.tokens = tokens
        self.layers = layers
        #: By layer, ``[heads or 1, tokens]``: the step that each token went at, ``tokens`` if none.
        self.steps: dict[int, np.ndarray[Any, Any]] = {}
        self._noted: list[tuple[int, mx.array, mx.array]] = []

    @hookimpl(wrapper=True)
    def evict(self, rows: Rows) -> Any:
        gone = yield
        if rows.layer in self.layers:
            positions = mx.take_along_axis(rows.positions, gone, axis=-1)
            self._noted.append((rows.layer, rows.newest, positions))
        return gone

    def read(self) -> None:
        """Take what was noted since the last time into ``steps``."""
        mx.eval([arrays for _, *arrays in self._noted])
        for layer, newest, positions in self._noted:
            heads = positions.shape[1]
            if layer not in self.steps:
                self.steps[layer] = np.full((heads, self.tokens), self.tokens)
            np.put_along_axis(self.steps[layer], np.array(positions[0]), newest.item(), axis=1)
        self._noted.clear()


def layers_to_watch(model: Any, policy: Policy, wanted: Sequence[int] | None = None) -> list[int]:
    """The layers whose caches evict: all of them, or those that are wanted.

    Raises:
        VeloxError: one that is wanted doesn't.
    """
    there = sorted({cache.layer for cache in velox_caches(make_cache(model, policy))})
    for layer in wanted or ():
        if layer not in there:
            has = ", ".join(map(str, there))
            raise VeloxError(f"there is no layer {layer} that evicts; those that do are {has}")
    return there if wanted is None else list(wanted)


def retention(
    model: Any,
    tokens: Sequence[int],
    policy: str,
    options: dict[str, Any],
    layers: Sequence[int],
    block: int = 1,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Read the tokens with a policy's caches, and watch some layers.

    The first tokens, as many as the smallest budget, come at once, since nothing goes before; then
    ``block`` at a time.

    Args:
        policy: its name.
        options: its options.
        layers: which ones to watch, from ``layers_to_watch``.
        block: tokens a step. Default 1, as in decoding.
        progress: told after each step how many tokens it had.

    Returns:
        The record's ``budgets`` and ``evicted_at``.

    Raises:
        VeloxError: there are no more tokens than rows.
    """
    watch = Departures(len(tokens), layers)
    chosen = load_policy(policy, protect=[watch], **options)
    cache = make_cache(model, chosen)
    bounded = {each.layer: each for each in velox_caches(cache)}
    first = min(each.budget for each in bounded.values())
    if first >= len(tokens):
        raise VeloxError(
            f"{len(tokens):,} tokens fit into {first:,} rows, so none would go: give more tokens, "
            "or a smaller budget"
        )
    starts = [0, *range(first, len(tokens), block)]
    for i, (start, stop) in enumerate(zip(starts, [*starts[1:], len(tokens)], strict=True)):
        mx.eval(model(mx.array([tokens[start:stop]]), cache=cache)[:, -1])
        if i % CHUNK == 0:
            watch.read()
        if progress is not None:
            progress(stop - start)
    for each in bounded.values():
        each.positions  # noqa: B018 (reading it does the last step's eviction)
    watch.read()
    never = np.full((1, len(tokens)), len(tokens))  # a layer with a larger budget than there is
    return {
        "budgets": [bounded[layer].budget for layer in layers],
        "evicted_at": [
            [[int(s) if s < len(tokens) else None for s in head] for head in steps]
            for steps in (watch.steps.get(layer, never) for layer in layers)
        ],
    }
