"""Several sequences in one cache: mlx-lm's batching contract, padding, and masks.

Prompts of unequal length come padded on the right. A padded row has position -1, is the first to
go, and is masked until then. Sequences of unequal length stand in one array with empty rows
before the shorter ones.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models import base as mlx_base

from . import storage
from .contents import ARRAYS, Contents
from .errors import UnsupportedModelError, VeloxError
from .rows import Attended, for_heads, is_bias, lowest, visible


class Batch(Contents):
    """Contents that may be of several sequences, with their padding and masks."""

    # Padding -------------------------------------------------------------------------------

    def prepare(
        self,
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

    def finalize(self) -> None:
        """The padded prompt is over."""
        self._settle()
        self._coming = None

    def _real_tokens(self, n: int) -> list[int]:
        """Of the next ``n`` tokens, how many are real, by sequence."""
        if self._coming is None:
            return [n] * len(self._tokens)
        return [min(max(left, 0), n) for left in self._coming]

    def _block_positions(self, keys: mx.array, fresh: list[int]) -> mx.array:
        """Positions of the new block's rows, ``[batch, kv_heads or 1, block]``."""
        heads = keys.shape[1] if self.policy.scope == "head" else 1
        shape = (keys.shape[0], heads, keys.shape[2])
        positions = self._positions_from(self._tokens, fresh, shape[2])[:, None]
        return positions if positions.shape == shape else mx.broadcast_to(positions, shape)

    def _query_positions(self) -> mx.array:
        """Positions of the newest block's queries, ``[batch or 1, block]``."""
        pairs = zip(self._tokens, self._fresh, strict=True)
        start = [seen - fresh for seen, fresh in pairs]
        return self._positions_from(start, self._fresh, self._n_new)

    @staticmethod
    def _positions_from(start: list[int], real: list[int], n: int) -> mx.array:
        """``start`` and on, -1 after ``real`` tokens: ``[sequences, n]``."""
        if n == 1 and min(real):
            return storage.column(tuple(start), 2)[...]
        positions = mx.array(start, dtype=mx.int32)[:, None] + mx.arange(n, dtype=mx.int32)
        if min(real) == n:
            return positions
        return mx.where(mx.arange(n) < mx.array(real)[:, None], positions, -1)

    def _latest_queries(self, seen: Attended, positions: mx.array) -> tuple[Attended, mx.array]:
        """The window's queries and the block's, each sequence's newest last."""
        queries, bias = seen.queries, seen.bias
        if self._earlier:
            before = [each.queries for each in self._earlier if each is not None]
            queries = mx.concatenate([*before, queries], axis=2)
        if self._window is not None and self._window_positions is not None:
            queries = mx.concatenate([self._window, queries], axis=2)
            positions = mx.concatenate([self._window_positions, positions], axis=1)
        if min(self._fresh) < self._n_new:
            padding = self._n_new - mx.array(self._fresh)[:, None]
            index = mx.arange(positions.shape[1]) - padding
            missing, index = index < 0, mx.maximum(index, 0)
            queries = mx.take_along_axis(queries, index[:, None, :, None], axis=2)
            if bias is not None:
                bias = mx.take_along_axis(bias, index[:, None, :, None], axis=2)
            positions = mx.where(missing, -1, mx.take_along_axis(positions, index, axis=1))
        if queries is not seen.queries:
            seen = attrs.evolve(seen, queries=queries, bias=bias)
        return seen, positions

    def _queries_missing(self) -> bool:
        if min(self._fresh) < self._n_new:
            return True
        if self._window is None:
            return False
        older = [seen - fresh for seen, fresh in zip(self._tokens, self._fresh, strict=True)]
        return min(older) < self._window.shape[2]

    # Masks ---------------------------------------------------------------------------------

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask for a coming block of ``N`` tokens; mlx-lm asks before ``update_and_fetch``."""
        self._settle(next_block=N)
        fresh = self._real_tokens(N)
        rows = self._rows if self._hole is not None else self._rows + N
        padded = min(map(int.__add__, self._held, fresh)) < rows
        if not (padded or window_size or return_array):
            return None if N == 1 else "causal"
        if not (padded or window_size):
            return mlx_base.create_causal_mask(N, self._rows if N > 1 else rows - 1)
        if window_size and self._tokens != self._held:
            raise UnsupportedModelError(
                f"Layer {self.layer} attends through a sliding window over a cache that evicts; "
                "one mask serves all such layers, and each keeps other rows."
            )
        queries = self._positions_from(self._tokens, fresh, N)
        positions = queries[:, None]
        if self._positions is not None:
            old = self._positions[..., : self._rows]
            new = mx.broadcast_to(positions, (*old.shape[:2], N))
            if self._hole is None:
                positions = mx.concatenate([old, new], axis=2)
            else:
                positions = storage.put(old, new, self._hole)
        return visible(positions, queries, padding_sees_all=True, window=window_size)

    @property
    def steady(self) -> bool:
        """Whether one token came, and rows have gone, and none of those held is empty."""
        return self._last == 1 and not self._padded and max(self._tokens) > self._rows

    def attention_mask(self, mask: mx.array | str | None, query_heads: int) -> Any:
        """The mask that the newest block attends with, given the one that the model would use.

        A model makes one mask for all layers; where it can't fit this one (its rows are padded,
        or more or fewer than another layer's), the mask is made anew from the rows themselves.
        """
        misfit = isinstance(mask, mx.array) and mask.shape[-1] != self._rows
        if (misfit or self._padded) and not is_bias(mask) and self._positions is not None:
            positions = self._positions[..., : self._rows]
            queries = self._query_positions()[:, -self._last :]
            mask = visible(positions, queries, padding_sees_all=True)
            mask = for_heads(mask, query_heads)
        return mask

    # Sequences -----------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[Batch]) -> Batch:
        """One cache with the sequences of all, in order; they may be of unequal length."""
        first = caches[0]
        merged = type(first)(first.policy, first.budget, first.layer)
        merged._stack(caches)
        return merged

    def extend(self, other: Batch) -> None:
        """Add the other cache's sequences after this one's."""
        self._stack([self, other])

    def _stack(self, caches: Sequence[Batch]) -> None:
        for cache in caches:
            if not cache.policy.chooses_as(self.policy) or cache.budget != self.budget:
                ours, theirs = (
                    f"{c.policy!r} with {c.budget} rows and protect={list(c.policy.extras)}"
                    for c in (self, cache)
                )
                raise VeloxError(
                    "A batch has one policy, with the same protectors, and one budget a layer; "
                    f"these caches have {ours} and {theirs}."
                )
            cache._settle()
        tokens = [n for cache in caches for n in cache._tokens * cache._copies()]
        held = [n for cache in caches for n in cache._held * cache._copies()]
        stacked = {name: self._stacked(name, caches) for name in ARRAYS}
        self._rows = max(cache._rows for cache in caches)
        for name, array in stacked.items():
            setattr(self, name, array)
        self._merged = True
        self._tokens, self._held, self._coming = tokens, held, None
        self._set_offset()
        self._forget_block()

    @staticmethod
    def _stacked(name: str, caches: Sequence[Batch]) -> mx.array | None:
        """The caches' arrays of that name, one after the other, the shorter ones padded."""
        arrays = [getattr(cache, name) for cache in caches]
        like = next((array for array in arrays if array is not None), None)
        if like is None:
            return None
        axis = 1 if name == "_window_positions" else 2
        fill = -1 if name.endswith("positions") else 0
        for i, cache in enumerate(caches):
            if arrays[i] is None:
                shape = [len(cache._tokens), *like.shape[1:]]
                shape[axis] = 0
                arrays[i] = mx.zeros(shape, like.dtype)
            elif not name.startswith("_window"):
                arrays[i] = arrays[i][:, :, : cache._rows]
        size = max(array.shape[axis] for array in arrays)
        return mx.concatenate([storage.pad_left(array, size, axis, fill) for array in arrays])

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep only these sequences."""
        self._settle()
        self._select([int(i) for i in batch_indices])
        self._set_offset()

    def extract(self, idx: int) -> Batch:
        """One sequence as a cache of its own, as if it had been alone."""
        self._settle()
        alone = copy.copy(self)
        alone._select([idx])
        if alone._window is not None and alone._window_positions is not None:
            missing = max(0, alone._window.shape[2] - alone._tokens[0])
            alone._window = alone._window[:, :, missing:]
            alone._window_positions = alone._window_positions[:, missing:]
        alone._merged, alone._coming = False, None
        alone._set_offset()
        return alone

    def _select(self, sequences: list[int]) -> None:
        """Keep these sequences, and of the rows those that one of them needs."""
        index = mx.array(sequences)
        for name in ARRAYS:
            array = getattr(self, name)
            setattr(self, name, None if array is None else storage.select(array, index))
        self._tokens = [self._tokens[i] for i in sequences]
        self._held = [self._held[i] for i in sequences]
        if self._coming is not None:
            self._coming = [self._coming[i] for i in sequences]
        self._forget_block()
        self._drop_empty()

    def _drop_empty(self) -> None:
        """Let rows go that are empty in every sequence."""
        count = self._rows - max(self._held)
        if count and self._positions is not None:
            positions = self._positions[..., : self._rows]
            self._close_up(lowest(mx.zeros(positions.shape), positions, count))
