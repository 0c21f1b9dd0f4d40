"""Decode steps whose hooks were asked once and are replayed: the same rows as when asked anew."""

from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import mlx.core as mx
import pytest
import tiny_models
from asked_by_layer import Counts

from velox_core import Policy, PolicyHookError, Rows, hookimpl, load_policy, make_cache
from velox_core.protectors import Pin
from velox_core.testing.step_checks import NO_REPLAY, compiling

BUDGET = 24
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("tova", {}),
    ("tova", {"scope": "head", "positions": "compressed"}),
    ("h2o", {}),
    ("morphkv", {"window": 6}),
    ("streaming", {"slack": 3}),
]


@attrs.frozen(eq=False, kw_only=True)
class Asked(Policy):
    """Counts how often it is asked, which a pure policy mustn't."""

    hook_version: ClassVar[int] = 1
    sequences: ClassVar[list[int]] = []

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        self.sequences.append(rows.positions.shape[0])
        return (rows.positions - rows.newest).astype(mx.float32)


class Replayed(Asked):
    pure: ClassVar[bool] = True


@attrs.frozen(eq=False, kw_only=True)
class Waits(Policy):
    hook_version: ClassVar[int] = 1
    pure: ClassVar[bool] = True

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        return rows.positions.astype(mx.float32) * rows.newest.item()


@pytest.fixture(autouse=True)
def replaying() -> Iterator[None]:
    with compiling() as works:  # tiny_models turns it off
        if not works:
            pytest.skip(NO_REPLAY)
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.build("llama", num_hidden_layers=2)


def run(model: Any, policy: Policy, steps: int = 12, sequences: int = 1) -> list[Any]:
    """Read a prompt beyond the budget and decode: the cache."""
    cache = make_cache(model, policy)
    decode(model, cache, steps, sequences)
    return cache


def decode(model: Any, cache: list[Any], steps: int = 12, sequences: int = 1) -> mx.array:
    """The last token's logits."""
    tokens = mx.random.randint(1, 60, (sequences, BUDGET + 8 + steps), key=mx.random.key(3))
    mx.eval(model(tokens[:, : BUDGET + 8], cache=cache))
    logits = mx.array(0.0)
    for i in range(BUDGET + 8, BUDGET + 8 + steps):
        logits = model(tokens[:, i : i + 1], cache=cache)
        mx.eval(logits)
    return logits


def held(cache: list[Any]) -> list[Any]:
    return [mx.sort(layer.positions, axis=-1).tolist() for layer in cache]


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize(("name", "options"), POLICIES)
def test_the_same_rows_stay(model, name, options, sequences):
    replayed = load_policy(name, budget=BUDGET, **options)
    watch = Counts()
    asked = load_policy(name, budget=BUDGET, **options, protect=[watch])
    ours, theirs = (run(model, policy, sequences=sequences) for policy in (replayed, asked))
    assert held(ours) == held(theirs)
    assert replayed._replays
    assert not asked._replays
    assert watch.times >= 2 * 4


def test_hooks_are_asked_once(model):
    Asked.sequences.clear()
    run(model, Asked(budget=BUDGET), steps=5)
    assert Asked.sequences == [1] * 2 * 5  # the last step's eviction waits
    Asked.sequences.clear()
    run(model, Replayed(budget=BUDGET), steps=5)
    # The prompt's, in each layer, then the steps': of the first one, whose token took no other
    # row's place, and then one for both layers.
    assert Asked.sequences == [1] * 2 * 2 + [2]


def test_protectors_may_be_replayed(model):
    pinned = load_policy("streaming", budget=BUDGET, protect=[Pin([9])])
    cache = run(model, pinned)
    assert pinned._replays
    assert all(9 in head for layer in held(cache) for head in layer[0])


def test_another_number_of_sequences_is_asked_anew(model):
    Asked.sequences.clear()
    policy = Replayed(budget=BUDGET)
    for sequences in (1, 2, 1):
        run(model, policy, steps=3, sequences=sequences)
    prompts, first_steps, later_steps = 2 * 3, 2 * 2, 2
    assert len(Asked.sequences) == prompts + first_steps + later_steps


def test_a_hook_that_waits_is_named(model):
    with pytest.raises(PolicyHookError, match=r"policy 'Waits' .* says that it is pure"):
        run(model, Waits(budget=BUDGET))


@pytest.mark.parametrize("positions", ["contiguous", "compressed"])
def test_rows_are_numbered_alike(model, positions):
    policy = load_policy("tova", budget=BUDGET, positions=positions)
    recorded, plain = make_cache(model, policy), make_cache(model, policy)
    ours = decode(model, recorded)
    mx.disable_compile()
    theirs = decode(model, plain)
    assert held(recorded) == held(plain)
    assert mx.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
