"""Decode steps whose rows to go are chosen for all layers at once: the same rows as when each
layer's hooks are asked by themselves."""

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from asked_by_layer import Counts
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_core import Policy, PolicyHookError, Rows, hookimpl, load_policy, make_cache, turns

BUDGET = 12
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("tova", {"n_sink": 2}),
    ("tova", {"n_sink": 2, "scope": "head"}),
    ("tova", {"queries": "keys"}),
    ("tova", {"positions": "compressed"}),
    ("h2o", {"max_age": 20}),
    ("h2o", {"scope": "layer", "recent": 3}),
    ("morphkv", {"window": 5}),
    ("morphkv", {"window": 3, "fusion": "max"}),
    ("streaming", {}),
]


@attrs.frozen(eq=False, kw_only=True)
class ByKeys(Policy):
    """Rows of long keys stay: what is in no turn."""

    hook_version: ClassVar[int] = 1
    pure: ClassVar[bool] = True

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        return rows.pool(mx.linalg.norm(rows.keys, axis=-1))


@attrs.frozen(eq=False, kw_only=True)
class ByLayer(Policy):
    """Even layers keep the newest rows, odd ones the oldest."""

    hook_version: ClassVar[int] = 1
    pure: ClassVar[bool] = True

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        age = (rows.newest - rows.positions).astype(mx.float32)
        return -age if rows.layer % 2 == 0 else age


@attrs.frozen(eq=False, kw_only=True)
class OneLayer(ByLayer):
    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        age = (rows.newest - rows.positions).astype(mx.float32)
        return -age if rows.layer == 1 else age


@attrs.frozen(eq=False, kw_only=True)
class WrongAtOnce(ByLayer):
    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        return rows.positions if rows.n_new == 1 else rows.positions.astype(mx.float32)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many layers each choice was made."""
    sizes: list[int] = []
    chosen = turns._choose

    def count(policy: Policy, together: list[turns.Turn]) -> None:
        sizes.append(len(together))
        chosen(policy, together)

    monkeypatch.setattr(turns, "_choose", count)
    return sizes


def tokens_of(n: int, seed: int = 3, sequences: int = 1) -> mx.array:
    return mx.random.randint(1, 30, (sequences, n), key=mx.random.key(seed))


def decode(model: Any, cache: list[Any], tokens: mx.array, prompt: int) -> mx.array:
    """Read a prompt and then token by token, and give their logits."""
    logits = [model(tokens[:, :prompt], cache=cache)[:, -1:]]
    for i in range(prompt, tokens.shape[1]):
        logits.append(model(tokens[:, i : i + 1], cache=cache))
        mx.eval(logits[-1])
    return mx.concatenate(logits, axis=1)


def velox_layers(cache: list[Any]) -> list[Any]:
    return [layer for layer in cache if hasattr(layer, "policy")]


def held(cache: list[Any]) -> list[Any]:
    return [mx.sort(layer.positions, axis=-1).tolist() for layer in velox_layers(cache)]


def both(
    model: Any, make: Callable[[list[Any]], Policy], tokens: mx.array, prompt: int = 15
) -> tuple[Any, Any]:
    """Caches that gave the same logits: chosen for at once, and layer by layer.

    Args:
        make: the policy, given what is to stand beside it.
    """
    watch = Counts()
    runs = []
    for beside in ([], [watch]):
        cache = make_cache(model, make(beside))
        runs.append((cache, decode(model, cache, tokens, prompt)))
    assert watch.times
    (ours, logits), (theirs, other_logits) = runs
    assert mx.allclose(logits, other_logits, atol=1e-5)
    return ours, theirs


def named(name: str, **options: Any) -> Callable[[list[Any]], Policy]:
    return lambda beside: load_policy(name, **{"budget": BUDGET, **options}, protect=beside)


def of_class(policy_class: type[Policy]) -> Callable[[list[Any]], Policy]:
    def make(beside: list[Any]) -> Policy:
        policy = policy_class(budget=BUDGET)
        policy.hooks(beside)
        return policy

    return make


@pytest.mark.parametrize(("name", "options"), POLICIES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("sequences", [1, 3])
def test_the_same_rows_stay(asked, name, options, dtype, sequences):
    model = tiny_models.build("llama", dtype, num_hidden_layers=3)
    ours, theirs = both(model, named(name, **options), tokens_of(40, sequences=sequences))
    # The token after the prompt only makes the hole that the next ones go into.
    assert asked == [3] * 23
    assert held(ours) == held(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if one.policy.every_step:
            pair = [mx.sort(cache._scores, axis=2) for cache in (one, other)]
            assert mx.allclose(*pair, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [
        ("gpt_oss", 2),  # attention sinks
        ("gemma2", 2),  # squeezes its logits
        ("deepseek_v3", 2),  # stores other keys than it attends with
        ("qwen3_next", 1),  # most layers have no keys
    ],
)
def test_of_every_kind_of_attention(asked, architecture, layers):
    model = tiny_models.build(architecture)
    ours, theirs = both(model, named("h2o", n_sink=1), tokens_of(36))
    assert len(velox_layers(ours)) >= layers
    assert set(asked) == {len(velox_layers(ours))}
    assert held(ours) == held(theirs)


@attrs.frozen(eq=False, kw_only=True)
class BySinks(ByLayer):
    n_queries: ClassVar[int] = 1

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        age = (rows.newest - rows.positions).astype(mx.float32)
        sinks = rows.attended.sinks
        return -age if sinks is None else age * sinks.mean()


@attrs.frozen(eq=False, kw_only=True)
class InPlace(Policy):
    """Works in place on all that it sees."""

    hook_version: ClassVar[int] = 1
    every_step: ClassVar[bool] = True
    pure: ClassVar[bool] = True

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        scores, positions, newest = rows.scores, rows.positions, rows.newest
        newest -= positions
        scores -= newest
        positions *= 0
        return scores


def test_hooks_that_work_in_place_change_nothing_that_is_held():
    model = tiny_models.build("llama", num_hidden_layers=3)
    ours, theirs = InPlace(budget=BUDGET), InPlace(budget=BUDGET)
    theirs.hooks([Counts()])
    caches, tokens = [make_cache(model, policy) for policy in (ours, theirs)], tokens_of(40)
    logits = [[model(tokens[:, :15], cache=cache)[:, -1:]] for cache in caches]
    for i in range(15, 40):  # in turn: what is made once for all has the same positions
        for cache, of_cache in zip(caches, logits, strict=True):
            of_cache.append(model(tokens[:, i : i + 1], cache=cache))
            mx.eval(of_cache[-1])
    assert ours._replays[turns._ALL]
    assert held(caches[0]) == held(caches[1])
    assert mx.allclose(*map(mx.concatenate, logits), atol=1e-5)


@attrs.frozen(eq=False, kw_only=True)
class Counting(Policy):
    """Remembers scores that its choice doesn't go by."""

    hook_version: ClassVar[int] = 1
    every_step: ClassVar[bool] = True
    pure: ClassVar[bool] = True

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        return rows.scores + 1

    @hookimpl
    def evict(self, rows: Rows, count: int) -> mx.array:
        return mx.argsort(rows.positions, axis=-1)[..., 4 : 4 + count]


def test_scores_that_nobody_asks_for_are_no_growing_graph():
    model = tiny_models.build("llama", num_hidden_layers=2)
    cache = make_cache(model, Counting(budget=BUDGET))
    decode(model, cache, tokens_of(40), prompt=15)
    text = io.StringIO()
    mx.export_to_dot(text, cache[0]._share.all_scores)
    assert "shape=rectangle" not in text.getvalue()


def by(rule: Any) -> type[Policy]:
    """A policy that keeps the oldest or the newest rows, as a rule has it."""

    class By(ByLayer):
        @hookimpl
        def score(self, rows: Rows) -> mx.array:
            age = (rows.newest - rows.positions).astype(mx.float32)
            return mx.where(rule(rows), -age, age)

    return By


RULES = [
    lambda rows: mx.array(1) == rows.layer,
    lambda rows: mx.array("1" in f"layer{rows.layer}"),
    lambda rows: mx.array(rows.layer is not None and rows.layer == 1),
    lambda rows: mx.array(bool(np.array([True, False, True])[rows.layer])),
    lambda rows: mx.array(hasattr(rows.keys, "astype") and rows.layer == 0),
    lambda rows: rows.pool(mx.einsum("bhrd->bhr", rows.keys)) > 0,
]


@pytest.mark.parametrize("of", [ByKeys, ByLayer, OneLayer, *map(by, RULES)])
def test_hooks_that_want_to_know_more_are_asked_layer_by_layer(asked, of):
    model = tiny_models.build("llama", num_hidden_layers=3)
    ours, theirs = both(model, of_class(of), tokens_of(40))
    assert asked == [3]  # and then never again
    assert held(ours) == held(theirs)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_hooks_may_go_by_whether_there_are_sinks(architecture):
    ours, theirs = both(tiny_models.build(architecture), of_class(BySinks), tokens_of(40))
    assert held(ours) == held(theirs)


class Raises:
    """Fails at some calls."""

    pure = True
    fails = False

    @hookimpl
    def protect(self, rows: Rows) -> mx.array:
        if self.fails:
            raise RuntimeError("now")
        return rows.positions < 2


def test_an_error_of_a_hooks_own_comes_through():
    model = tiny_models.build("llama", num_hidden_layers=2)
    raises = Raises()
    cache = make_cache(model, load_policy("h2o", budget=BUDGET, protect=[raises]))
    tokens = tokens_of(24)
    decode(model, cache, tokens[:, :17], prompt=15)
    raises.fails = True
    with pytest.raises(RuntimeError, match="now"):
        model(tokens[:, 17:18], cache=cache)
    raises.fails = False
    for i in range(17, 24):
        mx.eval(model(tokens[:, i : i + 1], cache=cache))
    alone = make_cache(model, load_policy("h2o", budget=BUDGET, protect=[Counts(), Raises()]))
    decode(model, alone, tokens, prompt=15)
    assert held(cache) == held(alone)


def test_a_wrong_hook_is_named():
    model = tiny_models.build("llama", num_hidden_layers=2)
    cache = make_cache(model, WrongAtOnce(budget=BUDGET))
    with pytest.raises(PolicyHookError, match=r"WrongAtOnce.* `score` gave .*int32"):
        decode(model, cache, tokens_of(20), prompt=15)


def test_layers_of_other_budgets_are_chosen_for_apart(asked):
    model = tiny_models.build("llama", num_hidden_layers=4)
    ours, theirs = both(model, named("h2o", budget=[12, 9, 12, 9]), tokens_of(30))
    assert held(ours) == held(theirs)
    assert asked == [2] * 2 * 14


def test_kept_rows_of_a_layer_that_is_dropped_are_freed():
    model = tiny_models.build("llama", num_hidden_layers=2)
    cache = make_cache(model, load_policy("h2o", budget=BUDGET))
    decode(model, cache, tokens_of(20), prompt=15)
    left = [weakref.ref(layer._chosen) for layer in cache]
    assert all(isinstance(ref(), turns.Turn) for ref in left)
    del cache
    gc.collect()
    assert [ref() for ref in left] == [None, None]


def test_turns_that_nobody_takes_are_forgotten():
    model = tiny_models.build("llama", num_hidden_layers=2)
    before = len(turns._waiting.turns)
    cache = make_cache(model, load_policy("h2o", budget=BUDGET))
    decode(model, cache, tokens_of(17), prompt=15)
    for _ in range(5):  # as in scoring one answer after another
        assert [layer.trim(1) for layer in cache] == [1, 1]
        mx.eval(model(mx.array([[3]]), cache=cache))
    gc.collect()
    assert len(turns._waiting.turns) == before + 2


@pytest.mark.parametrize("name", ["tova", "h2o", "streaming"])
@pytest.mark.parametrize("positions", ["absolute", "compressed", "contiguous"])
def test_a_cache_may_go_on_in_another_thread(name, positions):
    model = tiny_models.build("llama", num_hidden_layers=2)
    policy = load_policy(name, budget=BUDGET, positions=positions)
    tokens, caches = tokens_of(30), [make_cache(model, policy) for _ in range(2)]
    logits: list[list[mx.array]] = [[], []]

    def step(which: int, start: int, end: int) -> None:
        logits[which].append(model(tokens[:, start:end], cache=caches[which])[:, -1:])
        mx.eval(logits[which][-1])

    step(0, 0, 8)
    step(1, 0, 8)
    for i in range(8, 30):
        step(0, i, i + 1)
        if i % 2:
            step(1, i, i + 1)
        else:
            thread = threading.Thread(target=step, args=(1, i, i + 1))
            thread.start()
            thread.join()
    assert len(logits[1]) == len(logits[0])
    assert mx.allclose(*(mx.concatenate(each, axis=1) for each in logits), atol=1e-5)


def test_threads_choose_for_their_own_caches():
    model = tiny_models.build("llama", num_hidden_layers=2)
    policy = load_policy("h2o", budget=BUDGET)
    found: dict[int, Any] = {}

    def run(seed: int) -> None:
        cache = make_cache(model, policy)
        decode(model, cache, tokens_of(40, seed), prompt=15)
        found[seed] = held(cache)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        alone = make_cache(model, load_policy("h2o", budget=BUDGET, protect=[Counts()]))
        decode(model, alone, tokens_of(40, seed), prompt=15)
        assert found[seed] == held(alone)


MODEL = tiny_models.build("llama", num_hidden_layers=3, hidden_size=32)
THINGS = st.one_of(
    st.tuples(st.just("token"), st.integers(1, 29)),
    st.tuples(st.just("token"), st.integers(1, 29)),
    st.tuples(st.just("look"), st.integers(0, 2)),
    st.tuples(st.just("block"), st.integers(2, 5)),
    st.tuples(st.sampled_from(["take back", "copy", "drop", "batch"]), st.just(0)),
)


def do(what: str, number: int, caches: list[Any], i: int) -> None:
    cache = caches[i]
    if what == "token":
        mx.eval(MODEL(mx.array([[number]]), cache=cache))
    elif what == "look":  # one layer is settled before the others
        assert cache[number].positions is not None
    elif what == "block":
        mx.eval(MODEL(tokens_of(number), cache=cache))
    elif what == "take back":
        for layer in cache:
            assert layer.trim(1) == 1 or not layer.is_trimmable()
    elif what == "copy":
        caches[i] = copy.deepcopy(cache)
    elif what == "drop":
        caches[i] = copy.deepcopy(caches[0])
    elif what == "batch":
        pair = cache, caches[0]
        merged = [type(layer).merge([layer, other]) for layer, other in zip(*pair, strict=True)]
        MODEL(mx.array([[5], [6]]), cache=merged)
        mx.eval(MODEL(mx.array([[7], [8]]), cache=merged))
        caches[i] = [layer.extract(0) for layer in merged]


@given(
    name=st.sampled_from(["tova", "h2o", "morphkv", "streaming"]),
    things=st.lists(st.tuples(st.integers(0, 2), THINGS), max_size=25),
)
@settings(max_examples=40, deadline=None)
def test_whatever_happens_between_the_steps_of_several_conversations(name, things):
    options = {"window": 3} if name == "morphkv" else {}
    states = []
    for beside in ([], [Counts()]):
        policy = load_policy(name, budget=8, n_sink=1, **options, protect=beside)
        caches = [make_cache(MODEL, policy) for _ in range(3)]
        for seed, cache in enumerate(caches):
            mx.eval(MODEL(tokens_of(9 + seed // 2, seed), cache=cache))
        for i, (what, number) in things:
            do(what, number, caches, i)
        states.append([held(cache) for cache in caches])
    assert states[0] == states[1]
