"""mlx-lm's ``kv_bits`` and a budget together: a quantised cache that goes on evicting."""

import copy
import functools
from typing import ClassVar

import attrs
import conftest
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from velox_core import (
    Policy,
    Rows,
    VeloxCache,
    VeloxError,
    hookimpl,
    load_policy,
    make_cache,
)
from velox_core.quantized import QuantizedVeloxCache

GROUP = 32  # the smallest that MLX has, so the tiny model's heads are as wide
BITS = (4, 8)

POLICIES = {
    "tova": functools.partial(load_policy, "tova"),
    "h2o": functools.partial(load_policy, "h2o"),
    "morphkv": functools.partial(load_policy, "morphkv", window=4),
    "streaming": functools.partial(load_policy, "streaming"),
    "remembering": conftest.Remembering,
}


def policy_of(name, budget, scope="layer"):
    return POLICIES[name](budget=budget, scope=scope, n_sink=1)


@functools.cache
def tiny(name="llama", **changes):
    return tiny_models.build(name, **{"head_dim": GROUP} | changes)


def prompt_of(n, seed=0):
    return np.random.default_rng(seed).integers(1, tiny_models.VOCAB, n).tolist()


def feed(model, cache, tokens):
    logits = model(mx.array([tokens]), cache=cache)
    mx.eval(logits)
    return logits


def quantize(cache, bits=8):
    return [layer.to_quantized(group_size=GROUP, bits=bits) for layer in cache]


def generate(model, cache, prompt, steps, **options):
    """Tokens and logarithms from mlx-lm's loop, which puts quantised caches into the list."""
    given = generate_step(
        mx.array(prompt),
        model,
        prompt_cache=cache,
        max_tokens=steps,
        kv_group_size=GROUP,
        **options,
    )
    tokens, logprobs = zip(*[(token, np.array(odds)) for token, odds in given], strict=True)
    return list(tokens), np.stack(logprobs)


def positions_of(cache):
    return [np.sort(np.array(layer.positions)) for layer in cache]


# Through mlx-lm's own loop


@st.composite
def runs(draw):
    prompt, steps = draw(st.integers(1, 30)), draw(st.integers(1, 20))
    return {
        "prompt": prompt,
        "steps": steps,
        "start": draw(st.integers(0, prompt + steps + 5)),
        "prefill": draw(st.sampled_from([1, 4, 64])),
        "bits": draw(st.sampled_from(BITS)),
        "scope": draw(st.sampled_from(["layer", "head"])),
    }


RUN = {"prompt": 20, "steps": 12, "start": 0, "prefill": 8, "bits": 8, "scope": "layer"}


@settings(max_examples=20)
@given(run=runs())
@example(run=RUN)
@example(run=RUN | {"bits": 4, "start": 25, "scope": "head"})
def test_below_the_budget_it_is_mlx_lms_own(run):
    """The same tokens, logarithms and stored numbers, bit for bit."""
    model, policy = tiny(), policy_of("tova", 64, run["scope"])
    ours, theirs = make_cache(model, policy), make_prompt_cache(model)
    options = {
        "kv_bits": run["bits"],
        "quantized_kv_start": run["start"],
        "prefill_step_size": run["prefill"],
    }
    prompt, steps = prompt_of(run["prompt"]), run["steps"]
    tokens, logprobs = generate(model, ours, prompt, steps, **options)
    wanted, wanted_logprobs = generate(model, theirs, prompt, steps, **options)
    assert tokens == wanted
    assert np.array_equal(logprobs, wanted_logprobs)
    quantized = run["start"] <= run["prompt"] + run["steps"]
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is (QuantizedVeloxCache if quantized else VeloxCache)
        assert type(other) is (QuantizedKVCache if quantized else KVCache)
        assert one.offset == other.offset == one.size()
        for left, right in zip(one.state[:2], other.state[:2], strict=True):
            left, right = (x if isinstance(x, (tuple, list)) else (x,) for x in (left, right))
            right = [array[:, :, : other.offset] for array in right]  # without what is room
            assert all(map(mx.array_equal, left, right))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("start", [0, 5, 16, 17, 24, 30])
def test_before_at_and_after_the_first_eviction(start, bits):
    """Eviction starts with token 17. With numbers of a few bits other rows may stay than with all
    of them, but as many, and it goes on."""
    model, prompt = tiny(), prompt_of(10)
    for name in POLICIES:
        policy = policy_of(name, 16, "head")
        ours, plain = make_cache(model, policy), make_cache(model, policy)
        options = {"kv_bits": bits, "quantized_kv_start": start, "prefill_step_size": 4}
        _, logprobs = generate(model, ours, prompt, 24, **options)
        assert np.isfinite(logprobs).all()
        assert all(type(layer) is QuantizedVeloxCache for layer in ours)
        for layer in ours:
            assert (layer.offset, layer.size(), layer.bits) == (34, 16, bits)
            assert layer.tokens_kept == 16
            positions = np.array(layer.positions)
            assert positions.shape == (1, 2, 16)
            assert (positions == 33).any(axis=-1).all()
            assert (positions == 0).any(axis=-1).all()
            assert all(array.shape[2] == 16 for array in layer.state[0])
        if name == "streaming":  # what is kept doesn't hang on the numbers
            generate(model, plain, prompt, 24)
            assert all(map(np.array_equal, positions_of(ours), positions_of(plain)))


@attrs.frozen(eq=False, kw_only=True)
class Watching(Policy):
    """Writes down the attention that it is shown."""

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 1
    every_step: ClassVar[bool] = True
    shown: ClassVar[list] = [[], []]  # by layer

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        weights = rows.attention(rows.n_new)
        self.shown[rows.layer].append(np.array(weights))
        return rows.pool(weights[:, :, -1:]).squeeze(2)


@pytest.mark.parametrize("bits", BITS)
def test_rows_are_scored_by_the_keys_that_are_held(bits, monkeypatch):
    """What a policy is shown is the attention over the quantised keys, which is the model's."""
    model, real = tiny(), [[], []]
    for shown in Watching.shown:
        shown.clear()
    cache = quantize(make_cache(model, Watching(budget=9, n_sink=1)), bits)
    attend = llama.scaled_dot_product_attention

    def watched(queries, keys, values, cache, scale, mask):
        keys_, values_ = (
            mx.dequantize(*part, group_size=GROUP, bits=bits) for part in (keys, values)
        )
        exact = queries * scale  # mlx-lm's function scales the array itself
        output = attend(queries, keys, values, cache=cache, scale=scale, mask=mask)
        keys_, values_ = (mx.repeat(part, 2, axis=1) for part in (keys_, values_))
        logits = exact @ keys_.swapaxes(-1, -2)
        n, rows = logits.shape[-2:]
        causal = mx.arange(rows) <= mx.arange(rows - n, rows)[:, None]
        weights = mx.softmax(mx.where(causal, logits, -mx.inf), axis=-1)
        assert np.allclose(output, weights @ values_, rtol=1e-3, atol=1e-4)
        real[cache.layer].append(np.array(weights))
        return output

    monkeypatch.setattr(llama, "scaled_dot_product_attention", watched)
    for n in (5, 9, 1, 1, 3, 1):
        feed(model, cache, prompt_of(n, seed=n))
    mx.eval([layer.state for layer in cache])
    assert [len(shown) for shown in Watching.shown] == [6, 6]
    for wanted, ours in zip(real[0] + real[1], Watching.shown[0] + Watching.shown[1], strict=True):
        assert ours.shape == wanted.shape
        assert np.allclose(ours, wanted, rtol=1e-3, atol=1e-5)


# to_quantized


@pytest.mark.parametrize("reading", [False, True])
@pytest.mark.parametrize("fed", [[5], [30], [30, 1], [30, 1, 1], [7, 9, 3]])
@pytest.mark.parametrize("name", POLICIES)
def test_to_quantized_keeps_all_there_is(name, fed, reading):
    """Before, in the middle of and after an eviction, read in between or not: the rows, their
    positions and scores, and what comes next."""
    model = tiny()
    cache = make_cache(model, policy_of(name, 16, "head"))
    for i, n in enumerate(fed):
        feed(model, cache, prompt_of(n, seed=i))
    if reading:
        mx.eval([layer.state for layer in cache])
    wanted = copy.deepcopy(cache)
    ours = quantize(cache)
    follow = copy.deepcopy(ours)
    for one, other in zip(ours, wanted, strict=True):
        assert isinstance(one, VeloxCache)
        assert one.offset == other.offset == sum(fed)
        state, plain = one.state, other.state
        for packed, rows in zip(state[:2], plain[:2], strict=True):
            # Which row goes may be decided by quantised keys, so rows are paired by position.
            mine = {p: i for i, p in enumerate(np.array(state[2])[0, 0].tolist())}
            other_rows = np.array(plain[2])[0, 0].tolist()
            pairs = [(mine[p], i) for i, p in enumerate(other_rows) if p in mine]
            assert len(pairs) >= len(other_rows) - 1
            left, right = map(list, zip(*pairs, strict=True))
            back = mx.dequantize(*packed, group_size=GROUP, bits=8)
            again = mx.dequantize(*mx.quantize(rows, GROUP, 8), group_size=GROUP, bits=8)
            assert mx.array_equal(back[0, 0, mx.array(left)], again[0, 0, mx.array(right)])
        assert one.nbytes < other.nbytes
    # What wasn't read in between goes on in the same way.
    for token in prompt_of(6, seed=9):
        logits = feed(model, ours, [token]), feed(model, follow, [token])
        assert np.allclose(*logits, rtol=1e-3, atol=1e-3)  # its rows may be in another order
    assert all(map(np.array_equal, positions_of(ours), positions_of(follow)))
    assert all(layer.size() == min(16, sum(fed) + 6) for layer in ours)


def test_an_empty_one():
    """Quantised before anything came (``quantized_kv_start=0`` and a prompt cache made before)."""
    model, policy = tiny(), policy_of("h2o", 16)
    ours = quantize(make_cache(model, policy))
    assert ours[0].empty()
    theirs = [QuantizedKVCache(group_size=GROUP, bits=8) for _ in ours]
    for block in (prompt_of(9), [5], [6]):
        assert mx.array_equal(feed(model, ours, block), feed(model, theirs, block))
    feed(model, ours, prompt_of(20))
    assert ours[0].size() == 16


def test_trim_is_exact():
    """The newest block's rows, a row written over another one's place among them."""
    model, policy = tiny(), policy_of("h2o", 16)
    for block in ([5], [5, 6, 7]):
        cache = make_cache(model, policy)
        feed(model, cache, prompt_of(30))
        ours, plain = quantize(cache), quantize(copy.deepcopy(cache))
        for some in (ours, plain):
            feed(model, some, [9])
        feed(model, ours, block)
        assert [layer.trim(len(block)) for layer in ours] == [len(block)] * 2
        assert [layer.trim(1) for layer in ours] == [0, 0]
        assert np.allclose(feed(model, ours, [8]), feed(model, plain, [8]), rtol=1e-3, atol=1e-3)
        assert all(map(np.array_equal, positions_of(ours), positions_of(plain)))


def test_less_memory():
    """What it is for: a quarter of float32's bytes and a bit more, and the report says so."""
    model = tiny()
    cache = make_cache(model, policy_of("streaming", 256))
    feed(model, cache, prompt_of(300))
    plain, ours = cache[0].nbytes, quantize(cache)[0]
    assert 0.25 < ours.nbytes / plain < 0.36
    assert ours.kept_bytes == ours.nbytes
    assert ours.full_bytes == pytest.approx(2 * ours.nbytes, rel=0.05)  # 512 rows of it for 300


# Saving


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["tova", "h2o", "morphkv"])
def test_saved_and_loaded(name, bits, tmp_path):
    """By mlx-lm's own functions: the same logits, bit for bit, for as long as one likes."""
    model = tiny()
    cache = make_cache(model, policy_of(name, 16, "head"))
    generate(model, cache, prompt_of(20), 5, kv_bits=bits, quantized_kv_start=0)
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, cache)
    loaded = load_prompt_cache(path)
    for layer in loaded:
        assert type(layer) is QuantizedVeloxCache
        assert (layer.bits, layer.group_size, layer.offset) == (bits, GROUP, 25)
    save_prompt_cache(path, loaded)  # at once, and read again
    loaded = load_prompt_cache(path)
    assert [layer.nbytes for layer in loaded] == [layer.nbytes for layer in cache]
    for token in prompt_of(12, seed=1):
        assert mx.array_equal(feed(model, cache, [token]), feed(model, loaded, [token]))
    assert all(map(np.array_equal, positions_of(cache), positions_of(loaded)))
    save_prompt_cache(path, loaded)
    assert [layer.offset for layer in load_prompt_cache(path)] == [37, 37]


def test_saved_empty(tmp_path):
    path = str(tmp_path / "cache.safetensors")
    model = tiny()
    save_prompt_cache(path, quantize(make_cache(model, policy_of("tova", 16))))
    loaded = load_prompt_cache(path)
    assert loaded[0].empty()
    assert mx.isfinite(feed(model, loaded, [5])).all()
    assert loaded[0].bits == 8


# What is refused, and what mlx-lm asks of a quantised cache


def test_heads_that_cant_be_cut_into_groups():
    model = tiny(head_dim=48)
    cache = make_cache(model, policy_of("tova", 16))
    feed(model, cache, [5])
    with pytest.raises(VeloxError, match=r"heads of 48 .* groups of 64; set kv_group_size.*32, 64"):
        cache[0].to_quantized(64, 8)
    with pytest.raises(VeloxError, match="groups of 32"):
        list(
            generate_step(
                mx.array(prompt_of(9)),
                model,
                prompt_cache=make_cache(model, policy_of("tova", 16)),
                kv_bits=8,
                kv_group_size=32,
                quantized_kv_start=0,
            )
        )
    empty = make_cache(model, policy_of("tova", 16))
    empty = [layer.to_quantized(64, 8) for layer in empty]  # its heads aren't known yet
    with pytest.raises(VeloxError, match="heads of 48"):
        feed(model, empty, [5])
    assert cache[0].size() == 1  # and what was refused is as it was
    feed(model, cache, [6])


def test_no_batches_and_no_lookback():
    model, policy = tiny(), policy_of("tova", 16)
    cache = make_cache(model, policy)
    feed(model, cache, [5, 6])
    ours = quantize(cache)
    with pytest.raises(VeloxError, match="Quantised caches can't be batched"):
        ours[0].merge(ours)
    with pytest.raises(VeloxError, match="kv_bits and lookback"):
        make_cache(model, policy, lookback=4)[0].to_quantized(GROUP, 8)


def test_is_quantised_once():
    """mlx-lm quantises, after each step, whatever has ``to_quantized``; and takes what has ``bits``
    for quantised."""
    cache = make_cache(tiny(), policy_of("tova", 16))
    assert hasattr(cache[0], "to_quantized")
    assert not hasattr(cache[0], "bits")
    ours = quantize(cache, bits=4)
    assert not hasattr(ours[0], "to_quantized")
    assert (ours[0].bits, ours[0].group_size) == (4, GROUP)
    assert copy.deepcopy(ours[0]).bits == 4


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "phi3", "gemma3n"])
def test_other_models(name):
    """Grouped heads, one head for each, keys and queries in one matrix, layers that share rows."""
    changes = {"gpt2": {"n_embd": 128}, "phi3": {"hidden_size": 128}}
    model = tiny(name, **changes.get(name, {}))
    cache = make_cache(model, policy_of("tova", 16))
    plain = [layer for layer in cache if isinstance(layer, VeloxCache)]
    feed(model, cache, prompt_of(5))
    head_dim = plain[0].head_dim
    assert head_dim % GROUP == 0
    for i, layer in enumerate(cache):
        if isinstance(layer, VeloxCache):
            cache[i] = layer.to_quantized(GROUP, 8)
    for token in prompt_of(30, seed=2):
        logits = feed(model, cache, [token])
        assert mx.isfinite(logits).all()
    for layer in cache:
        if isinstance(layer, VeloxCache):
            assert (layer.size(), layer.offset, layer.head_dim) == (16, 35, head_dim)
