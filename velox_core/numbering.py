"""Where rows stand for the model: numbering them anew, for texts longer than it was trained on.

Rows always carry their true positions. Under ``positions="contiguous"`` or ``"compressed"`` the
cache holds keys that aren't rotated, and rotates them on the way out, each to its place.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .batch import Batch
from .errors import UnsupportedModelError
from .rope import Rotation, source

#: The widest gap between neighbours that "compressed" leaves as it is.
WIDEST = 10


def step(gaps: mx.array, scheme: str) -> mx.array:
    """How far apart neighbours stand whose true positions are ``gaps`` apart (int32, at least 1).

    "contiguous" makes every gap 1. "compressed" leaves one of up to 10 and makes a wider one
    ``max(1, round(ln(ln(gap))))``, after section 7.2 of TOVA's paper, arXiv 2401.06104. (From a gap
    of 11 on that is 1 at least by itself.)
    """
    if scheme == "contiguous":
        return mx.minimum(gaps, 1)
    squeezed = mx.log(mx.log(mx.maximum(gaps, WIDEST).astype(mx.float32)))
    return mx.where(gaps > WIDEST, mx.round(squeezed).astype(mx.int32), gaps)


def places(positions: mx.array, scheme: str, padded: bool = True) -> mx.array:
    """Where rows stand, the oldest at 0.

    Args:
        positions: ``[batch, heads or 1, rows]`` int32, true ones in any order; -1 is empty.
        scheme: ``"contiguous"`` or ``"compressed"``.
        padded: whether some rows may be empty.

    Returns:
        The same shape, int32; 0 for an empty row.
    """
    by_age = mx.argsort(positions, axis=-1)
    if scheme == "contiguous" and not padded:
        ascending = mx.arange(positions.shape[-1], dtype=mx.int32)
    else:
        ordered = mx.take_along_axis(positions, by_age, axis=-1)
        older = ordered[..., :-1]
        steps = step(ordered[..., 1:] - older, scheme)
        if padded:
            steps = mx.where(older < 0, 0, steps)
        first = mx.zeros((*steps.shape[:-1], 1), mx.int32)
        ascending = mx.concatenate([first, mx.cumsum(steps, axis=-1)], axis=-1)
    ascending = mx.broadcast_to(ascending, positions.shape)
    return mx.put_along_axis(mx.zeros_like(positions), by_age, ascending, axis=-1)


#: The same for a decode step, recorded once: fewer operations.
places_replayed = mx.compile(places)


class Numbered(Batch):
    """A batch whose rows may be numbered anew. What the model attends to is then made of the
    rows at each step; nothing of it is held."""

    _rotation: Rotation | None = None  # known from the first block on

    def _forget_block(self) -> None:
        super()._forget_block()
        self._forget_numbers()

    def _forget_numbers(self) -> None:
        self._numbered: tuple[mx.array, mx.array] | None = None
        self._at: mx.array | None = None

    @property
    def renumbers(self) -> bool:
        return self.policy.positions != "absolute"

    @property
    def waits(self) -> bool:
        """Whether the newest block hasn't been attended to through velox."""
        return self._numbered is not None

    def before_rope(self, rotated: mx.array) -> mx.array:
        """Incoming keys or queries as they were before the model's RoPE, which is remembered."""
        call = source(rotated)
        if call is None:
            raise UnsupportedModelError(
                f"Layer {self.layer}: positions={self.policy.positions!r} needs keys and queries "
                "as they come from the layer's RoPE, and these don't: it has none, one whose "
                "rotation depends on more than the position, or it changes them afterwards. "
                "Use positions='absolute'."
            )
        self._rotation = Rotation.of(call.rope)
        return call.raw

    def keys_and_values(self) -> tuple[Any, Any]:
        """All rows in use, as the last ``update_and_fetch`` gave them."""
        return self._numbers() if self.renumbers else super().keys_and_values()

    def _numbers(self) -> tuple[mx.array, mx.array]:
        """Keys and values of all rows in use as the model attends to them, never quantised."""
        if self._numbered is None:
            keys, values = map(self._readable, super().keys_and_values())
            if not self.renumbers:
                return keys, values
            self._numbered = self._to_places(keys, self._places()), values
        return self._numbered

    def parts(
        self, queries: mx.array, keys: mx.array, mask: Any
    ) -> list[tuple[mx.array, mx.array, Any]]:
        """What to attend with, given the newest block's queries before RoPE: queries, keys and
        mask, for each part of the block that sees rows at places of its own."""
        positions = self._query_positions()[:, -self._last :]
        return [(self._turned(queries, positions), keys, mask)]

    def _readable(self, rows: Any) -> mx.array:
        """Keys or values as numbers, from the form in which they are held."""
        return rows  # type: ignore[no-any-return]

    def _places(self) -> mx.array:
        """Where the rows in use stand, ``[batch, kv_heads or 1, rows]``."""
        if self._at is None:
            assert self._positions is not None
            positions = self._positions[..., : self._rows]
            if self._tokens == self._held and not self._padded:
                self._at = positions  # nothing has gone
            else:
                find = places_replayed if self.steady else places
                self._at = find(positions, self.policy.positions, self._padded)
        return self._at

    def _turned(self, queries: mx.array, positions: mx.array) -> mx.array:
        """Queries of these positions, ``[batch or 1, n]``, at their places: the newest with the
        newest row, the others as far before it as they are."""
        at = self._places().max(axis=-1, keepdims=True)
        if positions.shape[1] > 1:
            newest = mx.array([[seen - 1] for seen in self._tokens], dtype=mx.int32)
            at = mx.maximum(at - (newest - positions)[:, None], 0)
        return self._to_places(queries, at)

    def _to_places(self, rows: mx.array, at: mx.array) -> mx.array:
        assert self._rotation is not None
        bound = min(max(self._tokens), WIDEST * self._rows)
        return self._rotation(rows, at, bound, self.steady)
