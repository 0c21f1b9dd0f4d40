"""The KV cache that evicts: one a layer, for any policy.

A token's way: ``update_and_fetch`` settles the block before it (the policy says which rows go),
then adds the new rows and returns kept ones plus new ones. The model attends, and ``observe``
remembers the queries that it did that with. Eviction thus waits for the next block.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from . import storage
from .batch import Batching
from .errors import UnobservedAttentionError
from .eviction import choose_rows, score_rows
from .hooks import origin
from .policy import Policy
from .rows import Rows, lowest
from .saving import describe, restore

_LATEST = 2**31 - 1


class VeloxCache(Batching, mlx_cache._BaseCache):  # type: ignore[misc]
    """Keys and values of at most ``budget`` rows of one layer, each with its true position.

    Below the budget it gives what mlx-lm's ``KVCache`` gives, bit for bit. In a batch made by
    ``merge`` each sequence has its own offset, and rows of position -1 are empty.

    Args:
        policy: which rows matter.
        budget: rows to keep; no more are held once a step is settled.
        layer: index of the layer, told to the policy.
    """

    def __init__(self, policy: Policy, budget: int, layer: int = 0) -> None:
        self.policy = policy
        self.budget = budget
        self.layer = layer
        #: True position of the next token: an int, or ``[batch]`` in a merged batch.
        self.offset: int | mx.array = 0
        self.keys: mx.array | None = None  # [batch, kv_heads, capacity, head_dim]
        self.values: mx.array | None = None
        self._positions: mx.array | None = None  # [batch, kv_heads or 1, capacity]; -1 is empty
        self._scores: mx.array | None = None  # the same shape; None unless policy.every_step
        self._window: mx.array | None = None  # the latest queries before the newest block
        self._window_positions: mx.array | None = None
        self._rows = 0  # rows in use of the capacity
        self._tokens = [0]  # tokens seen, by sequence (a single number unless merged)
        self._held = [0]  # rows that aren't empty, by sequence
        self._merged = False
        self._coming: list[int] | None = None  # real tokens to come of a right-padded prompt
        self._hole: mx.array | None = None  # [batch, heads or 1, n]: rows chosen to go
        self._forget_block()

    def _forget_block(self) -> None:
        self._n_new = 0  # rows of the newest block, padding counted; 0 once it is settled
        self._fresh = [0] * len(self._tokens)  # its real tokens, by sequence
        self._overwritten: mx.array | None = None  # where its row went, if into a hole
        self._queries: mx.array | None = None
        self._scale = 1.0
        self._sinks: mx.array | None = None

    # A step --------------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add a block of rows and give all rows that it attends to.

        Args:
            keys: ``[batch, kv_heads, block, head_dim]``, RoPE applied.
            values: ``[batch, kv_heads, block, value_dim]``

        Returns:
            Kept rows, then the block in order; a single token's row may stand anywhere.
        """
        n = keys.shape[2]
        self._settle(next_block=n)
        self._n_new, self._fresh = n, self._real_tokens(n)
        positions = self._block_positions(keys)
        if self._coming is not None:
            self._coming = [left - n for left in self._coming]
        if self._hole is None:
            self._append(keys, values, positions)
        else:
            self._overwrite(keys, values, positions)
        self._tokens = _add(self._tokens, self._fresh)
        self._held = _add(self._held, self._fresh)
        self._set_offset()
        if self.policy.n_queries and self.policy.queries == "keys":
            self.observe(keys, keys.shape[-1] ** -0.5)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows in use, as the last ``update_and_fetch`` gave them."""
        assert self.keys is not None
        assert self.values is not None
        if self._rows < self.keys.shape[2]:
            return self.keys[..., : self._rows, :], self.values[..., : self._rows, :]
        return self.keys, self.values

    def observe(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        """Remember the newest block's queries, ``[batch, query_heads, block, head_dim]``."""
        self._queries, self._scale, self._sinks = queries, scale, sinks

    def _append(self, keys: mx.array, values: mx.array, positions: mx.array) -> None:
        start, limit = self._rows, self.budget + 1  # decoding holds one row above the budget
        self._rows += self._n_new
        self._positions = storage.write(self._positions, positions, start, limit)
        beside = [self._positions, self._window, self._window_positions]
        if self.policy.every_step:
            nothing = mx.zeros(positions.shape, mx.float32)
            self._scores = storage.write(self._scores, nothing, start, limit)
            beside.append(self._scores)
        # What isn't needed before rows go is evaluated along with the keys all the same: its
        # graph would grow with every token.
        self.keys, self.values = mx.depends(
            [
                storage.write(self.keys, keys, start, limit),
                storage.write(self.values, values, start, limit),
            ],
            [array for array in beside if array is not None],
        )

    def _overwrite(self, keys: mx.array, values: mx.array, positions: mx.array) -> None:
        hole = self._hole
        assert hole is not None
        self.keys = storage.put(self.keys, keys, hole)
        self.values = storage.put(self.values, values, hole)
        self._positions = storage.put(self._positions, positions, hole)
        if self.policy.every_step:
            nothing = mx.zeros(positions.shape, mx.float32)
            self._scores = storage.put(self._scores, nothing, hole)
        self._overwritten, self._hole = hole, None

    # Eviction ------------------------------------------------------------------------------

    def _settle(self, next_block: int = 0) -> None:
        """Do the newest block's eviction. Where one row goes and one token comes, the row stays
        as a hole to be overwritten; otherwise the kept rows close up, in the order of time."""
        if self._n_new:
            rows = self._view()
            gone = self._choose(rows)
            if self.policy.n_queries > 1 and rows.queries is not None:
                keep = self.policy.n_queries - 1
                self._window = rows.queries[..., -keep:, :]
                self._window_positions = rows.query_positions[:, -keep:]
            self._held = [min(held, self.budget) for held in self._held]
            self._forget_block()
            self._hole = gone
        if self._hole is not None and not (next_block == 1 and self._hole.shape[-1] == 1):
            self._close_up(self._hole)
            self._hole = None

    def _choose(self, rows: Rows) -> mx.array | None:
        """Indices of the rows to go, ``[batch, heads or 1, count]``; None if all may stay."""
        over = max(self._held) > self.budget
        scores = None
        if over or self.policy.every_step:
            scores = score_rows(self.policy, rows)
            if self.policy.every_step:
                self._scores = scores
        count = self._rows - min(self.budget, max(self._held))
        if not count:
            return None
        if scores is None or not over:  # only padding has to go
            return lowest(mx.zeros(rows.positions.shape), rows.positions, count)
        return choose_rows(self.policy, rows, scores, count)

    def _close_up(self, gone: mx.array) -> None:
        assert self._positions is not None
        positions = self._positions[..., : self._rows]
        self._rows -= gone.shape[-1]
        stays_last = mx.put_along_axis(positions, gone, mx.array(_LATEST), axis=-1)
        keep = mx.argsort(stays_last, axis=-1)[..., : self._rows]
        self._positions = storage.take(positions, keep)
        self.keys = storage.take(self.keys, keep)
        self.values = storage.take(self.values, keep)
        if self._scores is not None:
            self._scores = storage.take(self._scores, keep)

    def _view(self) -> Rows:
        """The rows in use and the latest queries, as hooks see them."""
        keys, values = self.keys_and_values()
        assert self._positions is not None
        positions = self._positions[..., : self._rows]
        queries, query_positions = None, self._query_positions()
        if self.policy.n_queries:
            if self._queries is None:
                raise UnobservedAttentionError(
                    f"{origin(self.policy)}: layer {self.layer} took in tokens, but its attention "
                    "showed no query, so rows can't be scored. Use queries='keys', which takes "
                    "the incoming keys in the queries' place, or a policy that needs no queries."
                )
            queries, query_positions = self._latest_queries(self._queries, query_positions)
        scores = self._scores
        return Rows(
            keys=keys,
            values=values,
            positions=positions,
            scores=mx.zeros(positions.shape) if scores is None else scores[..., : self._rows],
            queries=queries,
            query_positions=query_positions,
            newest=mx.array(self._tokens, dtype=mx.int32)[:, None, None] - 1,
            n_new=self._n_new,
            scale=self._scale,
            sinks=self._sinks,
            budget=self.budget,
            layer=self.layer,
            scope=self.policy.scope,
            padded=min(self._held) < self._rows or self._queries_missing(),
        )

    # Taking back ---------------------------------------------------------------------------

    def is_trimmable(self) -> bool:
        """Whether the newest tokens can be taken back exactly: those of the newest block while
        its eviction waits, or any while nothing was evicted and the policy has no memory."""
        return self._untouched() or 0 < self._n_new == min(self._fresh)

    def trim(self, n: int) -> int:
        """Take back the newest ``n`` tokens.

        Returns:
            How many were taken back: ``n`` (or all there are), or 0 where that can't be exact.
        """
        n = min(n, *self._tokens)
        if n <= 0 or not (self._untouched() or n <= min(self._fresh) == self._n_new):
            return 0
        if self._overwritten is not None and n == self._n_new:
            self._hole = self._overwritten
        else:
            self._rows -= n
        self._tokens = [seen - n for seen in self._tokens]
        self._held = [held - n for held in self._held]
        self._set_offset()
        if n >= self._n_new:
            self._forget_block()
        else:
            self._n_new -= n
            self._fresh = [fresh - n for fresh in self._fresh]
            if self._queries is not None:
                self._queries = self._queries[..., :-n, :]
        return n

    def _untouched(self) -> bool:
        remembers = self.policy.every_step or self.policy.n_queries > 1
        evicted = self._tokens != self._held
        return not (remembers or evicted or self._coming or self._hole is not None)

    # What it holds -------------------------------------------------------------------------

    def _set_offset(self) -> None:
        self.offset = mx.array(self._tokens) if self._merged else self._tokens[0]

    def empty(self) -> bool:
        return self.keys is None

    def size(self) -> int:
        """Rows held, in the longest sequence."""
        return min(self.budget, max(self._held))

    @property
    def positions(self) -> mx.array | None:
        """True positions of the kept rows, ``[batch, kv_heads or 1, rows]``; -1 is empty."""
        self._settle()
        return None if self._positions is None else self._positions[..., : self._rows]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held: keys, values, and what goes with them."""
        self._settle()
        arrays = (self.keys, self.values, self._positions, self._scores)
        arrays += (self._window, self._window_positions)
        return sum(array.nbytes for array in arrays if array is not None)

    kept_bytes = nbytes

    @property
    def tokens_seen(self) -> int:
        return sum(self._tokens) * self._copies()

    @property
    def tokens_kept(self) -> int:
        return sum(min(held, self.budget) for held in self._held) * self._copies()

    @property
    def full_bytes(self) -> int:
        """Bytes of keys and values, were nothing evicted."""
        if self.keys is None or self.values is None:
            return 0
        rows = self.keys.shape[0] * self.keys.shape[2]
        return (self.keys.nbytes + self.values.nbytes) // rows * self.tokens_seen

    @property
    def compression_ratio(self) -> float:
        return self.full_bytes / self.nbytes if self.nbytes else 1.0

    def _copies(self) -> int:
        """Sequences that each number in ``_tokens`` speaks for."""
        return 1 if self.keys is None else self.keys.shape[0] // len(self._tokens)

    @property
    def state(self) -> list[Any]:
        """All that makes the cache, for mlx-lm to evaluate, save and restore."""
        self._settle()
        kept = [self.keys, self.values, self._positions, self._scores]
        kept = [None if array is None else array[:, :, : self._rows] for array in kept]
        window = [self._window, self._window_positions]
        numbers = [self._tokens, self._held, self._coming, self._merged, self.budget, self.layer]
        return [*kept, *window, *numbers, describe(self.policy)]

    @state.setter
    def state(self, state: list[Any]) -> None:
        self.__init__(restore(state[-1]), state[10], state[11])  # type: ignore[misc]
        self.keys, self.values, self._positions, self._scores = state[:4]
        self._window, self._window_positions = state[4:6]
        self._tokens, self._held, self._coming, self._merged = state[6:10]
        self._rows = 0 if self.keys is None else self.keys.shape[2]
        self._set_offset()
        self._forget_block()


def _add(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


# mlx-lm's load_prompt_cache looks classes up there.
mlx_cache.VeloxCache = VeloxCache
