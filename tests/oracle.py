"""Eviction in plain NumPy, row by row, written from the papers and not from velox_core.

An ``Oracle`` is one layer and one sequence. It never forgets a key: what it drops it only takes
off its list of positions, so that its answers are easy to believe. Feed it the queries, keys and
values of block after block; it gives the attention's output for each token and, in
``positions``, what is kept.
"""

from collections.abc import Callable

import numpy as np

Score = Callable[["Oracle"], np.ndarray]


class Oracle:
    """One layer's rows of one sequence.

    Args:
        budget: rows kept after each block.
        score: given this object, once a block was attended to and before any of its rows went, how
            much each row of ``positions`` matters: ``[choices, rows]``.
        n_sink: first positions that always stay.
        scope: ``"layer"`` (all heads make one choice) or ``"head"`` (a choice a KV head).
        protect: given this object, which rows stay besides the sinks and the newest one:
            ``[choices, rows]`` bool.
        max_age: rows of tokens more than this far back go first; None if none is too old.
    """

    def __init__(self, budget, score, *, n_sink=0, scope="layer", protect=None, max_age=None):
        self.budget, self.score, self.protect = budget, score, protect
        self.n_sink, self.scope, self.max_age = n_sink, scope, max_age
        self.queries = self.keys = self.values = None  # of all tokens: [heads, tokens, dim]
        self.positions = None  # what is held: [choices, rows], rising
        self.scores = None  # what ``score`` gave last, for the rows held: [choices, rows]
        self.tokens = 0  # seen so far
        self.n_new = 0  # tokens of the newest block
        self.scale = 1.0
        #: The narrowest choice so far: by how much the worst row kept was better than the best
        #: row dropped, relative to its score.
        self.gap = np.inf

    def step(self, queries, keys, values, scale):
        """Take in a block, attend to it, then drop rows.

        Args:
            queries: ``[query_heads, n, dim]``; keys and values ``[kv_heads, n, dim]``.
            scale: what the logits are multiplied with.

        Returns:
            The attention's output for each of its tokens, ``[query_heads, n, dim]``.
        """
        self.scale, self.n_new = scale, keys.shape[1]
        self.queries = _joined(self.queries, queries)
        self.keys, self.values = _joined(self.keys, keys), _joined(self.values, values)
        choices = keys.shape[0] if self.scope == "head" else 1
        block = np.tile(np.arange(self.tokens, self.tokens + self.n_new), (choices, 1))
        self.positions = block if self.positions is None else np.hstack([self.positions, block])
        nothing = np.zeros(block.shape)
        self.scores = nothing if self.scores is None else np.hstack([self.scores, nothing])
        self.tokens += self.n_new

        weights = self.attention(self.n_new)
        output = [weights[h] @ self.values[kv, self.rows(kv)] for h, kv in self.heads()]
        self._evict()
        return np.stack(output)

    def heads(self):
        """Each query head with its KV head."""
        group = self.queries.shape[0] // self.keys.shape[0]
        return [(h, h // group) for h in range(self.queries.shape[0])]

    def rows(self, kv):
        """The positions that KV head ``kv`` holds."""
        return self.positions[kv if self.scope == "head" else 0]

    def attention(self, last):
        """The softmaxed attention of the ``last`` newest queries over the rows held, causal; 0
        for queries before the first token: ``[query_heads, last, rows]``."""
        weights = np.zeros((self.queries.shape[0], last, self.positions.shape[1]))
        for h, kv in self.heads():
            rows = self.rows(kv)
            for i, position in enumerate(range(self.tokens - last, self.tokens)):
                seen = rows <= position
                if position < 0 or not seen.any():
                    continue
                logits = self.keys[kv, rows[seen]] @ self.queries[h, position] * self.scale
                odds = np.exp(logits - logits.max())
                weights[h, i, seen] = odds / odds.sum()
        return weights

    def pool(self, weights):
        """The mean over the query heads that choose together: ``[choices, …]``."""
        if self.scope == "layer":
            return weights.mean(axis=0, keepdims=True)
        return np.stack(
            [
                np.mean([weights[h] for h, kv in self.heads() if kv == head], axis=0)
                for head in range(self.keys.shape[0])
            ]
        )

    def _evict(self):
        self.scores = np.array(self.score(self), dtype=np.float64)
        count = self.positions.shape[1] - self.budget
        if count <= 0:
            return
        stay = (self.positions < self.n_sink) | (self.positions == self.tokens - 1)
        if self.protect is not None:
            stay = stay | self.protect(self)
        ranked = self.scores
        if self.max_age is not None:
            too_old = self.tokens - 1 - self.positions > self.max_age
            ranked = np.where(too_old, -np.inf, ranked)
        kept = []
        for rows, scores, must_stay in zip(self.positions, ranked, stay, strict=True):
            # The lowest go first, and among equals the oldest.
            order = sorted(np.flatnonzero(~must_stay), key=lambda i: (scores[i], rows[i]))
            dropped, rest = order[:count], order[count:]
            assert len(dropped) == count, "more rows protected than the budget has room for"
            if rest:
                best, worst = scores[dropped[-1]], scores[rest[0]]
                if np.isfinite(best):  # else it went for its age
                    self.gap = min(self.gap, (worst - best) / max(abs(worst), 1e-30))
            kept.append(np.setdiff1d(np.arange(len(rows)), dropped))
        self.positions = np.take_along_axis(self.positions, np.stack(kept), axis=1)
        self.scores = np.take_along_axis(self.scores, np.stack(kept), axis=1)


def tova(oracle):
    """TOVA, arXiv 2401.06104: the newest query's attention, mean over query heads."""
    return oracle.pool(oracle.attention(1))[:, 0]


def remembering(oracle):
    """What conftest's policy of that name does."""
    return 0.5 * oracle.scores + oracle.pool(oracle.attention(8)).sum(axis=1)


class OracleCache:
    """A layer's cache for an mlx-lm model whose attention is the oracle's: use it with a module in
    which ``patched`` stands for ``scaled_dot_product_attention``.

    Args:
        make: makes an oracle, one for each sequence of the batch.
    """

    def __init__(self, make):
        self.make, self.oracles, self.offset = make, None, 0

    def make_mask(self, n, **_):
        return None

    def update_and_fetch(self, keys, values):
        self.offset += keys.shape[2]
        return keys, values

    def attend(self, queries, keys, values, scale):
        self.oracles = self.oracles or [self.make() for _ in range(keys.shape[0])]
        blocks = (as_numpy(array) for array in (queries, keys, values))
        sequences = zip(self.oracles, *blocks, strict=True)
        return np.stack([oracle.step(*block, scale) for oracle, *block in sequences])


def patched(original):
    """``original`` attention, but for an ``OracleCache``, which attends itself."""
    import mlx.core as mx

    def attention(queries, keys, values, cache, scale, mask, **more):
        if isinstance(cache, OracleCache):
            return mx.array(cache.attend(queries, keys, values, scale).astype(np.float32))
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)

    return attention


def record(monkeypatch, module, cache):
    """Note what the layers of a model attend with: a list that grows by each layer's cache, its
    block's queries, keys and values, the scale, and the attention's output."""
    notes, blocks = [], {}
    for layer in cache:

        def added(keys, values, _layer=layer, _add=layer.update_and_fetch):
            blocks[id(_layer)] = keys, values
            return _add(keys, values)

        monkeypatch.setattr(layer, "update_and_fetch", added)
    original = module.scaled_dot_product_attention

    def attention(queries, keys, values, cache, scale, mask, **more):
        output = original(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)
        notes.append((cache, queries, *blocks[id(cache)], scale, output))
        return output

    monkeypatch.setattr(module, "scaled_dot_product_attention", attention)
    return notes


def as_numpy(array):
    """An mlx array of any float type as float64: every value exactly as it is stored."""
    import mlx.core as mx

    return np.array(array.astype(mx.float32)).astype(np.float64)


def _joined(old, new):
    new = np.asarray(new, dtype=np.float64)
    return new if old is None else np.concatenate([old, new], axis=1)
