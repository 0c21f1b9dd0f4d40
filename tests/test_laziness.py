"""No step waits for the host, and nothing grows: neither memory nor the graph behind the arrays.

mlx-lm builds the next step while the last one runs. A cache that looks at a value in between stops
that; one that keeps an array which nobody evaluates holds its whole history.
"""

import io
from typing import ClassVar

import attrs
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from mlx_lm.models.cache import KVCache

from velox_core import Policy, hookimpl, load_policy, make_cache

# What makes MLX evaluate from Python: values of an array, its text, and the calls themselves.
READS = (
    "item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__iter__",
    "__array__", "__dlpack__", "__repr__", "__format__",
)  # fmt: skip
CALLS = ("eval", "async_eval", "synchronize", "save", "save_safetensors", "clear_cache")


@pytest.fixture(scope="module")
def model():
    return tiny_models.build("llama", num_hidden_layers=1, hidden_size=32, vocab_size=32)


def graph(*arrays):
    """How many operations must still run before the arrays have values."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")


def arrays_in(value):
    """Every array that a cache holds, in whatever it holds them."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, (list, tuple)):
        return [array for part in value for array in arrays_in(part)]
    if isinstance(value, dict):
        return arrays_in(list(value.values()))
    if attrs.has(type(value)):
        return arrays_in([getattr(value, f.name) for f in attrs.fields(type(value))])
    return []


def policies(remembering, budget):
    return {
        "tova": load_policy("tova", budget=budget, n_sink=2),
        "tova, by head": load_policy("tova", budget=budget, n_sink=2, scope="head"),
        "tova, by key": load_policy("tova", budget=budget, n_sink=2, queries="keys"),
        "remembering": remembering(budget=budget, n_sink=2),
        "remembering, by head": remembering(budget=budget, n_sink=2, scope="head"),
    }


NAMES = list(policies(lambda **_: None, 8))


@pytest.fixture
def forbid(monkeypatch):
    """Make every way to look at a value an error; call it, and again to undo."""

    def forbidden(name):
        def look(*args, **kwargs):
            raise AssertionError(f"{name} was called within a step")

        return look

    def switch(on):
        if not on:
            monkeypatch.undo()
            return
        for name in READS:
            monkeypatch.setattr(mx.array, name, forbidden(name))
        for name in CALLS:
            monkeypatch.setattr(mx, name, forbidden(name))

    return switch


BLOCKS = [5, 20, *[1] * 12, 6, 1, 1, 3]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 2])
def test_no_step_waits_for_the_host(model, remembering, forbid, name, batch):
    policy = policies(remembering, budget=8)[name]
    cache = make_cache(model, policy)
    # An operation that is gone from the graph as soon as anything that follows from it runs.
    token = mx.full((batch, 1), 3) + 1
    assert graph(token) > 0
    first, seen = token, 0
    forbid(True)
    try:
        for n in BLOCKS:
            logits = model(mx.repeat(token, n, axis=1), cache=cache)
            token = mx.argmax(logits[:, -1:], axis=-1)
            seen += n
            for layer in cache:  # what a user may look at, or a progress bar
                assert layer.offset == seen
                assert layer.size() == min(seen, 8)
                assert layer.tokens_seen == batch * seen
                assert layer.is_trimmable()
        # Nor does settling, nor taking back, nor what saving starts with.
        for layer in cache:
            assert layer.trim(2) == 2
            assert layer.nbytes > 0
            assert len(layer.state) > 0
            assert layer.positions is not None
    finally:
        forbid(False)
    assert graph(first) > 0, "something was evaluated within a step"
    mx.eval(logits)
    assert graph(first) == 0
    assert len(set(np.array(cache[0].positions)[0, 0].tolist())) == 8


def test_a_look_is_noticed(model, remembering, forbid):
    """Both alarms ring: for a value that is read, and for an evaluation by any other way."""
    array = mx.array([1]) + 1
    forbid(True)
    try:
        for look in (bool, int, float, repr, mx.eval, lambda a: a.item(), lambda a: a.tolist()):
            with pytest.raises(AssertionError, match="within a step"):
                look(array)
    finally:
        forbid(False)
    assert graph(array) > 0
    memoryview(array * 2)  # a way that can't be forbidden
    assert graph(array) == 0


# Nothing grows


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["tova", "remembering"])
@pytest.mark.parametrize(("budget", "steps"), [(32, 5000), (2000, 600)], ids=["full", "filling"])
def test_memory_and_graph_stay_flat(model, remembering, name, budget, steps):
    """Decode as mlx-lm does, a step ahead, evaluating nothing but the token."""
    cache = make_cache(model, policies(remembering, budget)[name])
    token = mx.array([[1]])
    model(mx.full((1, 20), 2), cache=cache)
    memory, operations, behind = {}, {}, {}
    for step in range(1, steps + 1):
        logits = model(token, cache=cache)
        token = mx.argmax(logits[:, -1:], axis=-1)
        if step % 150 == 0:
            operations[step] = graph(token)  # of a whole step, before it runs
        mx.async_eval(token)
        if step % 150 == 0:
            mx.eval(token)
            held = arrays_in(vars(cache[0]))
            assert len(held) >= 3
            behind[step] = graph(*held)  # what is left once the token is there
            memory[step] = mx.get_active_memory()
    assert cache[0].offset == 20 + steps
    assert len(set(operations.values())) == 1, operations
    assert max(behind.values()) <= 20, behind  # scores and queries of the newest token wait
    assert len(set(behind.values())) == 1, behind
    if budget < steps:
        first, last = list(memory.values())[:8], list(memory.values())[-8:]
        assert max(last) <= max(first) + 1024, memory
    else:  # rows are still being added: those, and no more
        row = 2 * 2 * 16 * 4 + 4 * 2  # keys and values of two heads; position, score
        grown = memory[600] - memory[150]
        assert grown <= (600 - 150 + 256) * row + 1024, memory


class Inattentive(Policy):
    """It asks for eight queries and looks at none."""

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 8

    @hookimpl
    def score(self, rows):
        return rows.positions.astype(mx.float32)


class Stubborn(Policy):
    """It chooses by scores alone, and never looks at where the rows are."""

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 1

    @hookimpl
    def score(self, rows):
        return rows.pool(rows.attention(last=1)).squeeze(2)

    @hookimpl
    def evict(self, rows, scores, protected, count):
        return mx.argsort(scores, axis=-1)[..., :count]


class Forgetful(Policy):
    """It sums scores up and then doesn't choose by them."""

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 1
    every_step: ClassVar[bool] = True

    @hookimpl
    def score(self, rows):
        return rows.scores + rows.pool(rows.attention(last=1)).squeeze(2)

    @hookimpl
    def evict(self, rows, scores, protected, count):
        return mx.argsort(rows.positions, axis=-1)[..., :count]


@pytest.mark.parametrize("cls", [Inattentive, Stubborn, Forgetful])
def test_what_no_hook_looks_at_doesnt_grow(model, cls):
    """Whatever a policy leaves unread, the core evaluates along with the keys."""
    policy = attrs.frozen(eq=False, kw_only=True)(cls)(budget=16, n_sink=0)
    cache, token, behind = make_cache(model, policy), mx.array([[1]]), []
    model(mx.full((1, 20), 2), cache=cache)
    for _ in range(3):
        for _ in range(30):
            token = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
            mx.eval(token)
        behind.append(graph(*arrays_in(vars(cache[0]))))
    assert behind[0] == behind[1] == behind[2] <= 20, behind


def test_growth_is_noticed(model):
    """Both measures rise with a cache whose bookkeeping nobody evaluates."""

    class Careless(KVCache):
        positions = mx.zeros((1, 0), mx.int32)

        def update_and_fetch(self, keys, values):
            fresh = mx.arange(self.offset, self.offset + keys.shape[2])[None]
            self.positions = mx.concatenate([self.positions, fresh], axis=1)
            return super().update_and_fetch(keys, values)

    cache, behind = [Careless()], []
    for _ in range(3):
        for _ in range(20):
            mx.eval(model(mx.array([[1]]), cache=cache))
        behind.append(graph(*arrays_in(vars(cache[0]))))
    assert 20 < behind[0] < behind[1] < behind[2]
