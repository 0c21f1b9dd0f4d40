"""MorphKV keeps what its paper says (see ``oracles_more.MorphKV``), and what TOVA does for 1."""

from functools import partial

import mlx.core as mx
import numpy as np
import oracles_more as oracles
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_more import SCOPES, STREAMS, Stream, feed, random_stream, run
from velox_morphkv import MorphKV
from velox_tova import TOVA

from velox_core import PolicyConfigError, VeloxCache, load_policy, make_cache
from velox_core.rows import Attended


@st.composite
def rooms(draw):
    """A budget, and a window and sinks that fit in."""
    budget = draw(st.integers(1, 24))
    window = draw(st.integers(1, budget))
    return {
        "budget": budget,
        "window": window,
        "n_sink": draw(st.integers(0, min(4, budget - window))),
    }


@settings(max_examples=120, deadline=None)
@given(
    stream=STREAMS,
    room=rooms(),
    fusion=st.sampled_from(["sum", "max", "mean"]),
    scope=SCOPES,
    look=st.sampled_from([1, 5]),
)
def test_keeps_the_rows_that_the_oracle_keeps(stream, room, fusion, scope, look):
    policy = MorphKV(**room, fusion=fusion, scope=scope)
    oracle = partial(oracles.MorphKV, window=room["window"], fusion=fusion)
    oracles.check(policy, stream, oracle, look)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    block=st.integers(30, 60),
    window=st.integers(9, 24),
    fusion=st.sampled_from(["sum", "max"]),
)
def test_of_a_long_block_no_query_before_the_window_counts(seed, block, window, fusion):
    stream = random_stream(seed, 1, 1, 2, [block, 1, 1, block], mx.float32)
    policy = MorphKV(budget=25, window=window, n_sink=0, fusion=fusion)
    oracles.check(policy, stream, partial(oracles.MorphKV, window=window, fusion=fusion), 1)


@settings(max_examples=60, deadline=None)
@given(
    stream=STREAMS,
    budget=st.integers(1, 24),
    n_sink=st.integers(0, 4),
    fusion=st.sampled_from(["sum", "max", "mean"]),
    scope=SCOPES,
    queries=st.sampled_from(["model", "keys"]),
)
def test_a_window_of_1_keeps_tovas_rows_bit_for_bit(stream, budget, n_sink, fusion, scope, queries):
    options = {
        "budget": budget,
        "n_sink": min(n_sink, budget - 1),
        "scope": scope,
        "queries": queries,
    }
    caches = [
        VeloxCache(TOVA(**options), budget),
        VeloxCache(MorphKV(window=1, fusion=fusion, **options), budget),
    ]
    for _ in zip(*[feed(cache, stream) for cache in caches], strict=True):
        tova, morphkv = (cache.state[:3] for cache in caches)  # keys, values, positions
        assert [mx.array_equal(*pair).item() for pair in zip(tova, morphkv, strict=True)] == [
            True
        ] * 3


def test_the_default_is_the_authors_choice_a_head_of_32_queries():
    policy = load_policy("morphkv")
    assert (policy.window, policy.fusion, policy.scope, policy.n_sink) == (32, "sum", "head", 4)


@pytest.mark.parametrize("blocks", [[40, 1, 1], [3, 30, 5, 4], [1] * 42])
def test_the_window_of_queries_runs_across_blocks_and_steps(blocks):
    # The last query looks at rows 0 and 1, and the one four before it at row 2. Of the others, all
    # equal, the oldest is to go: row 3, or row 2 where the window is too short for its query.
    keys, queries = np.zeros((1, 1, 42, 2)), np.zeros((1, 1, 42, 2))
    keys[..., 2, 0] = queries[..., -5, 0] = 9
    keys[..., [0, 1], 1] = queries[..., -1, 1] = 9
    stream = Stream(keys, queries, blocks)
    for window, gone in ((5, 3), (4, 2)):
        rows = run(MorphKV(budget=41, n_sink=0, window=window), stream)
        assert set(range(42)) - set(rows.ravel().tolist()) == {gone}


@pytest.mark.parametrize(("fusion", "gone"), [("sum", 0), ("mean", 0), ("max", 1)])
def test_fusions(fusion, gone):
    # One query gives row 0 all that it has; the three after it give row 1 most of what they have.
    keys, queries = np.zeros((1, 1, 6, 4)), np.zeros((1, 1, 6, 4))
    keys[..., 0, :2] = 4, -4
    keys[..., 1, 1] = 4
    queries[..., 2, 0] = 3
    queries[..., 3:, 1] = 1
    rows = run(MorphKV(budget=5, n_sink=0, window=4, fusion=fusion), Stream(keys, queries, [6]))
    assert set(range(6)) - set(rows.ravel().tolist()) == {gone}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scope=SCOPES)
def test_scores_carry_nothing_over(seed, scope):
    # What was asked before the window's queries makes no difference.
    one = random_stream(seed, 1, 2, 2, [24, 1, 1, 1, 1], mx.float32)
    other = Stream(one.keys, one.queries.copy(), one.blocks)
    other.queries[:, :, :24] = random_stream(seed + 1, 1, 2, 2, [24], mx.float32).queries
    policy = MorphKV(budget=27, n_sink=2, window=4, scope=scope)
    np.testing.assert_array_equal(run(policy, one), run(policy, other))


def test_a_fusion_that_is_none_is_refused():
    with pytest.raises(
        PolicyConfigError, match=r"fusion='avg' isn't allowed.*'sum', 'max', 'mean'"
    ):
        load_policy("morphkv", fusion="avg")


@pytest.mark.parametrize("window", [0, -3, 2.5, True])
def test_a_window_that_is_none_is_refused(window):
    with pytest.raises(PolicyConfigError, match=f"MorphKV: window={window!r} isn't allowed"):
        load_policy("morphkv", window=window)


@pytest.mark.parametrize("budget", [32, [512, 35]])
def test_a_window_that_leaves_no_room_is_refused_with_the_arithmetic(budget):
    with pytest.raises(PolicyConfigError, match="leaves no room") as error:
        load_policy("morphkv", budget=budget)
    sum_ = "4 (n_sink) + 31 (the others of window=32) + 1 (the newest row) = 36 rows always stay"
    assert sum_ in str(error.value)


def test_of_a_long_block_only_the_window_is_held():
    cache = VeloxCache(load_policy("morphkv", budget=64, window=8), budget=64)
    before = mx.get_active_memory()
    rows, queries = mx.ones((1, 2, 2048, 32)), mx.ones((1, 8, 2048, 32))
    cache.update_and_fetch(rows, rows)
    cache.observe(Attended(queries, 1.0))
    mx.eval(cache.state[:6])
    del rows, queries
    assert mx.get_active_memory() - before < 2 * cache.nbytes


def test_latent_attention_needs_no_older_queries():
    # The keys attended with aren't those stored, so an older query couldn't be scored again.
    model = tiny_models.build("deepseek_v3")
    tokens = np.random.default_rng(3).integers(1, tiny_models.VOCAB, 60).tolist()
    options = {"budget": 16, "n_sink": 0, "scope": "layer"}
    policies = {None: TOVA(**options)}
    policies |= {window: MorphKV(window=window, **options) for window in (1, 6)}
    rows = {}
    for window, policy in policies.items():
        cache = make_cache(model, policy)
        for block in (tokens[:30], *[[token] for token in tokens[30:]]):
            model(mx.array([block]), cache=cache)
        rows[window] = [np.sort(layer.positions)[0, 0].tolist() for layer in cache]
    assert rows[None] == rows[1] != rows[6]
    assert all(layer[-6:] == list(range(54, 60)) for layer in rows[6])
