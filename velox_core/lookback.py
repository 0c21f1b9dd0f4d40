"""A cache that can take back its newest tokens after their rows were chosen to go.

Speculative decoding feeds several guessed tokens at once and takes some back. Here each token of
such a block attends and evicts as if it had come alone: rows that go are only marked, and leave
for good once ``lookback`` newer tokens have come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from . import storage
from .batch import Batch
from .cache import VeloxCache
from .contents import ARRAYS
from .errors import UnobservedAttentionError, UnsupportedModelError, VeloxError
from .eviction import choose_rows, score_rows
from .policy import Policy
from .rows import LATEST, Attended, Rows, for_heads


@attrs.define(eq=False)
class Moment:
    """The cache before one of its newest tokens; arrays are as wide as the rows were then."""

    rows: int
    held: int
    positions: mx.array
    scores: mx.array | None
    window: mx.array | None
    window_positions: mx.array | None


class LookbackCache(VeloxCache):
    """A ``VeloxCache`` that evicts token by token in blocks of up to ``lookback`` tokens, and
    takes back as many exactly. It holds up to four times ``lookback`` rows more than its budget.

    Longer blocks, as of a prompt, are attended whole and cut once. One sequence, no batches.
    Reading ``state``, ``nbytes`` or ``positions`` lets marked rows go for good.
    """

    def __init__(self, policy: Policy, budget: int, layer: int = 0, lookback: int = 8) -> None:
        super().__init__(policy, budget, layer)
        self._look_back(lookback)

    def _look_back(self, lookback: int) -> None:
        self.lookback = lookback
        self._limit = self.budget + 4 * lookback
        self._past: list[Moment] = []  # before each of the newest tokens
        # Renumbered, each of its tokens has keys of its own: those, and the token's place.
        self._seen_by: list[tuple[mx.array, mx.array]] = []
        self._mask: mx.array | None = None  # what the newest block's tokens may see

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        n = keys.shape[2]
        if n > self.lookback:
            return super().update_and_fetch(keys, values)
        self._settle(next_block=n)
        if self.renumbers:
            keys = self.before_rope(keys)
        if self._rows + n > self._limit:
            self._drop_old()
        self._n_new, self._mask = n, None
        heads = keys.shape[1] if self.policy.scope == "head" else 1
        self._append(keys, values, mx.full((keys.shape[0], heads, n), -1, dtype=mx.int32))
        self.offset = self._tokens[0] + n
        if not self.policy.n_queries:
            self._walk(None)
        elif self.policy.queries == "keys":
            self.observe(Attended(keys, keys.shape[-1] ** -0.5))
        return self.keys_and_values()

    def observe(self, seen: Attended) -> None:
        if not 0 < self._n_new <= self.lookback:
            super().observe(seen)
        elif seen.keys is not None:
            raise UnobservedAttentionError(
                "This model attends with other keys than it stores (MLA), so tokens of one block "
                "can't evict one by one. Use a cache without lookback."
            )
        else:
            self._walk(seen)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size:  # what a block's tokens see is a matter of which rows are left, alone
            raise UnsupportedModelError(
                f"Layer {self.layer} attends through a sliding window. Use a cache without "
                "lookback."
            )
        return super().make_mask(N, return_array)

    def attention_mask(self, mask: Any, query_heads: int) -> Any:
        if self._mask is not None:
            return for_heads(self._mask, query_heads)
        return super().attention_mask(mask, query_heads)

    def parts(
        self, queries: mx.array, keys: mx.array, mask: Any
    ) -> list[tuple[mx.array, mx.array, Any]]:
        if self._mask is None:
            return super().parts(queries, keys, mask)
        seen_by, self._seen_by = self._seen_by, []
        return [
            (self._to_places(queries[:, :, i : i + 1], at), keys, mask[:, :, i : i + 1])
            for i, (keys, at) in enumerate(seen_by)
        ]

    # Token by token ------------------------------------------------------------------------

    def _walk(self, seen: Attended | None) -> None:
        """Take the newest block's tokens one by one: each sees what is left, then a row goes."""
        assert self._positions is not None
        first, n, masks = self._rows - self._n_new, self._n_new, []
        self._seen_by = []
        for i in range(n):
            self._past.append(self._moment(first + i))
            position = mx.full((*self._positions.shape[:2], 1), self._tokens[0], dtype=mx.int32)
            self._positions = storage.put(
                self._positions[..., : self._rows], position, mx.array([[[first + i]]])
            )
            masks.append(self._positions >= 0)
            self._tokens, self._held = [self._tokens[0] + 1], [self._held[0] + 1]
            self._n_new, self._fresh = 1, [1]
            if seen is not None:
                self._seen = attrs.evolve(seen, queries=seen.queries[:, :, i : i + 1])
            self._forget_numbers()
            rows = self._view()
            if self.renumbers:
                self._seen_by.append((rows.keys, self._places().max(axis=-1, keepdims=True)))
            self._mark_gone(rows)
        self._mask = mx.stack(masks, axis=2)
        self._forget_block()
        del self._past[: -self.lookback]

    def _mark_gone(self, rows: Rows) -> None:
        over = self._held[0] > self.budget
        if over or self.policy.every_step:
            positions = rows.positions[...]  # hooks may work in place
            scores = score_rows(self.policy, rows)
            if self.policy.every_step:
                empty = storage.like(positions < 0, scores)  # tokens to come have none
                self._scores = mx.where(empty, 0, scores)
            if over:
                # Rows marked before, and tokens to come, are empty: they go first, once more.
                gone = choose_rows(self.policy, rows, scores, self._rows - self.budget)
                marked = mx.array(-1, dtype=mx.int32)
                self._positions = mx.put_along_axis(positions, gone, marked, axis=-1)
                self._held = [self.budget]
        self._slide_window()

    # Taking back ---------------------------------------------------------------------------

    def is_trimmable(self) -> bool:
        return bool(self._past) or super().is_trimmable()

    def trim(self, n: int) -> int:
        if not 0 < n <= len(self._past):
            n = super().trim(n)
            if n:
                self._past.clear()
            return n
        moment = self._past[-n]
        del self._past[-n:]
        self._rows, self._held = moment.rows, [moment.held]
        self._positions, self._scores = moment.positions, moment.scores
        self._window, self._window_positions = moment.window, moment.window_positions
        self._tokens, self._mask = [self._tokens[0] - n], None
        self._set_offset()
        return n

    def _moment(self, rows: int) -> Moment:
        positions, scores = self._positions, self._scores
        assert positions is not None
        return Moment(
            rows=rows,
            held=self._held[0],
            positions=positions[..., :rows],
            scores=None if scores is None else scores[:, :, :rows],
            window=self._window,
            window_positions=self._window_positions,
        )

    def _settle(self, next_block: int = 0) -> None:
        super()._settle()
        if not 0 < next_block <= self.lookback:
            self._past.clear()
            self._mask = None
            self._forget_numbers()
            self._drop_empty()

    def _drop_old(self) -> None:
        """Let go for good of the rows that were marked before the oldest moment kept."""
        oldest = self._past[0]
        dead = oldest.rows - oldest.held
        places = mx.broadcast_to(mx.arange(oldest.rows), oldest.positions.shape)
        alive = mx.argsort(mx.where(oldest.positions < 0, LATEST, places), axis=-1)
        newer = mx.arange(oldest.rows, self._rows, dtype=alive.dtype)
        newer = mx.broadcast_to(newer, (*alive.shape[:2], newer.size))
        keep = mx.concatenate([alive[..., : oldest.held], newer], axis=-1)
        for name in ARRAYS[:4]:
            array = getattr(self, name)
            if array is not None:
                setattr(self, name, storage.take(array, keep))
        self._rows -= dead
        for moment in self._past:
            moment.rows -= dead
            part = keep[..., : moment.rows]
            moment.positions = storage.take(moment.positions, part)
            if moment.scores is not None:
                moment.scores = storage.take(moment.scores, part)

    # mlx-lm --------------------------------------------------------------------------------

    @property
    def state(self) -> list[Any]:
        return [*super().state, self.lookback]

    @state.setter
    def state(self, state: list[Any]) -> None:
        VeloxCache.state.fset(self, state[:-1])  # type: ignore[attr-defined]
        self._look_back(state[-1])

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> VeloxCache:
        raise VeloxError("kv_bits and lookback don't go together: make the cache without one.")

    @classmethod
    def merge(cls, caches: Sequence[Batch]) -> Batch:
        raise VeloxError("A cache with lookback is for one sequence: make it without, to batch.")


mlx_cache.LookbackCache = LookbackCache
