"""The KV cache that evicts: one a layer, for any policy.

A token's way: ``update_and_fetch`` settles the block before it (the policy says which rows go),
then adds the new rows and returns kept ones plus new ones. The model attends, ``observe``
remembers the queries that it did that with, and ``attended`` has the rows to go chosen, now or
(turns.py) along with other layers'. Eviction thus waits for the next block.
"""

from __future__ import annotations

import attrs
import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from . import storage, turns
from .eviction import decide, make_room, newest_unscored, score_rows
from .rows import Attended, lowest
from .view import View


class VeloxCache(View):
    """Keys and values of at most ``budget`` rows of one layer, each with its true position.

    Below the budget it gives what mlx-lm's ``KVCache`` gives, bit for bit. In a batch made by
    ``merge`` each sequence has its own offset, and rows of position -1 are empty.

    Args:
        policy: which rows matter.
        budget: rows to keep; no more are held once a step is settled.
        layer: index of the layer, told to the policy.
    """

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
        if self.renumbers:
            keys = self.before_rope(keys)
        fresh = self._real_tokens(n)
        if self._n_new:  # a block that goes on growing
            self._earlier.append(self._seen)
            self._seen = self._chosen = None
            self._forget_numbers()
        self._n_new, self._fresh = self._n_new + n, _add(self._fresh, fresh)
        if self._coming is not None:
            self._coming = [left - n for left in self._coming]
        if self._hole is None:
            self._append(keys, values, self._block_positions(keys, fresh))
        else:  # the row has its position already, unless some sequences get padding
            positions = None if min(fresh) else self._block_positions(keys, fresh)
            self._overwrite(keys, values, positions)
        self._tokens = _add(self._tokens, fresh)
        self._held = _add(self._held, fresh)
        self._set_offset()
        if self.policy.n_queries and self.policy.queries == "keys":
            self.observe(Attended(keys, keys.shape[-1] ** -0.5))
        return self.keys_and_values()

    def observe(self, seen: Attended) -> None:
        """Remember what the newest block was attended with. Where layers share this cache, the
        later ones' query heads join the first one's."""
        if self._seen is not None:
            batch, _, *block = seen.queries.shape
            heads = self.kv_heads
            groups = [x.queries.reshape(batch, heads, -1, *block) for x in (self._seen, seen)]
            queries = mx.concatenate(groups, axis=2).reshape(batch, -1, *block)
            seen = attrs.evolve(seen, queries=queries)
        self._seen, self._chosen = seen, None

    @property
    def kv_heads(self) -> int:
        return int(self.keys.shape[1])

    @property
    def head_dim(self) -> int:
        return int(self.keys.shape[3])

    @property
    def value_dim(self) -> int:
        return int(self.values.shape[3])

    # Eviction ------------------------------------------------------------------------------

    def _settle(self, next_block: int = 0) -> None:
        """Do the newest block's eviction. Where one row goes and one token comes, the row stays
        as a hole to be overwritten; otherwise the kept rows close up, in the order of time."""
        if self._n_new and not self._grows(next_block):
            chosen = self._chosen
            if isinstance(chosen, turns.Turn) and turns.choose(chosen):
                gone, self._share = chosen.gone, chosen.share
            else:
                if not isinstance(chosen, tuple):
                    chosen = self._choose()
                    self._untied = storage.arrays(*chosen)
                gone, scores, positions = chosen
                if self.policy.every_step:
                    self._scores = scores
                if positions is not None:
                    self._positions = positions
            self._slide_window()
            self._held = [min(held, self.budget) for held in self._held]
            self._forget_block()
            self._hole = gone
        if self._hole is not None and not (next_block == 1 and self._hole.shape[-1] == 1):
            self._close_up(self._hole)
            self._hole = None
        if self._hole is None:
            self._untied = []

    def _grows(self, next_block: int) -> bool:
        """Whether the next token joins the newest block, as there is ``slack`` left for it."""
        return (
            next_block == 1
            and self.budget < max(self._held) < self.budget + self.policy.slack
            and self._coming is None
            and self._overwritten is None
            and min(self._fresh) == self._n_new
            and not self._padded
        )

    @property
    def _too_many(self) -> int:
        """Rows that must go: those beyond the budget, and padding."""
        return self._rows - min(self.budget, max(self._held))

    @property
    def chooses(self) -> bool:
        """Whether hooks look at the newest block as soon as it was attended to."""
        looks = self.policy.every_step or self._too_many > 0
        waits = self.policy.slack and self._last == 1  # the next token may join this block
        return looks and not waits

    def attended(self, output: mx.array) -> mx.array:
        """The model attended to the newest block, with this output. What goes with it is chosen at
        once, or after a token along with other layers' turns, and what is worked out for that is
        evaluated with the output: left to the next step, it would still hold the weights, and the
        keys when that step writes a row among them: MLX would copy all.
        """
        seen, worked_out = self._seen, []
        if self._has_turn():
            self._chosen = turn = turns.leave(self._turn())
            if seen is not None and seen.weights is None:
                worked_out = storage.arrays(turn.weights)
        elif self._n_new and seen is not None and self.chooses:
            self._chosen = self._choose()
            worked_out = storage.arrays(*self._chosen)
        if worked_out:
            output = mx.depends([output], worked_out)[0]
        if seen is not None:
            seen.weights = None  # as large as all that the model works out for the block
        self._numbered = None  # as large as the rows themselves
        return output

    def _slide_window(self) -> None:
        """Keep the queries that ``score`` will want beside those of the next block."""
        keep = self.policy.n_queries - 1
        if keep > 0:
            seen, positions = self._latest()
            assert seen is not None
            self._window = seen.queries[..., -keep:, :]
            if self._n_new > keep:  # a slice would hold the queries of the whole block
                self._window = mx.contiguous(self._window)
            self._window_positions = positions[:, -keep:]

    def _choose(self) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
        """Indices of the rows to go, ``[batch, heads or 1, count]``, None if all may stay; the
        scores that ``every_step`` asks for; and positions, with room made if a row goes."""
        count = self._too_many
        unobserved = self.policy.n_queries and self._seen is None  # which is told at once
        if not (count or self.policy.every_step or unobserved):
            return None, None, None
        rows, remembered = self._view(), None
        stale = self.policy.every_step and self._overwritten is not None and min(self._fresh) > 0
        if max(self._held) > self.budget:
            gone, scores, positions = decide(self.policy, rows, count, stale)
            return gone, self._remembered(scores) if self.policy.every_step else None, positions
        if self.policy.every_step:
            rows = newest_unscored(rows) if stale else rows
            remembered = self._remembered(score_rows(self.policy, rows))
        if not count:
            return None, remembered, None
        empty_first = mx.zeros(rows.positions.shape)  # only padding has to go
        gone = lowest(empty_first, rows.positions, count)
        return gone, remembered, make_room(rows.positions, rows.newest, gone)

    def _remembered(self, scores: mx.array) -> mx.array:
        """The new scores; of a sequence that the block had only padding for, those it had."""
        if min(self._fresh) or self._scores is None:
            return scores
        came = mx.array(self._fresh)[:, None, None] > 0
        return mx.where(storage.like(came, scores), scores, self._scores[:, :, : self._rows])

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> VeloxCache:
        """The same cache with its rows quantised, which goes on evicting (mlx-lm's ``kv_bits``).

        Raises:
            VeloxError: the model's heads can't be cut into groups of that size.
        """
        from .quantized import QuantizedVeloxCache  # a kind of this

        return QuantizedVeloxCache.of(self, group_size, bits)


def _add(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


# mlx-lm's load_prompt_cache looks classes up there.
mlx_cache.VeloxCache = VeloxCache
