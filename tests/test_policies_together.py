"""The four policies beside each other: what sets them apart, and what none of them may do."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles_more import SCOPES, Stream, feed, kept, random_stream, run

from velox_core import PolicyConfigError, VeloxCache, load_policy, make_cache

ALL = {
    "tova": {},
    "h2o": {},
    "morphkv": {"window": 4},
    "streaming": {},
}
POLICIES = pytest.mark.parametrize(("name", "options"), ALL.items(), ids=ALL)


def rows_of(policy, stream: Stream) -> set[int]:
    return set(run(policy, stream).ravel().tolist())


# What the text asks for ------------------------------------------------------------------------


def topic_shift(seed: int) -> tuple[Stream, set[int]]:
    """A long part about one thing, then some rows about another and queries after those: weaker,
    and each off by as much as it asks. With it, the rows that matter now."""
    rng = np.random.default_rng(seed)
    first, then, matter, rest = 48, 200, 16, 96
    shift = first + then
    keys, queries = rng.standard_normal((2, 1, 1, shift + matter + rest, 16))
    keys[..., :first, 0] += 4
    queries[..., :shift, 0] += 4
    keys[..., shift : shift + matter, 1] += 4
    queries[..., shift:, 1] += 1
    return Stream(keys, queries, [shift] + [1] * (matter + rest)), {*range(shift, shift + matter)}


def test_after_a_topic_shift_few_queries_are_better_than_all_or_one(record_property):
    policies = {
        "h2o": load_policy("h2o", budget=64, n_sink=0),
        "tova": load_policy("tova", budget=64, n_sink=0),
        "morphkv 8": load_policy("morphkv", budget=64, n_sink=0, window=8),
        "morphkv 32": load_policy("morphkv", budget=64, n_sink=0, window=32),
    }
    rates = dict.fromkeys(policies, 0.0)
    for seed in range(6):
        stream, matter = topic_shift(seed)
        for name, policy in policies.items():
            rates[name] += len(rows_of(policy, stream) & matter) / len(matter) / 6
    print("rows that matter now and are still there:", rates)
    record_property("rates", rates)
    assert rates["h2o"] < 0.1
    assert 0.25 < rates["tova"] < 0.7
    assert rates["morphkv 8"] > rates["tova"] + 0.2
    assert rates["morphkv 32"] > rates["tova"] + 0.2
    assert min(rates["morphkv 8"], rates["morphkv 32"]) > 0.8


def test_on_a_stable_stream_all_keep_the_same():
    # Half of the rows that fit are asked for all the time; of the others, the newer the better.
    tokens, budget = 160, 32
    keys = np.zeros((1, 1, tokens, 2))
    keys[..., :16, 0] = 6
    keys[..., 16:, 0] = np.linspace(-4, 0, tokens - 16)
    queries = np.zeros((1, 1, tokens, 2))
    queries[..., 0] = 2
    stream = Stream(keys, queries, [40, 7, 1, 9] + [1] * (tokens - 57))
    wanted = {*range(16), *range(tokens - 16, tokens)}
    for name, options in (
        ("tova", {}),
        ("h2o", {}),
        ("morphkv", {"window": 8}),
        ("morphkv", {"window": 16}),
    ):
        assert rows_of(load_policy(name, budget=budget, n_sink=0, **options), stream) == wanted


@pytest.mark.parametrize("scope", ["layer", "head"])
@pytest.mark.parametrize("blocks", [[9, 1], [10], [3, 3, 3, 1]])
def test_a_row_that_the_query_ignores_goes_before_one_that_it_attends_to(blocks, scope):
    for ignored in range(9):
        keys, queries = np.ones((1, 2, 10, 4)), np.ones((1, 4, 10, 4))
        keys[:, :, ignored] = -1
        policy = load_policy("tova", budget=9, n_sink=0, scope=scope)
        assert rows_of(policy, Stream(keys, queries, blocks)) == set(range(10)) - {ignored}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scope=SCOPES)
def test_tovas_scores_carry_nothing_over(seed, scope):
    one = random_stream(seed, 1, 2, 2, [27, 1], mx.float32)
    other = random_stream(seed + 1, 1, 2, 2, [27, 1], mx.float32)
    other = Stream(one.keys, other.queries, one.blocks)
    other.queries[:, :, -1] = one.queries[:, :, -1]
    policy = load_policy("tova", budget=27, n_sink=2, scope=scope)
    np.testing.assert_array_equal(run(policy, one), run(policy, other))
    # H2O does carry over, and so shows that these streams could tell.
    policy = load_policy("h2o", budget=27, n_sink=2, scope=scope)
    sums = []
    for stream in (one, other):
        cache = VeloxCache(policy, 27)
        list(feed(cache, stream))
        sums.append(np.array(cache.state[3]))
    assert not np.allclose(*sums)


# Ties, and sameness ----------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [[20], [8, 4] + [1] * 8, [1] * 20])
@pytest.mark.parametrize("name", ["tova", "morphkv", "streaming"])
def test_equal_scores_fall_to_the_older_row(name, blocks):
    same = np.ones((2, 2, 20, 4))
    policy = load_policy(name, budget=8, n_sink=2, **ALL[name])
    assert rows_of(policy, Stream(same, same, blocks)) == {0, 1, *range(14, 20)}


@pytest.mark.parametrize("blocks", [[20], [18, 1, 1], [4, 15, 1]])
def test_h2os_equal_sums_fall_to_the_older_row(blocks):
    # Rows that no query gives anything, not even their own: their sums are 0, whatever their age.
    keys, queries = np.ones((1, 1, 20, 4)), np.ones((1, 1, 20, 4))
    keys[:, :, [3, 6, 7, 16]] = -1000
    policy = load_policy("h2o", budget=18, n_sink=0, recent=1)
    assert rows_of(policy, Stream(keys, queries, blocks)) == set(range(20)) - {3, 6}


@POLICIES
@pytest.mark.parametrize("scope", ["layer", "head"])
def test_identical_runs_keep_identical_rows(name, options, scope):
    stream = random_stream(7, 2, 2, 2, [30, 5] + [1] * 20, mx.bfloat16)
    runs = []
    for _ in range(2):
        policy = load_policy(name, budget=12, scope=scope, **options)
        cache = VeloxCache(policy, 12)
        list(feed(cache, stream))
        runs.append(cache.state[:4])
    for one, other in zip(*runs, strict=True):
        assert one is other is None or mx.array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "options", "recent"),
    [("tova", {}, 1), ("h2o", {}, 8), ("morphkv", {"window": 6}, 6), ("streaming", {}, 13)],
)
def test_sinks_and_windows_survive_thousands_of_evictions(name, options, recent):
    steps = 2400
    stream = random_stream(3, 1, 2, 1, [20] + [1] * steps, mx.float32)
    policy = load_policy(name, budget=16, n_sink=3, **options)
    cache = VeloxCache(policy, 16)
    for i, _ in enumerate(feed(cache, stream)):
        if i % 300 == 0 or i == steps:
            newest = 20 + i
            for rows in kept(cache).reshape(-1, 16).tolist():
                assert len(set(rows)) == 16
                assert set(rows) >= {0, 1, 2, *range(newest - recent, newest)}
        else:
            mx.async_eval(cache.keys)
    assert cache.tokens_seen == 20 + steps


# Batches, and layers of unequal budget ---------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=3),
    block=st.integers(1, 12),
    steps=st.integers(0, 8),
    scope=SCOPES,
    policy=st.sampled_from([("tova", {}), ("h2o", {}), ("morphkv", {"window": 4})]),
    budget=st.integers(8, 14),
)
def test_a_padded_batch_keeps_what_each_sequence_alone_keeps(
    seed, lengths, block, steps, scope, policy, budget
):
    name, options = policy
    policy = load_policy(name, budget=budget, n_sink=2, scope=scope, **options)
    longest = max(lengths)
    bounds = [*range(0, longest, block), longest]
    blocks = [stop - start for start, stop in pairwise(bounds)] + [1] * steps
    padded = random_stream(seed, len(lengths), 2, 2, blocks, mx.float32)

    batch = VeloxCache.merge([VeloxCache(policy, budget) for _ in lengths])
    padding = [longest - length for length in lengths]
    batch.prepare(lengths=lengths, right_padding=padding)
    for i, _ in enumerate(feed(batch, padded)):
        if i == len(bounds) - 2:
            batch.finalize()

    for i, length in enumerate(lengths):
        real = [*range(length), *range(longest, longest + steps)]
        own = [min(stop, length) - start for start, stop in pairwise(bounds) if start < length]
        alone = Stream(
            padded.keys[i : i + 1, :, real], padded.queries[i : i + 1, :, real], own + [1] * steps
        )
        np.testing.assert_array_equal(kept(batch.extract(i)), run(policy, alone))


@POLICIES
def test_layers_of_unequal_budget_take_several_tokens_at_once(name, options, monkeypatch):
    model = tiny_models.build("llama")
    cache = make_cache(model, load_policy(name, budget=[9, 22], **options))
    module = tiny_models.mlx_lm.models.llama
    velox = module.scaled_dot_product_attention
    seen = []

    def checked(queries, keys, values, cache, scale, mask, **more):
        output = velox(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)
        n, rows = queries.shape[2], keys.shape[2]
        causal = mx.arange(rows) <= mx.arange(rows - n, rows)[:, None]
        repeat = queries.shape[1] // keys.shape[1]
        keys, values = (mx.repeat(x, repeat, axis=1) for x in (keys, values))
        weights = mx.softmax(
            mx.where(causal, queries @ keys.swapaxes(2, 3) * scale, -mx.inf), axis=-1
        )
        assert mx.allclose(output, weights @ values, atol=1e-5)
        seen.append(rows)
        return output

    monkeypatch.setattr(module, "scaled_dot_product_attention", checked)
    for n in (12, 7, 1, 1, 5):
        model(mx.random.randint(0, 100, (1, n)), cache=cache)
        assert [layer.size() for layer in cache] == [9, min(22, cache[1].tokens_seen)]
    assert seen == [12, 12, 16, 19, 10, 20, 10, 21, 14, 26]


@pytest.mark.parametrize("budget", [[9, 22], [22, 9]])
@POLICIES
def test_layers_of_unequal_budget_in_a_padded_batch(name, options, budget):
    model = tiny_models.build("llama")
    policy = load_policy(name, budget=budget, **options)
    lengths, after = [19, 12], [1, 1, 3, 4]
    mx.random.seed(0)
    prompts = [mx.random.randint(0, 100, (1, length)) for length in lengths]
    answers = mx.random.randint(0, 100, (2, sum(after)))

    def read(cache, tokens, blocks):
        parts = mx.split(tokens, np.cumsum(blocks)[:-1].tolist(), axis=1)
        return mx.concatenate([model(part, cache=cache) for part in parts], axis=1)

    pairs = zip(*[make_cache(model, policy) for _ in lengths], strict=True)
    batch = [VeloxCache.merge(pair) for pair in pairs]
    for layer in batch:
        layer.prepare(lengths=lengths, right_padding=[0, 7])
    padded = mx.concatenate([prompts[0], mx.pad(prompts[1], [(0, 0), (0, 7)])])
    prompt_logits = read(batch, padded, [7, 7, 5])
    for layer in batch:
        layer.finalize()
    answer_logits = read(batch, answers, after)

    for i, blocks in enumerate([[7, 7, 5], [7, 5]]):
        alone = make_cache(model, policy)
        wanted = read(alone, prompts[i], blocks)[0]
        assert mx.allclose(prompt_logits[i, : lengths[i]], wanted, atol=1e-4)
        assert mx.allclose(answer_logits[i], read(alone, answers[i : i + 1], after)[0], atol=1e-4)


@POLICIES
def test_a_budget_for_another_number_of_layers_is_refused(name, options):
    policy = load_policy(name, budget=[16, 16, 16], **options)
    with pytest.raises(PolicyConfigError, match="budget has 3 numbers and the model has 2 layers"):
        make_cache(tiny_models.build("llama"), policy)


@POLICIES
def test_keys_stand_in_for_queries_where_asked(name, options):
    stream = random_stream(5, 2, 2, 1, [30, 5] + [1] * 10, mx.float32)
    same = Stream(stream.keys, stream.keys, stream.blocks)
    rows = [
        run(load_policy(name, budget=12, queries="keys", **options), stream),
        run(load_policy(name, budget=12, **options), same),
    ]
    np.testing.assert_array_equal(*rows)
