"""StreamingLLM keeps the first and the newest rows, with any model and for ever."""

import mlx.core as mx
import numpy as np
import oracles_more as oracles
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_more import SCOPES, STREAMS, feed, kept, random_stream, run
from velox_streaming import StreamingLLM

from velox_core import (
    PolicyConfigError,
    UnobservedAttentionError,
    VeloxCache,
    hookimpl,
    load_policy,
    make_cache,
)


@settings(max_examples=30, deadline=None)
@given(
    stream=STREAMS,
    budget=st.integers(1, 24),
    n_sink=st.integers(0, 4),
    scope=SCOPES,
    look=st.sampled_from([1, 5]),
)
def test_keeps_the_rows_that_the_oracle_keeps(stream, budget, n_sink, scope, look):
    policy = StreamingLLM(budget=budget, n_sink=min(n_sink, budget - 1), scope=scope)
    oracles.check(policy, stream, oracles.Streaming, look)


@pytest.mark.parametrize("blocks", [[100], [30] + [1] * 70, [16] * 6 + [4]])
def test_sinks_and_the_newest_rows(blocks):
    stream = random_stream(0, 2, 2, 1, blocks, mx.float32)
    assert load_policy("streaming").n_sink == 4
    for n_sink in (4, 0):  # 0 is a plain window
        wanted = [*range(n_sink), *range(100 - 20 + n_sink, 100)]
        for rows in run(load_policy("streaming", budget=20, n_sink=n_sink), stream).reshape(2, -1):
            assert rows.tolist() == wanted


@pytest.mark.parametrize("blocks", [[40], [7, 1, 1, 1, 3, 1, 1, 12]])
def test_positions_that_float32_has_not_are_told_apart(blocks):
    start = 2**24 + 1
    cache = VeloxCache(load_policy("streaming", budget=9), 9)
    cache._tokens = [start]  # as if the tokens before had come and gone
    for _ in feed(cache, random_stream(0, 1, 2, 1, blocks, mx.float32)):
        pass
    end = start + sum(blocks)
    assert kept(cache).ravel().tolist() == list(range(end - 9, end))


def test_scores_are_exact_and_rise_with_age_beyond_what_float32_counts():
    seen = []

    class Observer:
        @hookimpl(wrapper=True)
        def score(self, rows):
            scores = yield
            seen.append((np.array(rows.positions), np.array(scores)))
            return scores

    cache = VeloxCache(load_policy("streaming", budget=9, protect=[Observer()]), 9)
    cache._tokens = [2**24 + 1]
    for _ in feed(cache, random_stream(0, 1, 2, 1, [40], mx.float32)):
        kept(cache)
    [(positions, scores)] = seen
    np.testing.assert_array_equal(np.diff(scores), np.diff(positions))


def test_a_model_whose_attention_cannot_be_observed():
    model = tiny_models.build("plamo2")
    with pytest.raises(UnobservedAttentionError):
        make_cache(model, load_policy("tova", budget=8))
    cache = make_cache(model, load_policy("streaming", budget=8))
    for n in (12, 1, 1, 5, 1):
        logits = model(mx.zeros((1, n), mx.int32), cache=cache)
        assert mx.isfinite(logits).all()
    [rows] = [layer for layer in cache if isinstance(layer, VeloxCache)]
    assert kept(rows).ravel().tolist() == [0, 1, 2, 3, 16, 17, 18, 19]


def test_sinks_that_leave_no_room_are_refused_with_the_arithmetic():
    with pytest.raises(PolicyConfigError, match=r"4 \(n_sink\) \+ 1 \(the newest row\) = 5 rows"):
        load_policy("streaming", budget=4)
