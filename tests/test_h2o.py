"""H2O keeps what its paper says: see ``oracles_more.H2O``."""

from functools import partial

import mlx.core as mx
import numpy as np
import oracles_more as oracles
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles_more import SCOPES, STREAMS, Stream, feed, random_stream, run
from velox_h2o import H2O

from velox_core import PolicyConfigError, VeloxCache, load_policy
from velox_core.rows import Attended, Rows

SHARES = st.floats(0, 1).map(lambda share: round(share, 2))


@settings(max_examples=120, deadline=None)
@given(
    stream=STREAMS,
    budget=st.integers(1, 24),
    n_sink=st.integers(0, 4),
    recent=SHARES | st.integers(0, 24),
    scope=SCOPES,
    look=st.sampled_from([1, 5]),
)
def test_keeps_the_rows_that_the_oracle_keeps(stream, budget, n_sink, recent, scope, look):
    policy = H2O(budget=budget, n_sink=n_sink, recent=recent, scope=scope)
    assume(n_sink + max(policy.recent_rows(budget), 1) <= budget)
    oracles.check(policy, stream, partial(oracles.H2O, recent=recent), look)


def test_half_the_budget_is_for_the_newest_rows_by_default():
    policy = load_policy("h2o")
    assert (policy.recent, policy.n_sink, policy.scope) == (0.5, 4, "head")
    assert policy.recent_rows(512) == 256
    assert H2O(recent=1).recent_rows(512) == 1  # rows, not the whole
    assert H2O(recent=0.3).recent_rows(11) == 3  # rounded down


def spotlight(tokens: int, heavy: list[int], blocks: list[int]) -> Stream:
    """All queries look one way, and the keys of a few tokens lie there."""
    rng = np.random.default_rng(0)
    keys = 0.1 * rng.standard_normal((1, 1, tokens, 8))
    keys[..., heavy, 0] += 6
    queries = 0.1 * rng.standard_normal((1, 1, tokens, 8))
    queries[..., 0] += 2
    return Stream(keys, queries, blocks)


@pytest.mark.parametrize("block", [1, 16])
def test_a_long_decode_keeps_the_newest_half_and_heavy_rows_old_and_new(block):
    heavy = [3, 11, 70, 400]  # two in the prompt, two in what came after
    stream = spotlight(1024, heavy, [32] + [block] * (992 // block))
    rows = run(H2O(budget=32, n_sink=0), stream).ravel().tolist()
    assert set(rows) >= set(range(1024 - 16, 1024))
    assert set(rows) >= set(heavy)
    # It doesn't freeze on the prompt: light prompt rows, with their long sums, have made way.
    assert len([row for row in rows if row < 32]) < 16


def test_a_sum_is_not_divided_by_the_number_of_queries():
    # Row 0 gets little of each of many queries; row 30 gets much of the few since it came.
    keys = np.zeros((1, 1, 34, 2))
    keys[..., 0, 0] = 3
    keys[..., 30, 0] = 6
    queries = np.zeros((1, 1, 34, 2))
    queries[..., 0] = 1.0
    queries[..., 31:, 0] = 2.0
    stream = Stream(keys, queries, [34])
    cache = VeloxCache(H2O(budget=34, n_sink=0), 34)
    list(feed(cache, stream))
    cache.positions  # noqa: B018  settles
    sums = np.array(cache._scores).ravel()
    assert sums.sum() == pytest.approx(34, rel=1e-5)  # each query gives 1 away
    assert sums[0] > sums[30]
    assert sums[0] / 34 < sums[30] / 4


@pytest.mark.parametrize("scope", ["layer", "head"])
def test_a_block_of_many_queries_is_summed_as_its_parts_are(scope):
    whole = random_stream(0, 2, 2, 2, [600], mx.float32)
    parts = Stream(whole.keys, whole.queries, [200, 256, 1, 143])
    caches = [VeloxCache(H2O(budget=600, scope=scope), 600) for _ in range(2)]
    for cache, stream in zip(caches, (whole, parts), strict=True):
        list(feed(cache, stream))
        cache.positions  # noqa: B018  settles
    sums = [np.array(cache._scores) for cache in caches]
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-4)


def test_a_block_of_many_queries_never_has_all_their_weights_in_memory():
    query_heads, n, held = 4, 2048, 512
    positions = mx.arange(held + n)[None, None]
    rows = Rows(
        keys=mx.random.normal((1, 2, held + n, 8)),
        values=mx.zeros((1, 2, held + n, 8)),
        positions=positions,
        scores=mx.zeros(positions.shape),
        query_positions=positions[0, :, held:],
        newest=positions[..., -1:],
        n_new=n,
        budget=held,
        layer=0,
        scope="head",
        attended=Attended(mx.random.normal((1, query_heads, n, 8)), 0.3),
        padded=False,
    )
    mx.eval(rows.keys, rows.values, positions, rows.queries, rows.query_positions)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    received = rows.received(n)
    mx.eval(received)
    used = mx.get_peak_memory() - before
    assert received.shape == (1, query_heads, held + n)
    assert mx.allclose(received.sum(axis=-1), mx.array(float(n)))
    assert used < 0.75 * 4 * query_heads * n * (held + n)


@pytest.mark.parametrize("recent", [-1, 1.5, -0.5, float("nan"), True, "half", None])
def test_a_recent_share_that_is_none_is_refused(recent):
    with pytest.raises(PolicyConfigError, match=f"H2O: recent={recent!r} isn't allowed; it must"):
        load_policy("h2o", recent=recent)


@pytest.mark.parametrize(
    ("budget", "recent", "others", "total"),
    [(16, 16, 15, 20), (16, 0.9, 13, 18), ([64, 6], 0.5, 2, 7)],
)
def test_a_recent_share_that_leaves_no_room_is_refused(budget, recent, others, total):
    with pytest.raises(PolicyConfigError, match="leaves no room") as error:
        load_policy("h2o", budget=budget, recent=recent)
    sum_ = f"4 (n_sink) + {others} (the others of recent={recent}) + 1 (the newest row) = {total}"
    assert sum_ in str(error.value)
