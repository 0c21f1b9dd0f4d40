"""A made-up text: keys, values and queries of its tokens, and feeding them to a layer's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs
import mlx.core as mx

from ..cache import VeloxCache
from ..rows import Attended

QUERY_HEADS, KV_HEADS, DIM = 4, 2, 8


@attrs.frozen(eq=False)
class Stream:
    """What a layer's cache is fed with, token after token."""

    keys: mx.array  # [1, KV_HEADS, tokens, dim]
    values: mx.array
    queries: mx.array  # [1, QUERY_HEADS, tokens, dim]

    @classmethod
    def random(cls, tokens: int, seed: int, dtype: mx.Dtype = mx.float32, dim: int = DIM) -> Stream:
        """Normally distributed numbers, the same for the same seed. Queries are large enough for
        attention to go to some rows far more than to others."""
        for_keys, for_values, for_queries = mx.random.split(mx.random.key(seed), 3)
        kv, shape = (1, KV_HEADS, tokens, dim), (1, QUERY_HEADS, tokens, dim)
        return cls(
            mx.random.normal(kv, key=for_keys).astype(dtype),
            mx.random.normal(kv, key=for_values).astype(dtype),
            (3 * mx.random.normal(shape, key=for_queries)).astype(dtype),
        )

    def with_keys(self, keys: mx.array) -> Stream:
        """The same with other keys."""
        return attrs.evolve(self, keys=keys)

    def then(self, other: Stream, at: int) -> Stream:
        """The same text up to a token, and the other's from there on."""
        pairs = [
            (self.keys, other.keys),
            (self.values, other.values),
            (self.queries, other.queries),
        ]
        return Stream(*(mx.concatenate([a[:, :, :at], b[:, :, at:]], axis=2) for a, b in pairs))

    def block(self, start: int, n: int) -> Stream:
        """The ``n`` tokens from ``start`` on, padded at the end where there are fewer."""
        short = max(0, n - max(0, self.keys.shape[2] - start))
        arrays = [a[:, :, start : start + n] for a in (self.keys, self.values, self.queries)]
        pad = [(0, 0), (0, 0), (0, short), (0, 0)]
        return Stream(*(mx.pad(array, pad) if short else array for array in arrays))

    def feed(
        self,
        cache: VeloxCache,
        blocks: Iterable[int],
        after: Callable[[VeloxCache], VeloxCache] | None = None,
    ) -> VeloxCache:
        """Feed the tokens that the cache hasn't seen, in blocks of these sizes.

        Args:
            cache: of one sequence.
            blocks: tokens a block.
            after: called with the cache after each block; the cache that it gives is fed next.

        Returns:
            The cache that was fed last.
        """
        for n in blocks:
            assert isinstance(cache.offset, int)
            step(cache, self.block(cache.offset, n))
            cache = after(cache) if after else cache
        return cache


def step(cache: VeloxCache, block: Stream) -> tuple[mx.array, mx.array]:
    """One block through one layer, as mlx-lm does it."""
    cache.make_mask(block.keys.shape[2])
    keys, values = cache.update_and_fetch(block.keys, block.values)
    if cache.policy.n_queries and cache.policy.queries == "model":
        cache.observe(Attended(block.queries, block.queries.shape[-1] ** -0.5))
    return cache.attended(keys), values  # in the output's place


def side_by_side(streams: Sequence[Stream], starts: Sequence[int], n: int) -> Stream:
    """The next ``n`` tokens of several sequences as one batch."""
    blocks = [stream.block(start, n) for stream, start in zip(streams, starts, strict=True)]
    return Stream(
        mx.concatenate([block.keys for block in blocks]),
        mx.concatenate([block.values for block in blocks]),
        mx.concatenate([block.queries for block in blocks]),
    )
