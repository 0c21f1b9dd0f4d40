"""What every policy must do, and what this one does."""

import mlx.core as mx
import numpy as np
import pytest
from velox_core import Policy, PolicyConfigError, VeloxCache, load_policy
from velox_core.testing import Check, example_rows, parametrize_policy_checks

from velox_l2norm import L2Norm

NAME = "l2norm"
HEADS = L2Norm(skip_layers=[])
LAYER = L2Norm(skip_layers=[], scope="layer", n_sink=0)


# A check that can't hold for this policy goes into expected_failures={"its name": "why"}.
@parametrize_policy_checks([NAME, HEADS, LAYER])
def test_conformance(policy: str | Policy, check: Check) -> None:
    check(policy)


def test_it_is_found_by_its_name() -> None:
    default = load_policy(NAME)
    assert isinstance(default, L2Norm)
    assert default.skip_layers == (0, 1)
    policy = load_policy(NAME, budget=64, skip_layers=[3, 1, 3])
    assert isinstance(policy, L2Norm)
    assert policy.scope == "head"
    assert policy.skip_layers == (1, 3)
    again = load_policy(NAME, **policy.options())
    assert again.options() == policy.options()


@pytest.mark.parametrize("skip_layers", [1, "01", [-1], [True], [0.5], None])
def test_layers_that_cant_be(skip_layers: object) -> None:
    with pytest.raises(PolicyConfigError, match="must be a list of layer numbers"):
        load_policy(NAME, skip_layers=skip_layers)


def test_scores_are_norms() -> None:
    keys = mx.array([[[[3.0, 4.0], [0.0, 1.0]], [[6.0, 8.0], [0.0, 3.0]]]])  # 2 heads, 2 rows
    each = HEADS.score(example_rows(keys, scope="head"))
    assert each.tolist() == [[[-5.0, -1.0], [-10.0, -3.0]]]
    assert LAYER.score(example_rows(keys)).tolist() == [[[-7.5, -2.0]]]


def test_large_float16_keys_have_finite_norms() -> None:
    keys = mx.array([[[[6e4, 6e4], [3e4, 3e4]]]], dtype=mx.float16)
    assert HEADS.score(example_rows(keys, scope="head")).flatten().tolist() == pytest.approx(
        [-6e4 * 2**0.5, -3e4 * 2**0.5], rel=1e-3
    )


HEAD_COUNT, SIZE, BUDGET = 2, 8, 12
BLOCKS = [5, 4, 9, 1, 1, 1, 6, 1, 1, 20, 1, 1]


def oracle(keys: np.ndarray, policy: L2Norm, layer: int) -> list[list[int]]:
    """The positions that stay in each head (or in all), by the paper's rule and in plain NumPy."""
    norms = np.sqrt((keys.astype(np.float64) ** 2).sum(axis=-1))  # [heads, tokens]
    if policy.scope == "layer":
        norms = norms.mean(axis=0, keepdims=True)
    kept: list[list[int]] = [[] for _ in norms]
    seen = 0
    for block in BLOCKS:
        seen += block
        for head, rows in enumerate(kept):
            rows.extend(range(seen - block, seen))
            while len(rows) > BUDGET:
                may_go = [p for p in rows if p >= policy.n_sink and p != seen - 1]
                if layer in policy.skip_layers:
                    rows.remove(min(may_go))
                else:
                    rows.remove(max(may_go, key=lambda p: norms[head, p]))
    return kept


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("n_sink", [0, 4])
@pytest.mark.parametrize("scope", ["head", "layer"])
def test_it_keeps_what_numpy_keeps(scope: str, n_sink: int, layer: int, seed: int) -> None:
    policy = load_policy(NAME, scope=scope, n_sink=n_sink, budget=BUDGET)
    assert isinstance(policy, L2Norm)
    keys = np.random.default_rng(seed).normal(size=(HEAD_COUNT, sum(BLOCKS), SIZE))
    keys = keys.astype(np.float32)
    cache = VeloxCache(policy, budget=BUDGET, layer=layer)
    start = 0
    for block in BLOCKS:
        rows = mx.array(keys[None, :, start : start + block])
        cache.update_and_fetch(rows, rows)
        start += block
    positions = np.array(cache.positions)[0]
    assert [sorted(head) for head in positions.tolist()] == oracle(keys, policy, layer)
