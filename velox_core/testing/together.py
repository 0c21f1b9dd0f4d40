"""Several sequences in one cache, as mlx-lm's batches have them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ..cache import VeloxCache
from .stream import Stream, side_by_side, step


@attrs.define(eq=False)
class Together:
    """A batch and the texts that it is fed with."""

    cache: VeloxCache
    streams: list[Stream]
    seen: list[int]

    @classmethod
    def of(cls, caches: Sequence[VeloxCache], streams: Sequence[Stream]) -> Together:
        """A batch of the sequences of these caches."""
        seen = [int(cache.offset) for cache in caches]
        merged = VeloxCache.merge(caches)
        assert isinstance(merged, VeloxCache)
        return cls(merged, list(streams), seen)

    def prompts(self, lengths: Sequence[int], blocks: Sequence[int]) -> None:
        """Feed prompts of these lengths, padded on the right with what would come later."""
        longest = max(lengths)
        assert sum(blocks) == longest
        padding = [longest - length for length in lengths]
        self.cache.prepare(lengths=list(lengths), right_padding=padding)
        for i, n in enumerate(blocks):
            starts = [seen + sum(blocks[:i]) for seen in self.seen]
            step(self.cache, side_by_side(self.streams, starts, n))
        self.cache.finalize()
        self.seen = [seen + length for seen, length in zip(self.seen, lengths, strict=True)]

    def steps(self, n: int) -> None:
        """Feed ``n`` tokens to each sequence, one at a time."""
        for _ in range(n):
            step(self.cache, side_by_side(self.streams, self.seen, 1))
            self.seen = [seen + 1 for seen in self.seen]

    def add(self, other: Together) -> None:
        """Let another batch's sequences join."""
        self.cache.extend(other.cache)
        self.streams += other.streams
        self.seen += other.seen

    def keep(self, sequences: Sequence[int]) -> None:
        """Let only these sequences stay."""
        self.cache.filter(list(sequences))
        self.streams = [self.streams[i] for i in sequences]
        self.seen = [self.seen[i] for i in sequences]

    def alone(self, sequence: int) -> VeloxCache:
        """One sequence's own cache."""
        extracted = self.cache.extract(sequence)
        assert isinstance(extracted, VeloxCache)
        return extracted


def own_blocks(length: int, blocks: Sequence[int]) -> list[int]:
    """The blocks in which a prompt of that length comes when a batch is fed in ``blocks``."""
    own = []
    for n in blocks:
        own.append(min(n, length))
        length -= own[-1]
    return [n for n in own if n]
