"""RoPE done again: what keys and queries were before a model rotated them, and rotating them to
another place.

A model rotates keys by their position before the cache gets them. So the RoPE modules are
watched: what one gave is known again, with what it was given. Nothing is rotated back, so nothing
is lost, however often rows move.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import attrs
import mlx.core as mx
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models import rope_utils
from mlx_lm.models.smollm3 import NoPE

#: Modules whose rotation depends on nothing but the position.
REDONE = (
    RoPE,  # plain and linearly scaled
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
    NoPE,  # some layers' stand-in, which rotates nothing
)


@attrs.frozen(eq=False)
class Rotated:
    """One call of a RoPE module."""

    result: mx.array
    raw: mx.array
    rope: Any


class _Latest(threading.local):
    """The last calls in this thread: a model rotates queries and keys just before it uses them."""

    def __init__(self) -> None:
        self.calls: deque[Rotated] = deque(maxlen=4)


_latest = _Latest()


def watch(model: Any) -> None:
    """Remember, from now on, what the RoPE modules of ``model`` were given."""
    for kind in {type(module) for module in model.modules()}.intersection(REDONE):
        _wrap(kind)


def _wrap(kind: Any) -> None:
    original = kind.__call__
    if hasattr(original, "velox_wraps"):
        return

    @functools.wraps(original)
    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        result: mx.array = original(self, x, *args, **kwargs)
        _latest.calls.append(Rotated(result, x, self))
        return result

    call.velox_wraps = original  # type: ignore[attr-defined]
    kind.__call__ = call


def source(rotated: mx.array) -> Rotated | None:
    """The call that gave this very array, which is forgotten thereby; None if there was none."""
    for call in _latest.calls:
        if call.result is rotated:
            _latest.calls.remove(call)
            return call
    return None


class Rotation:
    """A RoPE module, for rows that each have a place of their own. Modules made alike share one.

    Args:
        rope: one of the kinds in ``REDONE``.
    """

    _known: ClassVar[WeakValueDictionary[str, Rotation]] = WeakValueDictionary()

    def __init__(self, rope: Any) -> None:
        self.rope = rope
        self.dims: int = getattr(rope, "dims", getattr(rope, "dim", 0))
        self.traditional: bool = getattr(rope, "traditional", False)
        # YaRN's and long RoPE's, which is multiplied in before.
        self.scale: float = getattr(rope, "mscale", getattr(rope, "_scale", 1.0))
        self._table: mx.array | None = None  # [places, dims]: cosines, then sines
        self._replayed = mx.compile(self._by_table)

    @classmethod
    def of(cls, rope: Any) -> Rotation:
        """The rotation of a layer's module."""
        made: Rotation | None = getattr(rope, "_velox_rotation", None)
        if made is None:
            parts = {name: array.tolist() for name, array in rope.items()}
            key = f"{type(rope)} {vars(rope)} {parts}"
            made = cls._known.setdefault(key, cls(rope))
            rope._velox_rotation = made
        return made

    def __call__(
        self, rows: mx.array, places: mx.array, bound: int, steady: bool = False
    ) -> mx.array:
        """``rows`` rotated, each to its place.

        Args:
            rows: ``[batch, heads, n, head_dim]``, not rotated.
            places: ``[batch or 1, heads or a divisor of it, n]`` int32, from 0.
            bound: every place is below it.
            steady: whether such arrays come at every step, so that what is done with them is worth
                recording. (Where the compiler fuses products and sums, as GCC does on ARM, the
                last bit may then be another.)

        Returns:
            ``[batch, heads, n, head_dim]`` in the type of ``rows``.
        """
        heads = rows.shape[1]
        if not self.dims:
            return rows
        if places.shape[1] not in (1, heads):
            places = mx.repeat(places, heads // places.shape[1], axis=1)
        if mx.default_device() == mx.Device(mx.cpu):
            turn = self._replayed if steady else self._by_table
            return turn(rows, places, self._places_below(bound))
        return self._by_module(rows, places)

    def _by_module(self, rows: mx.array, places: mx.array) -> mx.array:
        """By the module itself, which takes a place for each sequence of a batch: rows are laid
        out as one."""
        batch, heads, n, dim = rows.shape
        if places.shape[1] > 1:
            places = mx.broadcast_to(places, (batch, heads, n)).reshape(-1)
            turned = self.rope(rows.reshape(-1, 1, 1, dim), offset=places)
            return turned.reshape(rows.shape)  # type: ignore[no-any-return]
        places = mx.broadcast_to(places[:, 0], (batch, n)).reshape(-1)
        by_row = rows.transpose(0, 2, 1, 3).reshape(-1, heads, 1, dim)
        turned = self.rope(by_row, offset=places).reshape(batch, n, heads, dim)
        return turned.transpose(0, 2, 1, 3)  # type: ignore[no-any-return]

    def _by_table(self, rows: mx.array, places: mx.array, table: mx.array) -> mx.array:
        """The same from a table: on the CPU MLX has no kernel for RoPE, and the functions that
        stand in for it take five times as long."""
        half = self.dims // 2
        if self.scale != 1:
            rows = rows.at[..., : self.dims].multiply(self.scale)
        table = mx.take(table, places, axis=0).astype(rows.dtype)
        cosines, sines = table[..., :half], table[..., half:]
        if self.traditional:
            first, second = rows[..., 0 : self.dims : 2], rows[..., 1 : self.dims : 2]
        else:
            first, second = rows[..., :half], rows[..., half : self.dims]
        pair = [first * cosines - second * sines, first * sines + second * cosines]
        if self.traditional:
            pair = [mx.stack(pair, axis=-1).reshape(*rows.shape[:-1], self.dims)]
        rest = [rows[..., self.dims :]] if self.dims < rows.shape[-1] else []
        return mx.concatenate([*pair, *rest], axis=-1)

    def _places_below(self, bound: int) -> mx.array:
        if self._table is None or self._table.shape[0] < bound:
            size = 1 << (bound - 1).bit_length()
            unit = mx.zeros((1, 1, 1, self.dims))
            if self.traditional:
                unit[..., ::2] = 1
            else:
                unit[..., : self.dims // 2] = 1
            units = mx.broadcast_to(unit, (1, 1, size, self.dims))
            if self.scale == 1:
                table = self.rope(units, offset=0)[0, 0]
            else:
                table = mx.fast.rope(
                    units,
                    self.dims,
                    traditional=self.traditional,
                    base=None,
                    scale=1.0,
                    offset=0,
                    freqs=self.rope._freqs,
                )[0, 0]
            if self.traditional:
                table = mx.concatenate([table[:, ::2], table[:, 1::2]], axis=-1)
            self._table = table
        return self._table

    # Copied caches and models share it.
    def __deepcopy__(self, memo: object) -> Rotation:
        return self
