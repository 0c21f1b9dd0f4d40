"""Decoded tokens that are scored in one go while no row has to go yet: as if one by one."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_core import hookimpl, load_policy, make_cache
from velox_core.cache import SCORED_AT_ONCE

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("h2o", {}),
    ("h2o", {"scope": "layer", "queries": "keys"}),
    ("morphkv", {"window": 4}),
    ("morphkv", {"window": 40, "fusion": "max"}),
    ("morphkv", {"positions": "compressed"}),
]
BUDGET = 100
MODEL = tiny_models.build("llama", num_hidden_layers=2)


class Blocks:
    """How many tokens each block had whose rows were scored, in layer 0."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @hookimpl(wrapper=True)
    def score(self, rows: Any) -> Iterator[None]:
        if rows.layer == 0:
            self.sizes.append(rows.n_new)
        return (yield)


def tokens_of(n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(1, 60, n).tolist()


def feed(cache: list[Any], tokens: list[int], look: bool = False) -> mx.array:
    """One by one; ``look``: reading the state in between, which settles each."""
    logits = []
    for token in tokens:
        logits.append(MODEL(mx.array([[token]]), cache=cache))
        mx.eval(logits[-1])
        if look:
            for layer in cache:
                mx.eval(layer.state[:4])
    return mx.concatenate(logits, axis=1)


def test_blocks_end_where_a_row_must_go():
    watch = Blocks()
    cache = make_cache(MODEL, load_policy("h2o", budget=BUDGET, protect=[watch]))
    MODEL(mx.array([tokens_of(30)]), cache=cache)
    feed(cache, tokens_of(80))
    assert watch.sizes == [30, SCORED_AT_ONCE, SCORED_AT_ONCE, 70 - 2 * SCORED_AT_ONCE, *[1] * 10]


@pytest.mark.parametrize(("name", "options"), POLICIES)
@given(prompt=st.integers(1, BUDGET), tokens=st.integers(1, 120), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_scores_and_rows_are_those_of_tokens_one_by_one(name, options, prompt, tokens, seed):
    caches = []
    for look in (False, True):
        cache = make_cache(MODEL, load_policy(name, budget=BUDGET, n_sink=1, **options))
        MODEL(mx.array([tokens_of(prompt, seed)]), cache=cache)
        caches.append((cache, feed(cache, tokens_of(tokens, seed + 1), look)))
    (ours, logits), (theirs, wanted) = caches
    assert mx.allclose(logits, wanted, atol=1e-4)
    for one, other in zip(ours, theirs, strict=True):
        order = [mx.argsort(cache.positions, axis=-1) for cache in (one, other)]
        assert mx.array_equal(mx.sort(one.positions, axis=-1), mx.sort(other.positions, axis=-1))
        for row in range(one.positions.shape[1]):
            a, b = (
                cache._scores[0, row, : cache._rows][at[0, row]]
                for cache, at in zip((one, other), order, strict=True)
            )
            assert mx.allclose(a, b, rtol=1e-3, atol=1e-4)


def test_all_of_them_can_be_taken_back():
    tokens = tokens_of(30)
    ours, theirs = (make_cache(MODEL, load_policy("h2o", budget=BUDGET)) for _ in range(2))
    for cache in (ours, theirs):
        MODEL(mx.array([tokens_of(40)]), cache=cache)
    feed(ours, tokens)
    assert [layer.trim(20) for layer in ours] == [20, 20]
    feed(theirs, tokens[:10])
    logits = [feed(cache, tokens_of(60, seed=4)) for cache in (ours, theirs)]
    assert mx.allclose(*logits, atol=1e-5)
    assert [layer.positions.tolist() for layer in ours] == [
        layer.positions.tolist() for layer in theirs
    ]


def test_latent_attention_scores_each_token(monkeypatch):
    model = tiny_models.build("deepseek_v3")
    cache = make_cache(model, load_policy("h2o", budget=BUDGET))
    for token in tokens_of(10):
        mx.eval(model(mx.array([[token % 30]]), cache=cache))
        assert all(layer._n_new == 1 for layer in cache)
    assert all(layer.positions is not None for layer in cache)
