"""``slack``: decoded tokens that are cut together, as a prompt's block is.

The oracle is that block: the same tokens fed at once to a cache without slack.
"""

import copy
import functools

import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from hypothesis import example, given, settings
from hypothesis import strategies as st

from velox_core import PolicyConfigError, UnsupportedModelError, VeloxCache, load_policy, make_cache

POLICIES = {
    "tova": {},
    "tova, compressed": {"positions": "compressed"},
    "h2o": {},
    "morphkv": {"window": 3},
    "streaming": {},
    "keys": {"queries": "keys"},
}


@functools.cache
def tiny(name="llama"):
    return tiny_models.build(name)


def policy_of(name, **options):
    first = name.split(",")[0]
    return load_policy("tova" if first == "keys" else first, **POLICIES[name], **options)


def tokens_of(n, seed=0):
    return np.random.default_rng(seed).integers(1, tiny_models.VOCAB, n).tolist()


def feed(model, cache, tokens):
    return model(mx.array([tokens]), cache=cache)[0]


def rows_of(cache):
    return [sorted(row) for layer in cache for row in layer.positions[0].tolist()]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=10)
@given(slack=st.integers(2, 7), prompt=st.integers(12, 30), blocks=st.integers(1, 5))
@example(slack=4, prompt=12, blocks=4)
def test_tokens_within_the_slack_are_a_block(name, slack, prompt, blocks):
    model, tokens = tiny(), tokens_of(prompt + slack * blocks, seed=slack)
    growing = make_cache(model, policy_of(name, budget=11, n_sink=1, slack=slack))
    whole = make_cache(model, policy_of(name, budget=11, n_sink=1))
    # The prompt is cut, so that the slack begins with the first decoded token.
    for cache in (growing, whole):
        feed(model, cache, tokens[:prompt])
        assert all(layer.positions.shape[-1] == 11 for layer in cache)
    for start in range(prompt, len(tokens), slack):
        wanted = feed(model, whole, tokens[start : start + slack])
        got = [feed(model, growing, [token]) for token in tokens[start : start + slack]]
        assert np.allclose(mx.concatenate(got), wanted, rtol=1e-3, atol=1e-4)
        assert all(layer._rows == 11 + slack for layer in growing)
    assert rows_of(growing) == rows_of(whole)
    assert growing[0].offset == len(tokens)


@pytest.mark.parametrize("name", POLICIES)
def test_a_slack_of_one_is_none(name):
    model, tokens = tiny(), tokens_of(40)
    made = [make_cache(model, policy_of(name, budget=9, n_sink=1, slack=n)) for n in (0, 1)]
    for token in tokens:
        a, b = (feed(model, cache, [token]) for cache in made)
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert rows_of(made[0]) == rows_of(made[1])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("back", [1, 2, 3, 5])
def test_any_of_the_block_can_be_taken_back(name, back):
    """All that came since rows went, across several tokens: then it is as if they never had."""
    model, tokens = tiny(), tokens_of(60)
    policy = policy_of(name, budget=9, n_sink=1, slack=6)
    cache = make_cache(model, policy)
    feed(model, cache, tokens[:20])
    for token in tokens[20:25]:
        feed(model, cache, [token])
    never = make_cache(model, policy)
    feed(model, never, tokens[:20])
    for token in tokens[20 : 25 - back]:
        feed(model, never, [token])
    copied = copy.deepcopy(cache)
    assert [layer.trim(back) for layer in copied] == [back, back]
    assert copied[0].offset == never[0].offset == 25 - back
    for token in tokens[30:45]:
        got, wanted = feed(model, copied, [token]), feed(model, never, [token])
        assert np.allclose(got, wanted, rtol=1e-3, atol=1e-4)
    assert rows_of(copied) == rows_of(never)


def test_sequences_of_unequal_length_have_no_slack():
    """One of a batch is cut at each step, as alone without slack, wherever rows are padded."""
    model = tiny()
    policy = load_policy("tova", budget=9, n_sink=1, slack=5)
    plain = load_policy("tova", budget=9, n_sink=1)
    alone = [make_cache(model, p) for p in (policy, policy, plain, plain)]
    prompts = [tokens_of(4, 1), tokens_of(30, 2)] * 2
    for cache, prompt in zip(alone, prompts, strict=True):
        feed(model, cache, prompt)
    pairs = [alone[:2], alone[2:]]
    merged = [[VeloxCache.merge(layers) for layers in zip(*pair, strict=True)] for pair in pairs]
    for step in range(12):
        token = mx.array([[step + 1], [step + 2]])
        a, b = (model(token, cache=cache) for cache in merged)
        if step < 5:
            assert np.allclose(a, b, rtol=1e-3, atol=1e-4)
        assert all(layer._rows <= 9 + 5 for layer in merged[0])


def test_what_is_held_does_not_grow():
    model, sizes = tiny(), []
    cache = make_cache(model, load_policy("morphkv", budget=16, window=4, slack=8))
    for step in range(200):
        mx.eval(feed(model, cache, [1 + step % 50]))
        if step in (79, 199):  # a multiple of the slack between them
            mx.clear_cache()
            sizes.append(mx.get_active_memory())
    assert abs(sizes[1] - sizes[0]) < 4096


def test_what_does_not_go_with_it():
    with pytest.raises(PolicyConfigError, match="slack=-1"):
        load_policy("tova", slack=-1)
    policy = load_policy("tova", slack=4)
    with pytest.raises(UnsupportedModelError, match="slack=4 doesn't go with lookback"):
        make_cache(tiny(), policy, lookback=4)
    with pytest.raises(UnsupportedModelError, match="slack=4 doesn't go with the model deepseek"):
        make_cache(tiny("deepseek_v3"), policy)
