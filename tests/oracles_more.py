"""What H2O, MorphKV and StreamingLLM must keep: the papers' rules in NumPy, a row at a time.

Each oracle takes the tokens of one sequence and one choice (a KV head, or all of a layer's) in
float64, as slowly and plainly as it can, and says after each block which positions are left.
Below them is what feeds the same tokens to a cache, with no model around it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from velox_core import Policy, VeloxCache
from velox_core.rows import Attended

CLOSE = 1e-5


class TooClose(Exception):
    """Two rows' scores are nearer than float32 can tell, so either may be the right one to go."""


class Choice:
    """One sequence, and the heads that choose together.

    Args:
        keys: ``[kv_heads, tokens, dim]`` of those heads.
        queries: ``[kv_heads, group, tokens, dim]``, the query heads of each.
        scale: of the attention's logits.
        budget: rows to keep.
        n_sink: first tokens that always stay.
    """

    def __init__(
        self, keys: np.ndarray, queries: np.ndarray, scale: float, budget: int, n_sink: int
    ) -> None:
        self.keys, self.queries, self.scale = keys, queries, scale
        self.budget, self.n_sink = budget, n_sink
        self.held: list[int] = []
        self.seen = 0

    def run(self, blocks: Iterable[int]) -> Iterator[list[int]]:
        """The positions that are held after each block was attended to and cut."""
        for n in blocks:
            new = list(range(self.seen, self.seen + n))
            self.held += new
            self.seen += n
            self.attended(new)
            if len(self.held) > self.budget:
                self.held = self.cut()
            yield list(self.held)

    def weights(self, query: int) -> dict[int, float]:
        """The attention of the token ``query`` over the held rows up to it: the heads' mean."""
        rows = [row for row in self.held if row <= query]
        total = np.zeros(len(rows))
        for keys, group in zip(self.keys, self.queries, strict=True):
            for head in group:
                logits = keys[rows] @ head[query] * self.scale
                exp = np.exp(logits - logits.max())
                total += exp / exp.sum()
        heads = self.queries.shape[0] * self.queries.shape[1]
        return dict(zip(rows, total / heads, strict=True))

    def attended(self, new: list[int]) -> None:
        """A block of tokens attended to the held rows."""

    def cut(self) -> list[int]:
        raise NotImplementedError

    def keep(self, always: set[int], scores: dict[int, float]) -> list[int]:
        """The rows in ``always``, and as many of the best others as the budget has room for; of
        equals the newer."""
        room = self.budget - len(always)
        others = [row for row in self.held if row not in always]
        ranked = sorted(others, key=lambda row: (scores[row], row), reverse=True)
        if 0 < room < len(ranked):
            last, first_out = scores[ranked[room - 1]], scores[ranked[room]]
            if last - first_out < CLOSE * last:
                raise TooClose
        return sorted(always | set(ranked[:room]))

    def first_and_last(self, recent: int) -> set[int]:
        """The sinks and the ``recent`` newest rows; at least the newest one."""
        first = {row for row in self.held if row < self.n_sink}
        return first | {row for row in self.held if row >= self.seen - max(recent, 1)}


class H2O(Choice):
    """Heavy hitters by accumulated attention, beside the recent part of the budget."""

    def __init__(self, *stream, recent: float | int) -> None:
        super().__init__(*stream)
        self.recent = int(self.budget * recent) if isinstance(recent, float) else recent
        self.sums: dict[int, float] = {}

    def attended(self, new: list[int]) -> None:
        for query in new:
            for row, weight in self.weights(query).items():
                self.sums[row] = self.sums.get(row, 0.0) + weight

    def cut(self) -> list[int]:
        return self.keep(self.first_and_last(self.recent), self.sums)


class MorphKV(Choice):
    """Older rows by the fused attention of the window's queries, beside the window. What each
    query attended to counts as it came; the window is made of groups of queries, the newest of
    which may still grow, and the oldest leaves whole."""

    def __init__(self, *stream, window: int, fusion: str) -> None:
        super().__init__(*stream)
        self.window, self.fusion = window, fusion
        self.notes: dict[int, dict[int, float]] = {}  # what each query attended to

    def attended(self, new: list[int]) -> None:
        self.notes |= {query: self.weights(query) for query in new}

    def cut(self) -> list[int]:
        size = math.ceil(self.window / 4)
        groups = math.ceil(self.window / size)
        oldest = max(((self.seen - 1) // size - groups + 1) * size, 0)
        seen = [self.notes[query] for query in range(oldest, self.seen)]
        fuse = {"sum": sum, "max": max, "mean": lambda weights: sum(weights) / len(weights)}
        scores = {
            row: fuse[self.fusion]([weights.get(row, 0.0) for weights in seen]) for row in self.held
        }
        return self.keep(self.first_and_last(self.window), scores)


class Streaming(Choice):
    """The sinks and the newest rows."""

    def cut(self) -> list[int]:
        return sorted(self.first_and_last(self.budget - self.n_sink))


# A stream of tokens, and a cache that takes it in -----------------------------------------------


@dataclass(frozen=True)
class Stream:
    """Keys and queries of some sequences, and the blocks that they come in."""

    keys: np.ndarray  # [batch, kv_heads, tokens, dim]
    queries: np.ndarray  # [batch, query_heads, tokens, dim]
    blocks: list[int]
    dtype: mx.Dtype = mx.float32

    @property
    def scale(self) -> float:
        return self.keys.shape[3] ** -0.5

    def choices(self, scope: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and queries of the heads that choose together, sequence by sequence."""
        batch, kv_heads, tokens, dim = self.keys.shape
        grouped = self.queries.reshape(batch, kv_heads, -1, tokens, dim)
        step = kv_heads if scope == "layer" else 1
        return [
            (self.keys[b, h : h + step], grouped[b, h : h + step])
            for b in range(batch)
            for h in range(0, kv_heads, step)
        ]


def random_stream(
    seed: int, batch: int, kv_heads: int, group: int, blocks: list[int], dtype: mx.Dtype
) -> Stream:
    """Random keys and queries, with numbers that the type has."""
    rng = np.random.default_rng(seed)

    def draw(heads: int) -> np.ndarray:
        numbers = mx.array(1.5 * rng.standard_normal((batch, heads, sum(blocks), 8)), dtype=dtype)
        return np.array(numbers.astype(mx.float32)).astype(np.float64)

    return Stream(draw(kv_heads), draw(kv_heads * group), blocks, dtype)


STREAMS = st.builds(
    random_stream,
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    # Prompts in blocks, then decode steps, and perhaps a block again.
    blocks=st.builds(
        lambda prompt, steps, more: prompt + [1] * steps + more,
        st.lists(st.integers(1, 12), min_size=1, max_size=3),
        st.integers(0, 20),
        st.lists(st.integers(1, 5), max_size=2),
    ),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
)
SCOPES = st.sampled_from(["layer", "head"])


def feed(cache: VeloxCache, stream: Stream) -> Iterator[None]:
    """Give the stream to the cache, pausing after each block."""
    start = 0
    for n in stream.blocks:
        keys = mx.array(stream.keys[:, :, start : start + n], dtype=stream.dtype)
        queries = mx.array(stream.queries[:, :, start : start + n], dtype=stream.dtype)
        cache.update_and_fetch(keys, keys)
        if cache.policy.n_queries and cache.policy.queries == "model":
            cache.observe(Attended(queries, stream.scale))
        start += n
        yield


def kept(cache: VeloxCache) -> np.ndarray:
    """The kept positions in order: ``[batch, heads or 1, rows]``."""
    return np.sort(np.array(cache.positions), axis=-1)


def run(policy: Policy, stream: Stream) -> np.ndarray:
    """The positions that are kept once the stream is over."""
    cache = VeloxCache(policy, policy.budget)
    for _ in feed(cache, stream):
        pass
    return kept(cache)


def check(policy: Policy, stream: Stream, oracle: Callable[..., Choice], look: int) -> None:
    """The cache keeps what the oracle does, by every ``look``th block (looking closes holes)."""
    arguments = (stream.scale, policy.budget, policy.n_sink)
    oracles = [oracle(*heads, *arguments) for heads in stream.choices(policy.scope)]
    cache = VeloxCache(policy, policy.budget)
    try:
        wanted = list(zip(*[each.run(stream.blocks) for each in oracles], strict=True))
    except TooClose:
        reject()
    for i, _ in enumerate(feed(cache, stream)):
        if i % look == 0 or i == len(stream.blocks) - 1:
            rows = kept(cache)
            batch = stream.keys.shape[0]
            np.testing.assert_array_equal(
                rows, np.array(wanted[i]).reshape(batch, -1, rows.shape[2])
            )
