"""Rows numbered anew: contiguous and compressed positions.

The oracle has one layer, where a token's key depends on the token alone: at each step it makes the
kept tokens' keys from nothing and rotates them with the layer's own RoPE to where NumPy says that
they stand.
"""

import copy
import functools
import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import test_speculative
import tiny_models
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import rope_utils
from mlx_lm.models.cache import make_prompt_cache

from velox_core import (
    PolicyConfigError,
    UnsupportedModelError,
    VeloxCache,
    load_cache,
    load_policy,
    make_cache,
    save_cache,
)
from velox_core.numbering import places
from velox_core.rope import Rotation, source

SCHEMES = ("contiguous", "compressed")
TYPES = (mx.float32, mx.float16, mx.bfloat16)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {
    "plain": nn.RoPE(16),
    "traditional": nn.RoPE(16, traditional=True),
    "partial": nn.RoPE(8),
    "partial, traditional": nn.RoPE(8, traditional=True),
    "linear": nn.RoPE(16, base=5e5, scale=0.25),
    "llama3": rope_utils.Llama3RoPE(16, scaling_config=LLAMA3),
    "proportional": rope_utils.ProportionalRoPE(16, 8),
    "longrope": rope_utils.SuScaledRoPE(8, long_factor=[1.0, 1.5, 2.0, 3.0]),
    "yarn": rope_utils.YarnRoPE(16, scaling_factor=4.0, mscale=1.2),
    "yarn, traditional": rope_utils.YarnRoPE(16, traditional=True, scaling_factor=4.0),
}


@functools.cache
def tiny(name="llama", dtype=mx.float32, layers=2):
    return tiny_models.build(name, dtype, num_hidden_layers=layers)


def places_of(positions, scheme):
    """Where rows of these positions stand; -1 is empty."""
    kept = sorted(position for position in positions if position >= 0)
    at, where = 0, {-1: 0}
    for older, position in zip([None, *kept], kept, strict=False):
        if older is not None:
            gap = position - older
            if scheme == "contiguous":
                at += 1
            else:
                at += gap if gap <= 10 else max(1, round(math.log(math.log(gap))))
        where[position] = at
    return [where[position] for position in positions]


# Places --------------------------------------------------------------------------------------


@given(
    kept=st.lists(st.integers(0, 10**7), min_size=1, max_size=40, unique=True),
    empty=st.integers(0, 5),
    scheme=st.sampled_from(SCHEMES),
    seed=st.integers(0, 9),
)
@example(kept=[0, 10, 21, 109, 10**7, 2 * 10**7], empty=0, scheme="compressed", seed=0)
@example(kept=[3], empty=2, scheme="contiguous", seed=0)
def test_places(kept, empty, scheme, seed):
    rows = np.random.default_rng(seed).permutation([-1] * empty + kept)
    wanted = places_of(rows.tolist(), scheme)
    array = mx.array(rows.astype(np.int32))[None, None]
    assert places(array, scheme).tolist() == [[wanted]]
    if not empty:
        assert places(array, scheme, padded=False).tolist() == [[wanted]]


# Rotation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_module", [False, True], ids=["table", "module"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ROPES)
def test_a_row_is_rotated_as_the_layers_rope_does_it(name, dtype, by_module, monkeypatch):
    """Each row at a place of its own, for all heads alike and by head; in the CPU's way, and in
    the GPU's."""
    if by_module:
        monkeypatch.setattr(Rotation, "_by_table", lambda self, x, at, _: self._by_module(x, at))
    rope, rng = ROPES[name], np.random.default_rng(0)
    rows = mx.array(rng.normal(size=(2, 4, 6, 16))).astype(dtype)
    for heads in (1, 2, 4):
        at = mx.array(rng.integers(0, 500, (2, heads, 6)), dtype=mx.int32)
        turned = Rotation(rope)(rows, at, 500)
        assert turned.dtype == dtype
        for batch, head, row in np.ndindex(2, 4, 6):
            place = at[batch, head * heads // 4, row].item()
            one = rows[batch : batch + 1, head : head + 1, row : row + 1]
            assert mx.array_equal(turned[batch, head, row], rope(one, offset=place)[0, 0, 0])


def test_alike_modules_share_a_table():
    made = [Rotation.of(nn.RoPE(16, base=base)) for base in (1e4, 1e4, 1e5)]
    assert made[0] is made[1] is not made[2]
    freqs = [Rotation.of(rope_utils.ProportionalRoPE(16, dims)) for dims in (8, 8, 4)]
    assert freqs[0] is freqs[1] is not freqs[2]


def test_the_table_grows_with_the_places():
    rotation, rows = Rotation(nn.RoPE(8)), mx.ones((1, 1, 1, 8))
    for place in (3, 4, 1000, 2):
        turned = rotation(rows, mx.array([[[place]]]), place + 1)
        assert mx.array_equal(turned, rotation.rope(rows, offset=place))


# The cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_below_the_budget_it_is_kvcache_bit_for_bit(name, scheme, dtype):
    model = tiny(name, dtype) if name != "gemma3_text" else tiny_models.build(name, dtype)
    prompt = mx.random.randint(0, tiny_models.VOCAB, (2, 20), key=mx.random.key(1))
    for policy in (load_policy("tova", budget=40, positions=scheme),
                   load_policy("h2o", budget=40, positions=scheme)):  # fmt: skip
        ours, theirs = make_cache(model, policy), make_prompt_cache(model)
        for start, end in [(0, 7), (7, 8), (8, 19), (19, 20)]:
            logits = model(prompt[:, start:end], cache=ours)
            assert mx.array_equal(logits, model(prompt[:, start:end], cache=theirs))


class Oracle:
    """A one-layer Llama with TOVA (or StreamingLLM), a token at a time, its choice by layer or by
    KV head; where the rows stand is NumPy's business."""

    def __init__(self, model, scheme, budget, n_sink, scope, by_attention):
        self.model, self.scheme, self.budget, self.n_sink = model, scheme, budget, n_sink
        self.by_attention = by_attention
        self.attention = model.layers[0].self_attn
        self.kv_heads, self.heads = self.attention.n_kv_heads, self.attention.n_heads
        self.kept = [[] for _ in range(self.kv_heads if scope == "head" else 1)]
        self.tokens = []

    def projected(self, positions, projection, heads):
        """Keys, values or queries of these tokens, ``[n, heads, head_dim]``, not rotated."""
        tokens = mx.array([self.tokens[position] for position in positions])
        layer = self.model.layers[0]
        made = projection(layer.input_layernorm(self.model.model.embed_tokens(tokens)))
        return made.reshape(len(positions), heads, -1)

    def rotated(self, rows, at):
        turned = [self.attention.rope(row[None, :, None], offset=a)[0, :, 0]
                  for row, a in zip(rows, at, strict=True)]  # fmt: skip
        return mx.stack(turned)

    def step(self, token):
        """The layer's output for a token, ``[heads * head_dim]``; then a row goes."""
        self.tokens.append(token)
        newest, group = len(self.tokens) - 1, self.heads // self.kv_heads
        outputs, weights = [], []
        for head in range(self.kv_heads):
            kept = self.kept[head % len(self.kept)]
            if not head or len(self.kept) > 1:
                kept.append(newest)
            at = places_of(kept, self.scheme)
            attention = self.attention
            keys = self.rotated(self.projected(kept, attention.k_proj, self.kv_heads), at)
            values = self.projected(kept, attention.v_proj, self.kv_heads)[:, head]
            query = self.rotated(self.projected([newest], attention.q_proj, self.heads), at[-1:])
            query = np.array(query[0, head * group : (head + 1) * group])
            logits = query @ np.array(keys[:, head]).T * attention.scale
            share = np.exp(logits - logits.max(axis=-1, keepdims=True))
            share /= share.sum(axis=-1, keepdims=True)
            outputs.append((share @ np.array(values)).reshape(-1))
            weights.append(share)
        if len(self.kept[0]) > self.budget:
            for choice, kept in enumerate(self.kept):
                mine = weights if len(self.kept) == 1 else weights[choice : choice + 1]
                score = np.mean(np.concatenate(mine), axis=0)
                if not self.by_attention:
                    score = np.array(kept, dtype=float)
                free = [i for i, p in enumerate(kept) if self.n_sink <= p < newest]
                del kept[min(free, key=lambda i: score[i])]
        return np.concatenate(outputs)


@pytest.mark.parametrize("scope", ["layer", "head"])
@pytest.mark.parametrize("name", ["tova", "streaming"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_and_attention_are_the_oracles(scheme, name, scope, monkeypatch):
    """The kept rows, and what attention gives, at each of 60 steps; so no error builds up."""
    model = tiny(layers=1)
    from mlx_lm.models import llama

    options = {"budget": 9, "n_sink": 2, "scope": scope}
    cache = make_cache(model, load_policy(name, positions=scheme, **options))
    oracle = Oracle(model, scheme, by_attention=name == "tova", **options)
    given = []
    attend = llama.scaled_dot_product_attention

    def watched(*args, **kwargs):
        given.append(attend(*args, **kwargs))
        return given[-1]

    monkeypatch.setattr(llama, "scaled_dot_product_attention", watched)
    tokens = np.random.default_rng(3).integers(1, tiny_models.VOCAB, 60).tolist()
    for token in tokens:
        model(mx.array([[token]]), cache=cache)
        wanted = oracle.step(token)
        assert np.allclose(np.array(given[-1]).reshape(-1), wanted, rtol=1e-4, atol=1e-5)
    kept = cache[0].positions[0].tolist()
    assert [sorted(rows) for rows in kept] == [sorted(rows) for rows in oracle.kept]
    assert cache[0].offset == 60
    assert oracle.kept[0] != list(range(51, 60))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["tova", "h2o", "morphkv", "streaming"])
@settings(max_examples=8)
@given(blocks=st.lists(st.integers(1, 9), min_size=3, max_size=12), n_sink=st.integers(0, 2))
@example(blocks=[9, 9, *[1] * 9], n_sink=1)
def test_keys_are_rope_applied_afresh(name, scheme, blocks, n_sink):
    """After any blocks, the keys that the model attends to are the raw ones, rotated to where
    their rows stand: exactly."""
    model = tiny()
    options = {"window": 3} if name == "morphkv" else {}
    policy = load_policy(name, budget=7, n_sink=n_sink, positions=scheme, **options)
    cache, raw = make_cache(model, policy), [[] for _ in model.layers]
    for seed, n in enumerate(blocks):
        prompt = mx.random.randint(0, tiny_models.VOCAB, (1, n), key=mx.random.key(seed))
        update = VeloxCache.before_rope

        def keep(self, rotated, update=update):
            found = update(self, rotated)
            if found.shape[1] == model.layers[0].self_attn.n_kv_heads:
                raw[self.layer].append(found)
            return found

        VeloxCache.before_rope = keep
        try:
            mx.eval(model(prompt, cache=cache))
        finally:
            VeloxCache.before_rope = update
        for layer, held in enumerate(cache):
            keys, _ = held.keys_and_values()
            positions = held._positions[0, :, : held._rows].tolist()  # the block isn't settled
            every = mx.concatenate(raw[layer], axis=2)
            for head in range(keys.shape[1]):
                mine = positions[head % len(positions)]
                for row, at in enumerate(places_of(mine, scheme)):
                    one = every[:, head : head + 1, mine[row] : mine[row] + 1]
                    wanted = model.layers[layer].self_attn.rope(one, offset=at)[0, 0, 0]
                    assert mx.array_equal(keys[0, head, row], wanted)


# A whole citizen -----------------------------------------------------------------------------


def policies(budget, scheme):
    return [
        load_policy("tova", budget=budget, n_sink=1, positions=scheme),
        load_policy("h2o", budget=budget, n_sink=1, positions=scheme),
        load_policy("morphkv", budget=budget, n_sink=1, window=3, positions=scheme),
        load_policy("streaming", budget=budget, n_sink=1, positions=scheme),
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sequence_in_a_batch_is_as_alone(scheme):
    model = tiny()
    for policy in policies(10, scheme):
        prompts = [mx.random.randint(1, tiny_models.VOCAB, (1, n), key=mx.random.key(n))
                   for n in (5, 26, 14)]  # fmt: skip
        alone = [make_cache(model, policy) for _ in prompts]
        for prompt, cache in zip(prompts, alone, strict=True):
            model(prompt, cache=cache)
        together = [type(layers[0]).merge(layers) for layers in zip(*map(copy.deepcopy, alone),
                                                                    strict=True)]  # fmt: skip
        for step in range(14):
            tokens = [(7 * step + i) % tiny_models.VOCAB for i in range(3)]
            batched = model(mx.array(tokens)[:, None], cache=together)
            for i, (token, cache) in enumerate(zip(tokens, alone, strict=True)):
                wanted = model(mx.array([[token]]), cache=cache)
                assert np.allclose(batched[i], wanted[0], rtol=1e-3, atol=1e-4)
        assert together[0].offset.tolist() == [19, 40, 28]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_right_padded_batch_is_as_alone(scheme):
    model, lengths = tiny(), [6, 25]
    for policy in policies(10, scheme):
        prompts = [mx.random.randint(1, tiny_models.VOCAB, (1, n), key=mx.random.key(n))
                   for n in lengths]  # fmt: skip
        alone = [make_cache(model, policy) for _ in prompts]
        empty = [make_cache(model, policy) for _ in prompts]
        together = [type(layers[0]).merge(layers) for layers in zip(*empty, strict=True)]
        padded = mx.concatenate([mx.pad(p, [(0, 0), (0, 25 - p.shape[1])]) for p in prompts])
        for layer in together:
            layer.prepare(lengths=lengths, right_padding=[25 - n for n in lengths])
        model(padded, cache=together)
        for layer in together:
            layer.finalize()
        for prompt, cache in zip(prompts, alone, strict=True):
            model(prompt, cache=cache)
        for step in range(8):
            batched = model(mx.array([[step + 1], [step + 2]]), cache=together)
            for i, cache in enumerate(alone):
                wanted = model(mx.array([[step + 1 + i]]), cache=cache)
                assert np.allclose(batched[i], wanted[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_copied_and_taken_back(scheme, tmp_path):
    model = tiny()
    for policy in policies(10, scheme):
        cache = make_cache(model, policy)
        model(mx.arange(1, 30)[None], cache=cache)
        for token in range(5):
            model(mx.array([[token]]), cache=cache)
        save_cache(tmp_path / "cache.safetensors", cache)
        loaded, copied = load_cache(tmp_path / "cache.safetensors"), copy.deepcopy(cache)
        assert loaded[0].policy.positions == scheme
        for token in (3, 1, 4, 1, 5):
            wanted = model(mx.array([[token]]), cache=cache)
            assert mx.array_equal(model(mx.array([[token]]), cache=loaded), wanted)
            model(mx.array([[9]]), cache=copied)  # is another sequence, and taken back
            assert [layer.trim(1) for layer in copied] == [1, 1]
            got = model(mx.array([[token]]), cache=copied)
            assert np.allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", list(test_speculative.POLICIES))
def test_speculative_decoding_gives_the_tokens_of_plain(name, scheme):
    """Each token of a drafted block sees the rows where they would stand had it come alone."""
    make = test_speculative.POLICIES[name]
    policy = make(budget=12, n_sink=1, positions=scheme)
    model, draft = test_speculative.tiny(), test_speculative.draft_of("close")
    prompt = mx.random.randint(1, tiny_models.VOCAB, (30,), key=mx.random.key(2))
    plain = make_cache(model, policy, lookback=8)
    wanted = [token for token, _ in generate_step(prompt, model, max_tokens=40,
              prompt_cache=plain, prefill_step_size=8)]  # fmt: skip
    cache = [*make_cache(model, policy, lookback=8), *make_prompt_cache(draft)]
    got = [int(token) for token, *_ in speculative_generate_step(
        prompt, model, draft, num_draft_tokens=4, max_tokens=40, prompt_cache=cache,
        prefill_step_size=8)]  # fmt: skip
    assert got == wanted
    slow = make_cache(model, policy)
    for token in prompt.tolist()[:-1]:
        model(mx.array([[token]]), cache=slow)
    assert got == [token for token, _ in generate_step(prompt[-1:], model, max_tokens=40,
                                                       prompt_cache=slow)]  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("name", "queries"), [("streaming", "model"), ("tova", "keys")])
def test_after_tokens_that_can_be_taken_back_a_long_block(name, queries, scheme):
    model = tiny()
    policy = load_policy(name, budget=12, n_sink=1, positions=scheme, queries=queries)
    caches = make_cache(model, policy), make_cache(model, policy, lookback=4)
    tokens = mx.random.randint(1, 50, (1, 60), key=mx.random.key(1))
    start = 0
    for n in [20, 1, 1, 1, 9, *[1] * 6, 6, 1]:
        wanted, got = (model(tokens[:, start : start + n], cache=cache) for cache in caches)
        assert np.allclose(got, wanted, rtol=1e-4, atol=1e-5)
        start += n


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_rows_are_rotated_as_they_are_held(scheme):
    model = tiny_models.build("llama", hidden_size=128, num_attention_heads=4,
                              num_key_value_heads=2, head_dim=32)  # fmt: skip
    policy = load_policy("tova", budget=10, n_sink=1, positions=scheme)
    plain = make_cache(model, policy)
    quantised = [cache.to_quantized(32, 8) for cache in make_cache(model, policy)]
    for tokens in ([5, 9, 2, 7, 1, 8, 3], *[[t] for t in range(1, 14)]):
        a = model(mx.array([tokens]), cache=plain)
        b = model(mx.array([tokens]), cache=quantised)
        assert np.allclose(a, b, rtol=0.1, atol=0.1 * float(mx.abs(a).max()))
    assert quantised[0].offset == 20
    assert quantised[0].size() == 10


def test_the_graph_stays_flat():
    """What a step holds doesn't grow, and no rotated keys are held between steps."""
    model = tiny()
    for scheme in SCHEMES:
        cache = make_cache(model, load_policy("tova", budget=8, positions=scheme))
        model(mx.arange(1, 20)[None], cache=cache)
        sizes = []
        for step in range(60):
            mx.eval(model(mx.array([[step % 50]]), cache=cache))
            if step in (20, 59):
                mx.clear_cache()
                sizes.append(mx.get_active_memory())
            assert all(layer._numbered is None for layer in cache)
        assert sizes[1] - sizes[0] < 4096


def test_nothing_waits_for_the_host(monkeypatch):
    model = tiny()
    cache = make_cache(model, load_policy("tova", budget=8, positions="compressed"))
    model(mx.arange(1, 20)[None], cache=cache)

    def forbidden(*args, **kwargs):
        raise AssertionError("a value was read")

    for name in ("item", "tolist", "__bool__", "__int__", "__array__"):
        monkeypatch.setattr(mx.array, name, forbidden)
    for name in ("eval", "async_eval"):
        monkeypatch.setattr(mx, name, forbidden)
    for step in range(4):
        model(mx.array([[step]]), cache=cache)


# Models --------------------------------------------------------------------------------------

#: What can't run with rows numbered anew, of the models that velox bounds, with part of the reason.
ROPE, UNSEEN = "from the layer's RoPE", "isn't seen"
REFUSED = {
    **dict.fromkeys(
        ("afmoe", "cohere2", "exaone4", "exaone_moe", "jamba", "kimi_k3", "kimi_linear", "llama4",
         "llama4_text", "muse_glimmer", "muse_spark", "nemotron_h"), ROPE),  # layers without RoPE
    **dict.fromkeys(
        ("bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "glm4_moe_lite", "kimi_k25", "kimi_vl",
         "longcat_flash", "longcat_flash_ngram", "mistral4"), ROPE),  # latent attention
    **dict.fromkeys(
        ("deepseek_v2", "gptj", "minicpm3", "youtu_llm"), ROPE),  # a part is rotated, then joined
    **dict.fromkeys(
        ("hunyuan", "hunyuan_v1_dense", "nanochat", "talkie"), ROPE),  # a norm after RoPE
    **dict.fromkeys(
        ("ministral3", "mistral3", "phi", "phixtral", "stablelm"), ROPE),  # queries changed after
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ROPE),  # learned positions
    **dict.fromkeys(("gemma2", "gemma4", "gemma4_text", "iquestloopcoder"), UNSEEN),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(tiny_models.CONFIGS))
def test_every_architecture(name):
    if name in tiny_models.UNBUILDABLE:
        pytest.skip(tiny_models.UNBUILDABLE[name])
    model = tiny_models.build(name)
    try:
        make_cache(model, load_policy("tova", budget=8))
    except UnsupportedModelError:
        return  # whatever the positions: tests/test_architectures.py has the reasons
    policy = load_policy("tova", budget=100, positions="compressed")
    if name in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
            make_cache(model, policy)
        return
    ours, theirs = make_cache(model, policy), make_prompt_cache(model)
    tokens = mx.random.randint(1, 60, (1, 15), key=mx.random.key(0))
    for start, end in [(0, 12), (12, 13), (13, 14), (14, 15)]:
        logits = model(tokens[:, start:end], cache=ours)
        wanted = model(tokens[:, start:end], cache=theirs)
        assert np.allclose(logits.astype(mx.float32), wanted.astype(mx.float32), atol=2e-5)
    small = make_cache(model, load_policy("tova", budget=8, positions="contiguous"))
    for start, end in [(0, 12), *((i, i + 1) for i in range(12, 15))]:
        logits = model(tokens[:, start:end], cache=small)
    assert mx.isfinite(logits).all()


def test_a_base_that_depends_on_the_offset_is_refused():
    model = tiny_models.build(
        "llama", rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=64
    )
    with pytest.raises(UnsupportedModelError, match="depends on more than the position"):
        make_cache(model, load_policy("tova", positions="contiguous"))
    assert make_cache(model, load_policy("tova"))


def test_an_unknown_scheme():
    with pytest.raises(PolicyConfigError, match=r"positions='relative'.*'compressed'"):
        load_policy("tova", positions="relative")


def test_batches_of_two_schemes_are_refused():
    model = tiny()
    one, other = (make_cache(model, load_policy("tova", positions=p))[0] for p in SCHEMES)
    with pytest.raises(Exception, match="A batch has one policy"):
        VeloxCache.merge([one, other])


def test_a_rotated_array_is_known_once():
    rope = nn.RoPE(8)
    make_cache(tiny(), load_policy("streaming", positions="contiguous"))  # nn.RoPE is watched now
    raw = mx.ones((1, 1, 1, 8))
    turned = rope(raw, offset=3)
    call = source(turned)
    assert call.raw is raw
    assert call.rope is rope
    assert source(turned) is None
    assert source(mx.array(turned)) is None
