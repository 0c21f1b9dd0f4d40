"""The rows kept and what is attended to, against a NumPy oracle that shares no code with velox."""

import sys

import hypothesis
import mlx.core as mx
import numpy as np
import oracle as plain
import pytest
import tiny_models
from hypothesis import assume, example, given
from hypothesis import strategies as st
from mlx_lm.models import llama
from oracle import Oracle, OracleCache, as_numpy

from velox_core import load_policy, make_cache

CLEAR = 2e-5  # relative: choices narrower than this may go either way in float32
FLOATS = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}  # tolerance of an output


# The oracle itself


def one_layer(budget, queries, **options):
    """An oracle fed token by token with one head; all keys are [1] but the given ones."""
    oracle = Oracle(budget, plain.tova, **options)
    kept = []
    for query, key in queries:
        array = np.array([[[float(key)]]])
        oracle.step(np.array([[[float(query)]]]), array, array, 1.0)
        kept.append(oracle.positions[0].tolist())
    return kept


def test_oracle_by_hand():
    keys = [0.0, 3.0, 1.0, 2.0, 5.0]
    # A query of 1 likes high keys; one of -1 low ones.
    kept = one_layer(2, [(1, key) for key in keys])
    assert kept == [[0], [0, 1], [1, 2], [1, 3], [1, 4]]
    kept = one_layer(2, [(-1, key) for key in keys])
    assert kept == [[0], [0, 1], [0, 2], [0, 3], [0, 4]]
    kept = one_layer(3, [(1, key) for key in keys], n_sink=1)
    assert kept == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 4]]
    kept = one_layer(3, [(1, key) for key in keys], max_age=2)  # 1 is the best, until it is too old
    assert kept == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    kept = one_layer(3, [(0, key) for key in keys])  # all equal: the oldest goes
    assert kept == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_oracle_attends_to_what_is_there():
    oracle = Oracle(2, plain.tova)
    oracle.step(np.zeros((1, 1, 1)), np.zeros((1, 1, 1)), np.full((1, 1, 1), 8.0), 1.0)
    output = oracle.step(np.zeros((1, 3, 1)), np.zeros((1, 3, 1)), np.full((1, 3, 1), 4.0), 1.0)
    assert np.allclose(output[0, :, 0], [6, 16 / 3, 5])  # no token sees a later one
    assert oracle.positions.tolist() == [[2, 3]]
    assert np.allclose(oracle.step(*[np.ones((1, 1, 1))] * 3, 0.0), 3.0)  # rows 2, 3 and itself


# Random streams, fed to the cache itself


@st.composite
def streams(draw):
    """How a stream is fed, and to what."""
    n_sink = draw(st.integers(0, 4))
    return {
        "budget": n_sink + draw(st.integers(1, 14)),
        "n_sink": n_sink,
        "scope": draw(st.sampled_from(["layer", "head"])),
        "max_age": draw(st.none() | st.integers(1, 30)),
        "batch": draw(st.integers(1, 2)),
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.sampled_from([1, 2, 4])),
        "dtype": draw(st.sampled_from(list(FLOATS))),
        # Single tokens often: a step has a way of its own for them.
        "blocks": draw(st.lists(st.just(1) | st.integers(1, 20), min_size=1, max_size=25)),
        "reads": draw(st.sets(st.integers(0, 25))),  # after which steps the state is read
        "asks": draw(st.booleans()),  # only one of a model's caches is asked for the mask
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def feed(policy, score, stream):
    """Feed the stream to a cache and to the oracle, and compare them at each step."""
    batch, kv_heads, dim = stream["batch"], stream["kv_heads"], 8
    dtype, budget, scope = stream["dtype"], policy.budget, policy.scope
    cache = make_cache(LLAMA, policy)[0]
    options = {"n_sink": policy.n_sink, "scope": scope, "max_age": policy.max_age}
    oracles = [Oracle(budget, score, **options) for _ in range(batch)]
    mx.random.seed(stream["seed"])
    for step, n in enumerate(stream["blocks"]):
        queries = mx.random.normal((batch, kv_heads * stream["group"], n, dim)).astype(dtype)
        keys = 1.5 * mx.random.normal((batch, kv_heads, n, dim)).astype(dtype)
        values = mx.random.normal((batch, kv_heads, n, dim + 4)).astype(dtype)
        if stream.get("flat"):
            queries = mx.zeros_like(queries)
        mask = cache.make_mask(n) if stream["asks"] else (None if n == 1 else "causal")
        all_keys, all_values = cache.update_and_fetch(keys, values)
        assert all_keys.dtype == all_values.dtype == dtype
        output = llama.scaled_dot_product_attention(
            queries, all_keys, all_values, cache=cache, scale=0.5, mask=mask
        )
        assert output.dtype == dtype
        for b, oracle in enumerate(oracles):
            before = oracle.positions
            block = [as_numpy(array[b]) for array in (queries, keys, values)]
            wanted = oracle.step(*block, 0.5)
            if hypothesis.currently_in_test_context():
                assume(oracle.gap > CLEAR)
            tolerance = FLOATS[dtype]
            np.testing.assert_allclose(as_numpy(output[b]), wanted, atol=tolerance, rtol=tolerance)
            for head in range(kv_heads):
                new = list(range(oracle.tokens - n, oracle.tokens))
                held = [] if before is None else list(before[head if scope == "head" else 0])
                got = found(oracle, head, all_keys[b, head], all_values[b, head])
                assert sorted(got) == sorted(held + new)
                assert n == 1 or got[-n:] == new  # the block's rows come last, in order
        assert cache.offset == sum(stream["blocks"][: step + 1])
        if step in stream["reads"]:
            compare(cache, oracles)
    compare(cache, oracles)


def found(oracle, head, keys, values):
    """The positions of the rows that a head attends to, known by their keys and values."""
    pairs = zip(oracle.keys[head], oracle.values[head], strict=True)
    places = {key.tobytes() + value.tobytes(): i for i, (key, value) in enumerate(pairs)}
    pairs = zip(as_numpy(keys), as_numpy(values), strict=True)
    return [places[key.tobytes() + value.tobytes()] for key, value in pairs]


def compare(cache, oracles, own=False):
    """What a settled cache holds is what the oracles hold (where they computed keys of their
    ``own``, in position only)."""
    positions = np.array(cache.positions)
    assert positions.dtype == np.int32
    assert np.sort(positions, axis=-1).tolist() == [o.positions.tolist() for o in oracles]
    assert cache.size() == positions.shape[-1] <= cache.budget
    assert cache.tokens_kept == positions.shape[-1] * len(oracles)
    keys, values = cache.state[:2]
    for b, oracle in enumerate([] if own else oracles):
        for head in range(keys.shape[1]):
            choice = head if positions.shape[1] > 1 else 0
            rows = found(oracle, head, keys[b, head], values[b, head])
            assert rows == positions[b, choice].tolist()


LLAMA = tiny_models.build("llama")  # only so that its attention is watched


def options(stream):
    return {name: stream[name] for name in ("budget", "n_sink", "scope", "max_age")}


# A block of several tokens after single ones: the hole must close up before it.
AFTER_A_HOLE = {
    "budget": 5, "n_sink": 1, "scope": "head", "max_age": None,
    "batch": 2, "kv_heads": 2, "group": 2, "dtype": mx.float32, "reads": set(), "asks": False,
    "blocks": [9, 1, 1, 3, 1, 1, 1, 7, 1], "seed": 0,
}  # fmt: skip


@given(streams())
@example(AFTER_A_HOLE)
@example(AFTER_A_HOLE | {"budget": 1, "n_sink": 0})
@example(AFTER_A_HOLE | {"scope": "layer", "blocks": [1] * 25, "reads": {7, 8, 20}})
@example(AFTER_A_HOLE | {"max_age": 6, "blocks": [4, 3, 1, 1, 1, 1, 1, 1, 1, 1, 5]})
def test_tova_keeps_what_the_oracle_keeps(stream):
    feed(load_policy("tova", **options(stream)), plain.tova, stream)


@given(streams())
@example(AFTER_A_HOLE)
@example(AFTER_A_HOLE | {"scope": "layer", "blocks": [1] * 25, "reads": {7, 8, 20}})
def test_a_policy_with_a_memory(remembering, stream):
    """Scores move along with their rows, and older queries come back, in every mix of blocks."""
    feed(remembering(**options(stream)), plain.remembering, stream)


@given(streams())
def test_keys_in_the_queries_place(stream):
    """With ``queries="keys"`` the rows are those of an oracle that is fed keys as queries."""
    stream = stream | {"group": 1, "reads": set(), "dtype": mx.float32}
    policy = load_policy("tova", queries="keys", **options(stream))
    cache = make_cache(LLAMA, policy)[0]
    more = {name: stream[name] for name in ("n_sink", "scope", "max_age")}
    oracle = Oracle(policy.budget, plain.tova, **more)
    mx.random.seed(stream["seed"])
    for n in stream["blocks"]:
        keys = mx.random.normal((1, stream["kv_heads"], n, 8))
        cache.update_and_fetch(keys, keys)
        oracle.step(*[as_numpy(keys[0])] * 3, 8**-0.5)
    assume(oracle.gap > CLEAR)
    compare(cache, [oracle])


@pytest.mark.parametrize("scope", ["layer", "head"])
@pytest.mark.parametrize("blocks", [[1] * 12, [5, 7], [12], [3, 1, 1, 4, 1, 2]])
def test_of_equal_scores_the_oldest_goes(scope, blocks):
    """Queries of zero attend to all rows alike, to the last bit."""
    stream = AFTER_A_HOLE | {"blocks": blocks, "flat": True, "reads": {1, 4}}
    for n_sink in (0, 2):
        policy = load_policy("tova", budget=6, n_sink=n_sink, scope=scope)
        feed(policy, plain.tova, stream)
    cache = make_cache(LLAMA, load_policy("tova", budget=6, n_sink=2, scope=scope))[0]
    for n in blocks:
        rows = mx.random.normal((1, 2, n, 8))
        llama.scaled_dot_product_attention(
            0 * rows, *cache.update_and_fetch(rows, rows), cache=cache, scale=1.0, mask="causal"
        )
    positions = np.sort(np.array(cache.positions)[0], axis=-1)
    assert (positions == [0, 1, 8, 9, 10, 11]).all()  # a sliding window, and the sinks


def test_the_oracle_is_seen_to_differ():
    """The comparison can fail: another score, and it does."""
    policy = load_policy("tova", budget=4, n_sink=0)
    with pytest.raises(AssertionError):
        feed(policy, lambda oracle: -plain.tova(oracle), AFTER_A_HOLE | {"scope": "layer"})


# Whole models

CUTS = [[26, 4], [1] * 30, [16, 1, 1, 1, 1, 1, 1, 4, 4], [7, 7, 7, 1, 1, 7], [1, 1, 1, 26, 1]]


def tokens_for(batch, n, seed=0):
    rng = np.random.default_rng(seed)
    return mx.array(rng.integers(0, tiny_models.VOCAB, (batch, n)))


def in_blocks(model, tokens, cuts, cache):
    """The logits of each token, fed in blocks."""
    logits, start = [], 0
    for n in cuts:
        logits.append(model(tokens[:, start : start + n], cache=cache))
        mx.eval(logits[-1])
        start += n
    return mx.concatenate(logits, axis=1)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("scope", ["layer", "head"])
@pytest.mark.parametrize("n_sink", [0, 3])
def test_each_token_sees_what_it_should(monkeypatch, cuts, scope, n_sink):
    """A Llama whose attention is the oracle's, in NumPy from end to end: the same logits for every
    token of every block, and the same rows in each layer."""
    model, tokens = tiny_models.build("llama"), tokens_for(2, sum(cuts))
    options = {"budget": 8, "n_sink": n_sink, "scope": scope}
    cache = make_cache(model, load_policy("tova", **options))
    logits = in_blocks(model, tokens, cuts, cache)
    attention = plain.patched(llama.scaled_dot_product_attention)
    monkeypatch.setattr(llama, "scaled_dot_product_attention", attention)
    theirs = [OracleCache(lambda: Oracle(score=plain.tova, **options)) for _ in model.layers]
    wanted = in_blocks(model, tokens, cuts, theirs)
    assert min(oracle.gap for layer in theirs for oracle in layer.oracles) > CLEAR
    np.testing.assert_allclose(np.array(logits), np.array(wanted), atol=2e-4, rtol=2e-4)
    for ours, layer in zip(cache, theirs, strict=True):
        compare(ours, layer.oracles, own=True)
    # It matters: what the full cache gives is something else.
    assert not np.allclose(np.array(logits), np.array(model(tokens)), atol=1e-2)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("budgets", [(5, 17), (17, 5), (7, 8)])
@pytest.mark.parametrize("as_array", [False, True])
def test_layers_of_unequal_length(monkeypatch, cuts, budgets, as_array):
    """A model makes one mask for all its layers, from the first one's cache; some as an array."""
    model, tokens = tiny_models.build("llama"), tokens_for(1, sum(cuts))
    cache = make_cache(model, load_policy("tova", budget=list(budgets), n_sink=2))
    if as_array:
        mask = cache[0].make_mask
        cache[0].make_mask = lambda n, **more: mask(n, **more | {"return_array": True})
    logits = in_blocks(model, tokens, cuts, cache)
    attention = plain.patched(llama.scaled_dot_product_attention)
    monkeypatch.setattr(llama, "scaled_dot_product_attention", attention)
    theirs = [OracleCache(lambda rows=rows: Oracle(rows, plain.tova, n_sink=2)) for rows in budgets]
    wanted = in_blocks(model, tokens, cuts, theirs)
    assert min(layer.oracles[0].gap for layer in theirs) > CLEAR
    np.testing.assert_allclose(np.array(logits), np.array(wanted), atol=2e-4, rtol=2e-4)
    for ours, layer in zip(cache, theirs, strict=True):
        compare(ours, layer.oracles, own=True)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("scope", ["layer", "head"])
def test_rows_of_a_models_own_tensors(monkeypatch, architecture, dtype, scope):
    """The oracle is fed with what the model itself computed, in its own type."""
    model = tiny_models.build(architecture, dtype)
    cache = make_cache(model, load_policy("tova", budget=8, n_sink=2, scope=scope))
    oracles = {id(layer): Oracle(8, plain.tova, n_sink=2, scope=scope) for layer in cache}
    notes = plain.record(monkeypatch, sys.modules[type(model).__module__], cache)
    in_blocks(model, tokens_for(1, 30), [14, 1, 1, 1, 5, 1, 1, 1, 1, 1, 3], cache)
    assert len(notes) == 11 * len(cache)
    tolerance = FLOATS[dtype]
    for layer, queries, keys, values, scale, output in notes:
        block = (as_numpy(array[0]) for array in (queries, keys, values))
        wanted = oracles[id(layer)].step(*block, scale)
        np.testing.assert_allclose(as_numpy(output[0]), wanted, atol=tolerance, rtol=tolerance)
    assert min(oracle.gap for oracle in oracles.values()) > CLEAR
    for layer in cache:
        compare(layer, [oracles[id(layer)]])
