"""What a layer's cache shows the hooks: its rows, and the queries that attended to them."""

from __future__ import annotations

import attrs
import mlx.core as mx

from . import storage, turns
from .errors import UnobservedAttentionError
from .hooks import origin
from .rows import Attended, Rows
from .trim import Trimmable
from .weights import weights_replayed


class View(Trimmable):
    """A cache as seen by the hooks of its policy."""

    def _latest(self) -> tuple[Attended | None, mx.array]:
        """What the policy's latest queries attended with, and their positions."""
        seen, positions = self._seen, self._query_positions()
        if not self.policy.n_queries:
            return None, positions
        if seen is None:
            raise UnobservedAttentionError(
                f"{origin(self.policy)}: layer {self.layer} took in tokens, but its attention "
                "showed no query, so rows can't be scored. Use queries='keys', which takes "
                "the incoming keys in the queries' place, or a policy that needs no queries."
            )
        if (self.policy.n_queries > 1 or self._earlier) and seen.keys is not None:
            raise UnobservedAttentionError(
                f"{origin(self.policy)} looks at the last {self.policy.n_queries} queries, and "
                f"layer {self.layer} attends with other keys than it stores (MLA), so older "
                "queries can't be scored again. Use a policy that needs the last one, as TOVA."
            )
        return self._latest_queries(seen, positions)

    def _shown(self) -> tuple[Attended | None, mx.array]:
        """The same with the queries at their places."""
        seen, positions = self._latest()
        if self.renumbers and seen is not None:
            seen = attrs.evolve(seen, queries=self._turned(seen.queries, positions))
        return seen, positions

    def _view(self) -> Rows:
        """The rows in use and the latest queries, as hooks see them."""
        keys, values = self._numbers()
        assert self._positions is not None
        positions = storage.first(self._positions, self._rows)
        seen, query_positions = self._shown()
        if self._scores is None:
            scores = mx.zeros(self.policy.score_shape(positions.shape))
        else:
            scores = storage.first(self._scores, self._rows)
        return Rows(
            keys=keys,
            values=values,
            positions=positions,
            scores=scores,
            query_positions=query_positions,
            newest=storage.column(tuple([seen - 1 for seen in self._tokens]), 3)[...],
            n_new=self._n_new,
            attended=seen,
            budget=self.budget,
            layer=self.layer,
            scope=self.policy.scope,
            padded=self._padded or self._queries_missing(),
        )

    def _has_turn(self) -> bool:
        """Whether a token took another row's place, and the next row to go may be chosen along
        with other layers'."""
        return (
            self._n_new == 1
            and self._overwritten is not None
            and self._rows == self.budget + 1 == min(self._held)
            and (self._seen is not None or not self.policy.n_queries)
            and turns.possible(self.policy)
        )

    def _turn(self) -> turns.Turn:
        """This layer's turn."""
        seen, share = self._seen, self._share
        if share is None:
            positions = storage.first(self._positions, self._rows)
            share = turns.Share(positions, storage.first(self._scores, self._rows))
        heads = share.batch, self.kv_heads, self._rows
        attended = None
        if seen is not None:
            there = (each is not None for each in (seen.sinks, seen.keys, seen.bias))
            attended = seen.queries.shape, seen.softcap, *there
        return turns.Turn(
            policy=self.policy,
            budget=self.budget,
            tokens=tuple(self._tokens),
            shapes=((*heads, self.head_dim), (*heads, self.value_dim)),
            attended=attended,
            share=share,
            weights=self._newest_weights(),
        )

    def _newest_weights(self) -> mx.array | None:
        """The newest query's, from the model's attention or else worked out."""
        if self._seen is None or self._seen.weights is not None:
            return self._seen.weights if self._seen else None
        seen, _ = self._shown()
        assert seen is not None
        return weights_replayed(seen, self._numbers()[0])
