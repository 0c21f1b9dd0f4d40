"""With as many rows as tokens, all is as with mlx-lm's own cache, bit for bit."""

import functools

import mlx.core as mx
import pytest
import tiny_models
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache

from velox_core import VeloxCache, load_policy, make_cache

MODELS = ("llama", "qwen3", "gemma3_text")
TYPES = (mx.float32, mx.float16, mx.bfloat16)


@functools.cache
def tiny(name, dtype):
    return tiny_models.build(name, dtype)


def random_tokens(batch, n):
    return mx.random.randint(0, tiny_models.VOCAB, (batch, n), key=mx.random.key(n))


def logits_of(model, cache, prompt, cuts, steps):
    """The logits of every prompt token, fed in blocks, and of greedily decoded ones."""
    logits, start = [], 0
    for end in [*cuts, prompt.shape[1]]:
        logits.append(model(prompt[:, start:end], cache=cache))
        start = end
    for _ in range(steps):
        token = mx.argmax(logits[-1][:, -1:], axis=-1)
        logits.append(model(token, cache=cache))
    return mx.concatenate(logits, axis=1)


@st.composite
def streams(draw):
    """A prompt's length, where it is cut, how many tokens follow, and the policy's options."""
    n, steps = draw(st.integers(1, 40)), draw(st.integers(0, 12))
    total = n + steps
    return {
        "n": n,
        "cuts": sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else [],
        "steps": steps,
        "budget": draw(st.sampled_from([total, total + 1, 4 * total, 512])),
        "batch": draw(st.integers(1, 2)),
        "scope": draw(st.sampled_from(["layer", "head"])),
    }


STREAM = {"n": 20, "cuts": [], "steps": 12, "budget": 32, "batch": 2, "scope": "layer"}


def compare(model, policy, stream):
    prompt = random_tokens(stream["batch"], stream["n"])
    ours, theirs = make_cache(model, policy), make_prompt_cache(model)
    assert any(isinstance(cache, VeloxCache) for cache in ours)
    assert any(type(cache) is KVCache for cache in theirs)
    feed = prompt, stream["cuts"], stream["steps"]
    logits, wanted = logits_of(model, ours, *feed), logits_of(model, theirs, *feed)
    assert logits.dtype == wanted.dtype
    assert mx.isfinite(wanted).all()
    assert mx.array_equal(logits, wanted)
    total = stream["n"] + stream["steps"]
    for cache, other in zip(ours, theirs, strict=True):
        assert cache.offset == other.offset == total
        if isinstance(cache, VeloxCache):
            assert cache.size() == total
            assert all(map(mx.array_equal, cache.keys_and_values(), other.keys_and_values()))
            assert cache.keys.dtype == other.keys.dtype
            assert cache.values.dtype == other.values.dtype
            in_order = mx.broadcast_to(mx.arange(total), cache.positions.shape)
            assert mx.array_equal(cache.positions, in_order)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8)  # for each of nine
@given(stream=streams())
@example(stream=STREAM)
@example(stream=STREAM | {"cuts": list(range(1, 20))})
def test_tova_with_room_for_all(name, dtype, stream):
    n_sink = min(4, stream["budget"] - 1)
    options = {"budget": stream["budget"], "n_sink": n_sink, "scope": stream["scope"]}
    compare(tiny(name, dtype), load_policy("tova", **options), stream)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=8)
@given(stream=streams())
def test_a_policy_that_scores_every_step(remembering, dtype, stream):
    options = {"budget": stream["budget"], "n_sink": 0, "scope": stream["scope"]}
    compare(tiny("llama", dtype), remembering(**options), stream)


def test_over_the_growth_of_the_arrays():
    """Arrays grow by 256 rows: across that, in one block and one by one."""
    stream = STREAM | {"n": 300, "cuts": [254, 255, 256, 257, 290], "steps": 230, "batch": 1}
    for budget in (530, 1000):
        compare(tiny("llama", mx.float32), load_policy("tova", budget=budget), stream)


@pytest.mark.parametrize("name", MODELS)
def test_one_row_less_differs(name):
    """The comparison can fail: a single row evicted, and the logits are others."""
    model = tiny(name, mx.float32)
    prompt = random_tokens(1, 30)
    one_less = make_cache(model, load_policy("tova", budget=29))
    logits = logits_of(model, one_less, prompt, [], 3)
    wanted = logits_of(model, make_prompt_cache(model), prompt, [], 3)
    assert mx.array_equal(logits[:, :30], wanted[:, :30])
    assert not mx.array_equal(logits[:, 30], wanted[:, 30])
