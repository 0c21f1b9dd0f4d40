"""A real model, SmolLM2-135M-Instruct: what holds for tiny random ones holds for it."""

import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import oracle as plain
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from oracle import Oracle, as_numpy

from velox_core import load_policy, make_cache
from velox_core.evaluation.perplexity import perplexity, stream_nll

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import smollm2
import text

pytestmark = pytest.mark.smollm2
CLEAR = 2e-6  # relative: choices narrower than this may go either way in float32


@pytest.fixture(scope="module")
def loaded():
    return mlx_lm.load(str(smollm2.ensure()))


@pytest.fixture
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def tokens(loaded):
    return text.tokens(loaded[1], 400)


def logits_of(model, cache, prompt, cuts, steps):
    logits, start = [], 0
    for end in [*cuts, len(prompt)]:
        logits.append(model(mx.array(prompt[start:end])[None], cache=cache))
        start = end
    for _ in range(steps):
        logits.append(model(mx.argmax(logits[-1][:, -1:], axis=-1), cache=cache))
    logits = mx.concatenate(logits, axis=1)
    mx.eval(logits)
    return logits


@pytest.mark.parametrize(
    ("cuts", "options"),
    [([], {"budget": 54}), ([1, 2, 20, 49], {"budget": 54, "scope": "head"}), ([16, 32], {})],
    ids=str,
)
def test_with_room_for_all_it_is_mlx_lm(model, tokens, cuts, options):
    feed = tokens[:50], cuts, 4
    logits = logits_of(model, make_cache(model, load_policy("tova", **options)), *feed)
    assert mx.array_equal(logits, logits_of(model, make_prompt_cache(model), *feed))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_with_room_for_all_in_half_precision(loaded, tokens, dtype):
    model = llama.Model(loaded[0].args)
    model.update(loaded[0].parameters())
    model.set_dtype(dtype)
    feed = tokens[:7], [4], 1
    logits = logits_of(model, make_cache(model, load_policy("tova", budget=8)), *feed)
    assert logits.dtype == dtype
    assert mx.array_equal(logits, logits_of(model, make_prompt_cache(model), *feed))


@pytest.mark.parametrize("scope", ["layer", "head"])
def test_rows_are_the_oracles(monkeypatch, model, tokens, scope):
    """Fed with the model's own queries, keys and values, the oracle keeps the same rows in all 30
    layers, through blocks and single tokens."""
    cache = make_cache(model, load_policy("tova", budget=48, scope=scope))
    notes = plain.record(monkeypatch, llama, cache)
    start = 0
    for n in (70, 16, 1, 1, 1, 16, 1, 1):
        model(mx.array(tokens[start : start + n])[None], cache=cache)
        start += n
    assert len(notes) == 8 * len(cache)
    oracles = {id(layer): Oracle(48, plain.tova, n_sink=4, scope=scope) for layer in cache}
    for layer, queries, keys, values, scale, output in notes:
        block = (as_numpy(array[0]) for array in (queries, keys, values))
        clear = oracles[id(layer)].gap > CLEAR
        wanted = oracles[id(layer)].step(*block, scale)
        if clear:
            np.testing.assert_allclose(as_numpy(output[0]), wanted, atol=2e-4, rtol=2e-4)
    # The text is another with each version of Python, so a near tie may turn up.
    clear = [layer for layer in cache if oracles[id(layer)].gap > CLEAR]
    assert len(clear) >= 25
    for layer in clear:
        oracle = oracles[id(layer)]
        positions = np.sort(np.array(layer.positions[0]), axis=-1)
        assert positions.tolist() == oracle.positions.tolist()
        assert layer.offset == start


@pytest.fixture(scope="module")
def perplexities(loaded, tokens):
    """By what is kept: 48 rows of 400 tokens fed in blocks of 16, the last 250 scored."""
    model = loaded[0]

    def measure(cache):
        nll = stream_nll(model, tokens, cache, block=16, first_scored=150)
        return perplexity(nll)

    def tova(**options):
        return make_cache(model, load_policy("tova", budget=48, **options))

    return {
        "tova": measure(tova()),
        "tova by key": measure(tova(queries="keys")),
        "rotating": measure([RotatingKVCache(48, keep=4) for _ in model.layers]),
    }


def test_real_queries_keep_what_matters(perplexities):
    """Beside keys in the queries' place, and mlx-lm's own bounded cache, with the same rows."""
    assert perplexities["tova"] < perplexities["tova by key"], perplexities
    assert perplexities["tova"] < perplexities["rotating"], perplexities
