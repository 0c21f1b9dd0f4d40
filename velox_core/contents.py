"""What a layer's cache holds: rows, their positions, and what is counted about them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from . import storage
from .description import describe, restore
from .policy import Policy
from .rows import LATEST, Attended
from .turns import Share, Turn

#: Attributes that are arrays with the sequences on their first axis.
ARRAYS = ("keys", "values", "_positions", "_scores", "_window", "_window_positions")


class Contents(mlx_cache._BaseCache):  # type: ignore[misc]
    """The rows of one layer, and how they are added, overwritten and closed up."""

    def __init__(self, policy: Policy, budget: int, layer: int = 0) -> None:
        self.policy = policy
        self.budget = budget
        self.layer = layer
        #: True position of the next token: an int, or ``[batch]`` in a merged batch.
        self.offset: int | mx.array = 0
        self.keys: Any = None  # [batch, kv_heads, capacity, head_dim]
        self.values: Any = None
        self._share: Share | None = None  # what stands for the next two while it is there
        self._own_positions: mx.array | None = None
        self._own_scores: mx.array | None = None
        self._window: mx.array | None = None  # the latest queries before the newest block
        self._window_positions: mx.array | None = None
        self._rows = 0  # rows in use of the capacity
        self._limit = budget + 1 + policy.slack  # the capacity that decoding needs
        self._tokens = [0]  # tokens seen, by sequence (a single number unless merged)
        self._held = [0]  # rows that aren't empty, by sequence
        self._merged = False
        self._coming: list[int] | None = None  # real tokens to come of a right-padded prompt
        self._hole: mx.array | None = None  # [batch, heads or 1, n]: rows chosen to go
        self._untied: list[mx.array] = []  # what nothing that the model asks for will evaluate
        self._forget_block()

    def _forget_block(self) -> None:
        self._n_new = 0  # rows of the newest block, padding counted; 0 once it is settled
        self._fresh = [0] * len(self._tokens)  # its real tokens, by sequence
        self._overwritten: mx.array | None = None  # where its row went, if into a hole
        self._last = 0  # rows that came with the last call: all of the block, unless it grows
        self._seen: Attended | None = None  # what the model attended to them with
        self._earlier: list[Attended | None] = []  # and to those before them, of a block that grew
        self._chosen: Turn | tuple[Any, Any, Any] | None = None  # what goes, where known already

    @property
    def _positions(self) -> mx.array | None:
        """``[batch, kv_heads or 1, capacity]`` int32; -1 is empty."""
        return self._own_positions if self._share is None else self._share.positions

    @_positions.setter
    def _positions(self, positions: mx.array | None) -> None:
        self._take_share()
        self._own_positions = positions

    @property
    def _scores(self) -> mx.array | None:
        """As ``score`` gives them, if the policy has ``every_step``."""
        return self._own_scores if self._share is None else self._share.scores

    @_scores.setter
    def _scores(self, scores: mx.array | None) -> None:
        self._take_share()
        self._own_scores = scores

    def _take_share(self) -> None:
        if self._share is not None:
            share, self._share = self._share, None
            self._own_positions, self._own_scores = share.positions, share.scores

    def _settle(self, next_block: int = 0) -> None:
        raise NotImplementedError  # the cache's

    @property
    def _padded(self) -> bool:
        """Whether some of the rows in use are empty."""
        return min(self._held) < self._rows

    # Rows ------------------------------------------------------------------------------------

    def keys_and_values(self) -> tuple[Any, Any]:
        """All rows in use, as the last ``update_and_fetch`` gave them."""
        return storage.first(self.keys, self._rows), storage.first(self.values, self._rows)

    def _stored(self, rows: mx.array) -> Any:
        """Keys or values in the form in which they are held."""
        return rows

    def _append(self, keys: mx.array, values: mx.array, positions: mx.array) -> None:
        start, limit = self._rows, self._limit
        self._last = positions.shape[-1]
        self._rows += self._last
        self._positions = storage.write(self._positions, positions, start, limit)
        if self.policy.every_step:
            nothing = mx.zeros(self.policy.score_shape(positions.shape))
            self._scores = storage.write(self._scores, nothing, start, limit)
        self.keys, self.values = storage.tie(
            storage.write(self.keys, self._stored(keys), start, limit),
            storage.write(self.values, self._stored(values), start, limit),
            [self._positions, self._scores, self._window, self._window_positions],
        )

    def _overwrite(self, keys: mx.array, values: mx.array, positions: mx.array | None) -> None:
        hole = self._hole
        assert hole is not None
        if positions is not None:
            self._positions = storage.put(self._positions, positions, hole)
            if self._scores is not None:
                nothing = mx.zeros(self.policy.score_shape(positions.shape))
                self._scores = storage.put(self._scores, nothing, hole)
            self._untied = storage.arrays(*self._untied, self._positions, self._scores)
        row = self._stored(keys), self._stored(values)
        beside = storage.arrays(*self._untied, self._window, self._window_positions)
        self.keys, self.values = storage.put_both((self.keys, self.values), row, hole, beside)
        self._untied = []
        self._overwritten, self._hole, self._last = hole, None, 1

    def _close_up(self, gone: mx.array) -> None:
        """Let the rows ``gone``, ``[batch, heads or 1, count]``, go; the others close up in the
        order of time."""
        assert self._positions is not None
        positions = self._positions[..., : self._rows]
        self._rows -= gone.shape[-1]
        stays_last = mx.put_along_axis(positions, gone, mx.array(LATEST), axis=-1)
        keep = mx.argsort(stays_last, axis=-1)[..., : self._rows]
        self._positions = storage.take(positions, keep)
        self.keys = storage.take(self.keys, keep)
        self.values = storage.take(self.values, keep)
        if self._scores is not None:
            self._scores = storage.take(self._scores, keep)

    # What it holds ---------------------------------------------------------------------------

    def __repr__(self) -> str:
        seen = ", ".join(f"{n:,}" for n in self._tokens)
        what = f"budget={self.budget}, tokens={seen}, policy={self.policy}"
        return f"<{type(self).__name__} of layer {self.layer}: {what}>"

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
        held = storage.arrays(*(getattr(self, name) for name in ARRAYS))
        return sum(array.nbytes for array in held)

    kept_bytes = nbytes

    @property
    def tokens_seen(self) -> int:
        return sum(self._tokens) * self._copies()

    @property
    def tokens_kept(self) -> int:
        return sum(min(held, self.budget) for held in self._held) * self._copies()

    @property
    def full_bytes(self) -> int:
        """Bytes of keys and values, were nothing evicted; room is made in steps of 256 rows, as
        in mlx-lm's ``KVCache``."""
        if self._positions is None:
            return 0
        held = storage.arrays(self.keys, self.values)
        row = sum(array.nbytes for array in held) // (held[0].shape[0] * held[0].shape[2])
        steps = sum(-(-seen // storage.STEP) for seen in self._tokens) * self._copies()
        return row * steps * storage.STEP

    @property
    def compression_ratio(self) -> float:
        return self.full_bytes / self.nbytes if self.nbytes else 1.0

    def _copies(self) -> int:
        """Sequences that each number in ``_tokens`` speaks for."""
        return 1 if self._positions is None else self._positions.shape[0] // len(self._tokens)

    @property
    def state(self) -> list[Any]:
        """All that makes the cache, for mlx-lm to evaluate, save and restore."""
        self._settle()
        kept = [storage.first(getattr(self, name), self._rows) for name in ARRAYS[:4]]
        window = [self._window, self._window_positions]
        numbers = [self._tokens, self._held, self._coming, self._merged, self.budget, self.layer]
        return [*kept, *window, *numbers, describe(self.policy)]

    @state.setter
    def state(self, state: list[Any]) -> None:
        Contents.__init__(self, restore(state[12]), budget=state[10], layer=state[11])
        self.keys, self.values, self._positions, self._scores = state[:4]
        self._window, self._window_positions = state[4:6]
        self._tokens, self._held, self._coming, self._merged = state[6:10]
        self._rows = 0 if self._positions is None else self._positions.shape[2]
        self._set_offset()
        self._forget_block()
