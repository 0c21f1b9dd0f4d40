"""Several sequences in one cache: mlx-lm's batching contract, padding, and masks.

Prompts of unequal length come padded on the right. A padded row has position -1, is the first to
go, and is masked until then. Sequences of unequal length stand in one array with empty rows
before the shorter ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from . import storage
from .errors import VeloxError
from .rows import lowest, visible

if TYPE_CHECKING:
    from .cache import VeloxCache


class Batching:
    """The part of ``VeloxCache`` that knows of sequences, padding and masks."""

    # Padding -------------------------------------------------------------------------------

    def prepare(
        self: VeloxCache,
        *,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce a right-padded prompt: of each sequence's coming tokens the first ``lengths``
        are real."""
        if left_padding is not None and max(left_padding) > 0:
            raise VeloxError("Prompts of unequal length must be padded on the right.")
        if right_padding is not None and lengths is not None and max(right_padding) > 0:
            self._settle()
            self._coming = list(lengths)

    def finalize(self: VeloxCache) -> None:
        """The padded prompt is over."""
        self._settle()
        self._coming = None

    def _real_tokens(self: VeloxCache, n: int) -> list[int]:
        """Of the next ``n`` tokens, how many are real, by sequence."""
        if self._coming is None:
            return [n] * len(self._tokens)
        return [min(max(left, 0), n) for left in self._coming]

    def _block_positions(self: VeloxCache, keys: mx.array) -> mx.array:
        """Positions of the new block's rows, ``[batch, kv_heads or 1, block]``."""
        heads = keys.shape[1] if self.policy.scope == "head" else 1
        positions = self._positions_from(self._tokens, self._fresh, keys.shape[2])[:, None]
        return mx.broadcast_to(positions, (keys.shape[0], heads, keys.shape[2]))

    def _query_positions(self: VeloxCache) -> mx.array:
        """Positions of the newest block's queries, ``[batch or 1, block]``."""
        pairs = zip(self._tokens, self._fresh, strict=True)
        start = [seen - fresh for seen, fresh in pairs]
        return self._positions_from(start, self._fresh, self._n_new)

    @staticmethod
    def _positions_from(start: list[int], real: list[int], n: int) -> mx.array:
        """``start`` and on, -1 after ``real`` tokens: ``[sequences, n]``."""
        positions = mx.array(start, dtype=mx.int32)[:, None] + mx.arange(n, dtype=mx.int32)
        if min(real) == n:
            return positions
        return mx.where(mx.arange(n) < mx.array(real)[:, None], positions, -1)

    def _latest_queries(
        self: VeloxCache, queries: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The window's queries and the block's, each sequence's newest last."""
        if self._window is not None and self._window_positions is not None:
            queries = mx.concatenate([self._window, queries], axis=2)
            positions = mx.concatenate([self._window_positions, positions], axis=1)
        if min(self._fresh) < self._n_new:
            padding = self._n_new - mx.array(self._fresh)[:, None]
            index = mx.arange(positions.shape[1]) - padding
            missing, index = index < 0, mx.maximum(index, 0)
            queries = mx.take_along_axis(queries, index[:, None, :, None], axis=2)
            positions = mx.where(missing, -1, mx.take_along_axis(positions, index, axis=1))
        return queries, positions

    def _queries_missing(self: VeloxCache) -> bool:
        window = 0 if self._window is None else self._window.shape[2]
        older = [seen - fresh for seen, fresh in zip(self._tokens, self._fresh, strict=True)]
        return min(self._fresh) < self._n_new or min(older) < window

    # Masks ---------------------------------------------------------------------------------

    def make_mask(
        self: VeloxCache, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask for a coming block of ``N`` tokens; mlx-lm asks before ``update_and_fetch``."""
        self._settle(next_block=N)
        fresh = self._real_tokens(N)
        rows = self._rows if self._hole is not None else self._rows + N
        padded = min(map(int.__add__, self._held, fresh)) < rows
        if self._positions is None or not (padded or window_size or return_array):
            if not (padded or window_size or return_array):
                return None if N == 1 else "causal"
        queries = self._positions_from(self._tokens, fresh, N)
        if self._positions is None:
            positions = queries[:, None]
        else:
            old = self._positions[..., : self._rows]
            new = mx.broadcast_to(queries[:, None], (*old.shape[:2], N))
            if self._hole is not None:
                positions = storage.put(old, new, self._hole)
            else:
                positions = mx.concatenate([old, new], axis=2)
        return visible(positions, queries, padding_sees_all=True, window=window_size)

    def attention_mask(
        self: VeloxCache, mask: mx.array | str | None, query_heads: int
    ) -> mx.array | str | None:
        """The mask that the newest block attends with, given the one that the model would use.

        A model makes one mask for all layers; where it can't fit this one (its rows are padded,
        or more or fewer than another layer's), the mask is made anew from the rows themselves.
        """
        if self._positions is None:
            return mask
        padded = min(self._held) < self._rows
        misfit = isinstance(mask, mx.array) and mask.shape[-1] != self._rows
        if padded or misfit:
            positions = self._positions[..., : self._rows]
            mask = visible(positions, self._query_positions(), padding_sees_all=True)
        if isinstance(mask, mx.array) and mask.ndim == 4 and 1 < mask.shape[1] < query_heads:
            mask = mx.repeat(mask, query_heads // mask.shape[1], axis=1)
        return mask

    # Sequences -----------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[VeloxCache]) -> VeloxCache:
        """One cache with the sequences of all, in order; they may be of unequal length."""
        first = caches[0]
        merged = type(first)(first.policy, first.budget, first.layer)
        merged._merged = True
        merged._stack(caches)
        return merged

    def extend(self: VeloxCache, other: VeloxCache) -> None:
        """Add the other cache's sequences after this one's."""
        self._stack([self, other])

    def _stack(self: VeloxCache, caches: Sequence[VeloxCache]) -> None:
        for cache in caches:
            if cache.policy.options() != self.policy.options() or cache.budget != self.budget:
                raise VeloxError(
                    f"A batch has one policy and one budget a layer; these caches have "
                    f"{self.policy!r} and {cache.policy!r}."
                )
            cache._settle()
        rows = max(cache._rows for cache in caches)
        full = [cache for cache in caches if cache.keys is not None]

        def stacked(name: str, fill: int = 0, axis: int = 2) -> mx.array | None:
            arrays = [getattr(cache, name) for cache in caches]
            models = [array for array in arrays if array is not None]
            if not models:
                return None
            parts, most = [], max(array.shape[axis] for array in models)
            most = rows if axis == 2 and name != "_window" else most
            for cache, array in zip(caches, arrays, strict=True):
                if array is None:
                    shape = list(models[0].shape)
                    shape[0], shape[axis] = len(cache._tokens), 0
                    array = mx.zeros(shape, models[0].dtype)
                elif name in ("keys", "values", "_positions", "_scores"):
                    array = array[:, :, : cache._rows]
                parts.append(storage.pad_left(array, most, axis, fill))
            return mx.concatenate(parts, axis=0)

        tokens = [n for cache in caches for n in cache._tokens * cache._copies()]
        held = [n for cache in caches for n in cache._held * cache._copies()]
        arrays = {name: stacked(name) for name in ("keys", "values", "_scores", "_window")}
        arrays["_positions"] = stacked("_positions", -1)
        arrays["_window_positions"] = stacked("_window_positions", -1, axis=1)
        for name, array in arrays.items():
            setattr(self, name, array)
        self._rows = rows if full else 0
        self._tokens, self._held, self._coming = tokens, held, None
        self._set_offset()
        self._forget_block()

    def filter(self: VeloxCache, batch_indices: Any) -> None:
        """Keep only these sequences."""
        self._settle()
        wanted = [int(i) for i in batch_indices]
        index = mx.array(wanted)
        for name in ("keys", "values", "_positions", "_scores", "_window", "_window_positions"):
            array = getattr(self, name)
            if array is not None:
                setattr(self, name, array[index])
        self._tokens = [self._tokens[i] for i in wanted]
        self._held = [self._held[i] for i in wanted]
        if self._coming is not None:
            self._coming = [self._coming[i] for i in wanted]
        self._set_offset()
        self._forget_block()
        self._drop_padding()

    def _drop_padding(self: VeloxCache) -> None:
        """Let go of rows that are empty in every sequence."""
        count = self._rows - max(self._held)
        if count and self._positions is not None:
            positions = self._positions[..., : self._rows]
            self._close_up(lowest(mx.zeros(positions.shape), positions, count))

    def extract(self: VeloxCache, idx: int) -> VeloxCache:
        """One sequence as a cache of its own, as if it had been alone."""
        self._settle()
        alone = type(self)(self.policy, self.budget, self.layer)
        alone._merged = True
        for name in ("keys", "values", "_positions", "_scores", "_window", "_window_positions"):
            array = getattr(self, name)
            setattr(alone, name, None if array is None else array[idx : idx + 1])
        alone._rows = self._rows
        alone._tokens, alone._held = [self._tokens[idx]], [self._held[idx]]
        alone._forget_block()
        alone._drop_padding()
        if alone._window is not None and alone._window_positions is not None:
            real = min(alone._window.shape[2], alone._tokens[0])
            alone._window = alone._window[:, :, alone._window.shape[2] - real :]
            alone._window_positions = alone._window_positions[:, -real:] if real else None
        alone._merged = False
        alone._set_offset()
        return alone
