"""Every model file of the installed mlx-lm: it runs as it does without velox, or is refused with
the reason. Nothing is skipped."""

import functools
from types import SimpleNamespace
from typing import ClassVar

import attrs
import conftest
import mlx.core as mx
import mlx_lm.models.gemma2
import numpy as np
import pytest
import tiny_models
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from velox_core import (
    Policy,
    Rows,
    UnobservedAttentionError,
    UnsupportedModelError,
    VeloxCache,
    VeloxError,
    hookimpl,
    load_policy,
    make_cache,
)
from velox_core.attention import NAME
from velox_core.model import velox_caches

RUNS, REFUSED, UNBUILDABLE = "runs", "refused", "unbuildable"

#: What velox refuses, each with part of its reason.
REASONS = {
    "afm7": "its reuse layers take the number of rows for the position",
    "deepseek_v32": "its indexer picks rows by their place in the cache",
    "deepseek_v41": "a layer has a cache of type LayerCache",
    "glm_moe_dsa": "its indexer picks rows by their place in the cache",
    "mamba": "its layers have ArraysCache, which don't grow",
    "mamba2": "its layers have ArraysCache, which don't grow",
    "minimax_m3_vl": "its indexer picks rows by their place in the cache",
    "phi3small": "its block-sparse layers mask rows by their place in the cache",
    "plamo2": "can't be observed",
    "recurrent_gemma": "its layers have ArraysCache, RotatingKVCache, which don't grow",
    "rwkv7": "its layers have ArraysCache, which don't grow",
}
#: What no mlx-lm model can be made of here; of these ``muse_spark`` can where there is Metal.
CANT_BE_BUILT = {"olmo", "muse_spark"} - ({"muse_spark"} if mx.metal.is_available() else set())

BUDGET, PROMPT, STEPS = 8, 20, 50


def tokens_of(n, seed=0):
    return mx.array(np.random.default_rng(seed).integers(1, 64, (1, n)))


@functools.cache
def outcome(name):
    """What becomes of an architecture: its kind, and the reason where it doesn't run."""
    if name in tiny_models.UNBUILDABLE:
        return UNBUILDABLE, tiny_models.UNBUILDABLE[name]
    model = tiny_models.build(name)
    try:
        roomy = make_cache(model, load_policy("tova", budget=100))
    except UnsupportedModelError as error:
        return REFUSED, str(error)
    assert_own_classes(make_prompt_cache(model), roomy)
    assert_as_without_velox(model, roomy)
    assert_bounded_and_finite(model, make_cache(model, load_policy("tova", budget=BUDGET)))
    return RUNS, ""


def assert_own_classes(theirs, ours):
    """Plain caches were replaced, and nothing else."""
    replaced = 0
    for one, other in zip(theirs, ours, strict=True):
        if isinstance(one, CacheList):
            assert type(other) is CacheList
            replaced += assert_own_classes(one.caches, other.caches)
        elif type(one) is KVCache:
            assert type(other) is VeloxCache
            replaced += 1
        else:
            assert type(other) is type(one)
    return replaced


def assert_as_without_velox(model, cache):
    """With room for all: a prompt in two blocks, then single tokens, bit for bit."""
    tokens = tokens_of(26)
    assert mx.array_equal(logits_of(model, cache, tokens), logits_of(model, None, tokens))


def logits_of(model, cache, tokens):
    cache = cache or make_prompt_cache(model)
    blocks = [(0, 12), (12, 20), *((i, i + 1) for i in range(20, tokens.shape[1]))]
    logits = []
    for start, end in blocks:
        logits.append(model(tokens[:, start:end], cache=cache))
        if end <= 20:  # as mlx-lm does after each block of a prompt
            mx.eval(logits, [layer.state for layer in cache])
    return mx.concatenate(logits, axis=1)


def assert_bounded_and_finite(model, cache):
    """A prompt beyond the budget, and 50 tokens."""
    logits = model(tokens_of(PROMPT), cache=cache)
    mx.eval(logits, [layer.state for layer in cache])
    finite = [mx.isfinite(logits).all()]
    for _ in range(STEPS):
        logits = model(mx.argmax(logits[:, -1:], axis=-1), cache=cache)
        finite.append(mx.isfinite(logits).all())
        mx.async_eval(logits)
    assert mx.stack(finite).all()
    used = [layer for layer in velox_caches(cache) if not layer.empty()]
    assert used
    for layer in used:
        assert layer.offset == layer.tokens_seen == PROMPT + STEPS
        assert layer.size() == layer.tokens_kept == BUDGET
        assert layer.keys.shape[2] <= BUDGET + 1
        positions = layer.positions
        assert positions.shape[-1] == BUDGET
        assert positions.max().item() == PROMPT + STEPS - 1


@pytest.mark.parametrize("name", tiny_models.architectures())
def test_runs_or_is_refused(name):
    kind, reason = outcome(name)
    assert (kind == REFUSED) == (name in REASONS), reason
    if kind == REFUSED:
        assert name in reason
        assert REASONS[name] in reason


def test_the_count(capsys):
    """Each of mlx-lm's architectures is of one kind, and these are all."""
    kinds = {RUNS: [], REFUSED: [], UNBUILDABLE: []}
    for name in tiny_models.architectures():
        kinds[outcome(name)[0]].append(name)
    with capsys.disabled():
        print(f"\n{', '.join(f'{len(names)} {kind}' for kind, names in kinds.items())}")
        for name in kinds[REFUSED] + kinds[UNBUILDABLE]:
            print(f"  {name}: {outcome(name)[1]}")
    assert set(kinds[REFUSED]) == set(REASONS)
    assert set(kinds[UNBUILDABLE]) == CANT_BE_BUILT
    assert len(kinds[RUNS]) == len(tiny_models.architectures()) - len(REASONS) - len(CANT_BE_BUILT)
    assert len(kinds[RUNS]) >= 113


# Where only the observation is the problem


UNOBSERVED = {
    "keys for queries": functools.partial(load_policy, "tova", queries="keys"),
    "no queries": functools.partial(load_policy, "streaming"),
}


@pytest.mark.parametrize("how", UNOBSERVED)
def test_plamo2_without_its_queries(how):
    model, policy = tiny_models.build("plamo2"), UNOBSERVED[how]
    cache = make_cache(model, policy(budget=100))
    assert_own_classes(make_prompt_cache(model), cache)
    assert_as_without_velox(model, cache)
    assert_bounded_and_finite(model, make_cache(model, policy(budget=BUDGET)))


@pytest.mark.parametrize("name", sorted(REASONS.keys() - {"plamo2"}))
def test_refused_whatever_the_policy(name):
    for policy in UNOBSERVED.values():
        with pytest.raises(UnsupportedModelError) as error:
            make_cache(tiny_models.build(name), policy(budget=8))
        assert REASONS[name] in str(error.value)


# What is refused later, since only the attention itself shows it


def run(model, policy):
    cache = make_cache(model, policy)
    for n in (12, 1, 1):
        mx.eval(model(tokens_of(n), cache=cache), [layer.state for layer in cache])
    return cache


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear", "mistral4"])
def test_latent_attention_knows_only_its_newest_queries(name):
    model = tiny_models.build(name)
    with pytest.raises(UnobservedAttentionError, match=r"\(MLA\).*older queries of Remem.*TOVA"):
        make_cache(model, conftest.Remembering(budget=8))
    run(model, load_policy("h2o", budget=8))


def test_plamo_has_no_choice_a_head():
    model = tiny_models.build("plamo")
    with pytest.raises(UnsupportedModelError, match=r"head can't be made.*scope='layer'"):
        make_cache(model, load_policy("tova", budget=8, scope="head"))
    run(model, load_policy("streaming", budget=8, scope="head"))


def test_a_window_over_rows_with_gaps():
    """mlx-lm gives mistral3's sliding layers plain caches: right while nothing has gone."""
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    model = tiny_models.build("mistral3", **sliding)
    assert_as_without_velox(model, make_cache(model, load_policy("tova", budget=100)))
    with pytest.raises(UnsupportedModelError, match=r"Layer 0 .*sliding window.*other rows"):
        run(model, load_policy("tova", budget=8))


# What a policy is shown is what the model attends with


@attrs.frozen(eq=False, kw_only=True)
class Watching(Policy):
    """Writes down the attention that it is shown, by layer."""

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 1
    every_step: ClassVar[bool] = True
    shown: ClassVar[dict] = {}

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        weights = rows.attention(rows.n_new)
        self.shown.setdefault(rows.layer, []).append(np.array(weights))
        return rows.pool(weights[:, :, -1:]).squeeze(2)


@pytest.fixture
def shown():
    Watching.shown.clear()
    return Watching.shown


def softmax(logits):
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def as_numpy(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


def weights_of(queries, keys, scale, mask, sinks):
    """What ``scaled_dot_product_attention`` weighs the values with, given its own arguments."""
    queries, keys = as_numpy(queries), as_numpy(keys)
    n, rows = queries.shape[2], keys.shape[2]
    keys = np.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)
    logits = queries @ keys.swapaxes(-1, -2) * scale
    if isinstance(mask, str):
        assert mask == "causal"
        mask = mx.array(np.arange(rows) <= np.arange(rows - n, rows)[:, None])
    if mask is not None:
        allowed = mask.dtype == mx.bool_
        mask = np.array(mask) if allowed else as_numpy(mask)
        logits = np.where(mask, logits, -np.inf) if allowed else logits + mask
    if sinks is None:
        return softmax(logits)
    sinks = np.broadcast_to(as_numpy(sinks)[:, None, None], (*logits.shape[:-1], 1))
    return softmax(np.concatenate([logits, sinks], axis=-1))[..., :-1]


def feed(model, cache):
    """Blocks and single tokens, beyond the budget; all of it shown to the policy in the end."""
    for n in (5, 9, 1, 1, 3, 1):
        mx.eval(model(tokens_of(n, seed=n), cache=cache))
    mx.eval([layer.state for layer in cache])


#: Sinks (in full layers and in all), latent attention of both kinds, queries in another type than
#: the keys, KV heads tiled instead of repeated.
WATCHED = ("llama", "gpt_oss", "mimo_v2_flash", "deepseek_v3", "mistral4", "stablelm", "plamo")


@pytest.mark.parametrize("name", WATCHED)
def test_shows_the_attention(name, shown, monkeypatch):
    model = tiny_models.build(name)
    cache = make_cache(model, Watching(budget=9, n_sink=1))
    module = __import__(type(model).__module__, fromlist=["Model"])
    attend, real = getattr(module, NAME), {}

    def watched(queries, keys, values, cache, scale, mask, sinks=None, **more):
        given = {} if sinks is None else {"sinks": sinks}
        output = attend(queries, keys, values, cache=cache, scale=scale, mask=mask, **given, **more)
        if isinstance(cache, VeloxCache):
            weights = weights_of(queries, keys, scale, mask, sinks)
            # They are the real ones: with them the values give the attention's output.
            group = queries.shape[1] // values.shape[1]
            wanted = weights @ np.repeat(as_numpy(values), group, axis=1)
            assert np.allclose(as_numpy(output), wanted, rtol=1e-3, atol=1e-4)
            real.setdefault(cache.layer, []).append(weights)
        return output

    monkeypatch.setattr(module, NAME, watched)
    feed(model, cache)
    assert len(real) == len(list(velox_caches(cache)))
    assert_shown(shown, real)
    if name in ("gpt_oss", "mimo_v2_flash"):  # what sinks take was seen
        sums = np.concatenate([w.sum(-1).ravel() for layer in real.values() for w in layer])
        assert sums.min() < 0.9


def assert_shown(shown, real):
    assert shown.keys() == real.keys()
    for layer, blocks in real.items():
        assert len(shown[layer]) == len(blocks) == 6
        for ours, wanted in zip(shown[layer], blocks, strict=True):
            assert ours.shape == wanted.shape
            assert np.allclose(ours, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_shows_softcapped_attention(kv_heads, shown, monkeypatch):
    """Gemma 2 has no function to wrap: its softmax itself is looked at."""
    cap = 1.5  # so low that it matters for the small logits of a tiny model
    changes = {"num_key_value_heads": kv_heads}
    model = tiny_models.build("gemma2", attn_logit_softcapping=cap, **changes)
    cache = make_cache(model, Watching(budget=9, n_sink=1))
    real, logits = {}, []

    def softmax(scores, **options):
        weights = mx.softmax(scores, **options)
        layers = len(model.layers)
        calls = sum(map(len, real.values()))
        flat = (1, 4, *scores.shape[-2:])
        real.setdefault(calls % layers, []).append(as_numpy(weights.reshape(flat)))
        logits.append(as_numpy(mx.where(scores < -1e30, 0, scores)))
        return weights

    names = {name: getattr(mx, name) for name in dir(mx)}
    monkeypatch.setattr(mlx_lm.models.gemma2, "mx", SimpleNamespace(**names | {"softmax": softmax}))
    feed(model, cache)
    assert_shown(shown, real)
    assert max(np.abs(some).max() for some in logits) > 0.9 * cap  # the cap was at work


def test_errors_are_velox_errors():
    """One type to catch for all refusals."""
    assert issubclass(UnobservedAttentionError, UnsupportedModelError)
    assert issubclass(UnsupportedModelError, VeloxError)
