"""What a cache promises to mlx-lm and to its user: positions, sizes, taking back, copying; and the
hooks held to their word."""

import copy
import gc
from typing import ClassVar

import attrs
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from conftest import Remembering
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import trim_prompt_cache

from velox_core import (
    Policy,
    PolicyHookError,
    PolicyLoadError,
    VeloxCache,
    hookimpl,
    load_policy,
    make_cache,
)
from velox_core.rows import Attended, lowest

LLAMA = tiny_models.build("llama")  # 2 layers, 2 KV heads of 16
TOKENS = mx.random.randint(0, tiny_models.VOCAB, (2, 400), key=mx.random.key(0))

blocks_of_tokens = st.lists(st.just(1) | st.integers(1, 12), min_size=1, max_size=14)


def tova(**options):
    return load_policy("tova", **{"budget": 8, "n_sink": 2} | options)


KINDS = [("tova", "layer"), ("tova", "head"), ("remembering", "layer"), ("remembering", "head")]
kinds = st.sampled_from(KINDS)
every_kind = pytest.mark.parametrize("kind", KINDS, ids="-".join)


def make(kind, remembering):
    """TOVA, which starts afresh each step, or a policy with a memory."""
    name, scope = kind
    if name == "tova":
        return tova(scope=scope)
    return remembering(budget=8, n_sink=2, scope=scope)


def feed(cache, blocks, batch=1, start=0):
    """Feed blocks of the tokens to the model; the last block's logits."""
    logits = None
    for n in blocks:
        logits = LLAMA(TOKENS[:batch, start : start + n], cache=cache)
        start += n
    return logits


def kept(cache):
    return [np.sort(np.array(layer.positions), axis=-1).tolist() for layer in cache]


# Positions and sizes


@given(
    kind=kinds, blocks=blocks_of_tokens, batch=st.integers(1, 2), reads=st.sets(st.integers(0, 14))
)
def test_offset_is_the_true_position(remembering, kind, blocks, batch, reads):
    policy = make(kind, remembering)
    cache, total = make_cache(LLAMA, policy), 0
    for step, n in enumerate(blocks):
        feed(cache, [n], batch, total)
        total += n
        for layer in cache:
            assert layer.offset == total
            assert type(layer.offset) is int
            assert layer.tokens_seen == batch * total
            assert layer.size() == min(total, 8)
        if step in reads or step == len(blocks) - 1:
            for positions in kept(cache):
                for choice in (c for sequence in positions for c in sequence):
                    assert len(choice) == min(total, 8)  # at most the budget
                    assert len(set(choice)) == len(choice)
                    assert choice[-1] == total - 1  # the newest stays
                    assert choice[: min(total, 2)] == [0, 1][:total]  # and so do the sinks
            assert all(layer.offset == total for layer in cache)


def test_rope_is_given_true_positions():
    """The model rotates by ``offset``: keys are those of a model that evicts nothing."""
    cache, full = make_cache(LLAMA, tova()), make_cache(LLAMA, tova(budget=500))
    feed(cache, [20, 1, 1, 1, 5]), feed(full, [20, 1, 1, 1, 5])
    # The first layer's keys depend on token and position only.
    rows = cache[0].positions[0, 0]
    assert rows.tolist() != list(range(20, 28))
    keys, all_keys = cache[0].state[0], full[0].state[0]
    np.testing.assert_allclose(np.array(keys), np.array(all_keys[:, :, rows]), atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("scope", ["layer", "head"])
@pytest.mark.parametrize("batch", [1, 2])
def test_nbytes_is_what_is_held(remembering, dtype, scope, batch):
    model = tiny_models.build("llama", dtype)
    row = 2 * 2 * 16 * dtype.size  # key and value, two heads
    choices = 2 if scope == "head" else 1
    for policy in (tova(scope=scope), remembering(budget=8, n_sink=2, scope=scope)):
        cache, total = make_cache(model, policy), 0
        assert [layer.nbytes for layer in cache] == [0, 0]
        for n in (30, 1, 1, 1, 4, 1):
            model(TOKENS[:batch, total : total + n], cache=cache)
            total += n
            beside = 4 * choices * 8  # positions
            if policy.every_step:
                beside += 4 * choices * 8 + 4 * 7 * 16 * dtype.size  # scores, window of queries
            wanted = batch * (8 * row + beside) + 4 * 7 * policy.every_step  # their positions
            for layer in cache:
                assert layer.nbytes == layer.kept_bytes == wanted
                held = [a for a in layer.state if isinstance(a, mx.array)]
                assert sum(a.nbytes for a in held) == wanted
                # No larger array hides behind them.
                owned = [a for a in vars(layer).values() if isinstance(a, mx.array)]
                assert sum(a.nbytes for a in owned) == wanted
                assert layer.full_bytes == batch * 256 * row  # what a KVCache makes room for
                assert layer.compression_ratio == layer.full_bytes / wanted
                assert layer.tokens_kept == batch * 8


def test_memory_is_freed():
    """What ``nbytes`` says is what MLX holds, and not the block that rows were kept of."""
    rows = mx.zeros((1, 2, 4096, 64))
    mx.eval(rows)
    gc.collect()
    before = mx.get_active_memory()
    cache = VeloxCache(tova(queries="keys"), budget=8)
    cache.update_and_fetch(rows, rows)
    mx.eval(cache.state)
    held = mx.get_active_memory() - before
    # The allocator may hand out a freed buffer up to twice as large.
    assert cache.nbytes <= held <= 2 * cache.nbytes < rows.nbytes / 100


def test_an_empty_cache():
    cache = VeloxCache(tova(), 8)
    assert cache.empty()
    assert cache.offset == cache.size() == cache.nbytes == cache.tokens_seen == 0
    assert cache.tokens_kept == cache.full_bytes == 0
    assert cache.positions is None
    assert cache.compression_ratio == 1
    assert cache.trim(3) == 0
    assert not hasattr(cache, "bits")  # quantised attention, for mlx-lm
    assert bool(cache)


# Taking back


@settings(max_examples=60)
@given(
    kind=kinds,
    blocks=blocks_of_tokens,
    newest=st.just(1) | st.integers(1, 12),
    taken=st.integers(1, 12),
    after=st.lists(st.just(1) | st.integers(1, 12), min_size=1, max_size=5),
)
def test_trim_of_the_newest_block_is_exact(remembering, kind, blocks, newest, taken, after):
    """As if the tokens had never come: the same rows, and the same logits afterwards."""
    taken = min(taken, newest)
    policy = make(kind, remembering)
    cache, never = make_cache(LLAMA, policy), make_cache(LLAMA, policy)
    before = sum(blocks)
    feed(cache, [*blocks, newest])
    feed(never, blocks)
    if newest > taken:
        feed(never, [newest - taken], start=before)
    total = before + newest - taken
    assert all(layer.is_trimmable() for layer in cache)
    assert [layer.trim(taken) for layer in cache] == [taken, taken]
    assert [layer.offset for layer in cache] == [total, total]
    for block in range(len(after)):
        logits = feed(cache, after[block : block + 1], start=total)
        wanted = feed(never, after[block : block + 1], start=total)
        np.testing.assert_allclose(np.array(logits), np.array(wanted), atol=1e-5)
        total += after[block]
    assert kept(cache) == kept(never)


@given(kind=kinds, blocks=blocks_of_tokens, newest=st.integers(1, 12), taken=st.integers(1, 12))
def test_rows_after_a_trim(remembering, kind, blocks, newest, taken):
    taken = min(taken, newest)
    policy = make(kind, remembering)
    cache, never = make_cache(LLAMA, policy), make_cache(LLAMA, policy)
    feed(cache, [*blocks, newest])
    assert trim_prompt_cache(cache, taken) == taken
    feed(never, blocks)
    if newest > taken:
        feed(never, [newest - taken], start=sum(blocks))
    assert kept(cache) == kept(never)
    for ours, theirs in zip(cache, never, strict=True):
        pairs = zip(ours.state[:4], theirs.state[:4], strict=True)
        for a, b in (pair for pair in pairs if pair[0] is not None):
            np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5)


@given(blocks=blocks_of_tokens, taken=st.integers(1, 200))
def test_trim_while_nothing_was_evicted(blocks, taken):
    """Any number, over block borders, and no more than there are."""
    cache, never = (make_cache(LLAMA, tova(budget=200)) for _ in range(2))
    total = sum(blocks)
    feed(cache, blocks)
    left = max(0, total - taken)
    assert trim_prompt_cache(cache, taken) == total - left
    if left:
        feed(never, [left])
    assert [layer.offset for layer in cache] == [left, left]
    logits, wanted = feed(cache, [3, 1], start=left), feed(never, [3, 1], start=left)
    np.testing.assert_allclose(np.array(logits), np.array(wanted), atol=1e-5)
    assert kept(cache) == [[[list(range(left + 4))]]] * 2


@pytest.mark.parametrize(
    "blocks", [[30], [30, 1], [30, 1, 1, 1], [5, 1, 1, 1, 1, 1], [3, 9, 4]], ids=str
)
@every_kind
def test_trim_that_cant_be_exact_does_nothing(remembering, kind, blocks):
    policy = make(kind, remembering)
    for read in (False, True):
        cache, total = make_cache(LLAMA, policy), sum(blocks)
        feed(cache, blocks)
        untouched = copy.deepcopy(cache)
        if read:  # the newest block's eviction is done now
            assert len(kept(cache)[0][0][0]) == 8
            assert not any(layer.is_trimmable() for layer in cache)
            assert trim_prompt_cache(cache, 1) == 0
            assert [layer.trim(1) for layer in cache] == [0, 0]
        if len(blocks) > 1:  # a single block can be taken back whole
            assert [layer.trim(blocks[-1] + 1) for layer in cache] == [0, 0]
        assert [layer.trim(0) for layer in cache] == [0, 0]
        assert [layer.offset for layer in cache] == [total, total]
        assert [layer.size() for layer in cache] == [8, 8]
        logits, wanted = feed(cache, [1], start=total), feed(untouched, [1], start=total)
        np.testing.assert_allclose(np.array(logits), np.array(wanted), atol=1e-5)
        assert kept(cache) == kept(untouched)


@every_kind
def test_trim_twice_and_again(remembering, kind):
    """As speculative decoding does it: some taken back, after every block."""
    policy = make(kind, remembering)
    cache, never = make_cache(LLAMA, policy), make_cache(LLAMA, policy)
    feed(cache, [12]), feed(never, [12])
    total = 12
    for accepted in (4, 1, 3, 2, 4, 1, 1):
        feed(cache, [5], start=total)
        for part in [(5 - accepted) // 2, 5 - accepted - (5 - accepted) // 2]:
            if part:
                assert trim_prompt_cache(cache, part) == part
        feed(never, [accepted], start=total)
        total += accepted
        assert [layer.offset for layer in cache] == [total, total]
    assert kept(cache) == kept(never)


# Copies


@given(kind=kinds, blocks=blocks_of_tokens, after=blocks_of_tokens)
def test_a_deep_copy_goes_its_own_way(remembering, kind, blocks, after):
    policy = make(kind, remembering)
    cache, total = make_cache(LLAMA, policy), sum(blocks)
    feed(cache, blocks)
    twin = copy.deepcopy(cache)  # before the newest block's eviction, that is
    assert all(layer.policy is policy for layer in twin)
    other = mx.roll(TOKENS, 7, axis=1)
    LLAMA(other[:1, total : total + 9], cache=twin)
    LLAMA(other[:1, total : total + 1], cache=twin)
    assert [layer.offset for layer in cache] == [total, total]
    alone = make_cache(LLAMA, policy)
    feed(alone, blocks)
    logits, wanted = feed(cache, after, start=total), feed(alone, after, start=total)
    assert mx.array_equal(logits, wanted)
    assert kept(cache) == kept(alone)


# Hooks held to their word


def told(hook, gives, n_tokens=12, **attributes):
    """What is said when a policy's hook gives that."""

    @hookimpl
    def right(self, rows):
        return rows.positions.astype(mx.float32)

    body = {"hook_version": 1, "score": right, hook: hookimpl(gives)} | attributes
    policy = attrs.frozen(eq=False, kw_only=True)(type("Told", (Policy,), body))
    cache = make_cache(LLAMA, policy(budget=8, n_sink=2))
    feed(cache, [n_tokens])
    with pytest.raises(PolicyHookError) as caught:
        kept(cache)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("policy 'Told' (module ")
    return message


def give(value):
    return lambda self, rows: value(rows)


def test_score_gives_nothing():
    message = told("score", give(lambda rows: None))
    assert "`score` gave None, not an mx.array of shape (1, 1, 12) and type mlx.core.float32" in (
        message
    )
    assert "Is a `return` missing?" in message


def test_score_gives_another_shape():
    message = told("score", give(lambda rows: mx.zeros((1, 2, 12))))
    assert "`score` gave shape (1, 2, 12) and type mlx.core.float32" in message
    assert "it must give an mx.array of shape (1, 1, 12)" in message
    assert "1 head for scope='layer'" in message


def test_score_gives_another_type():
    message = told("score", give(lambda rows: rows.positions))
    assert "`score` gave shape (1, 1, 12) and type mlx.core.int32; it must give" in message
    message = told("score", give(lambda rows: rows.positions.astype(mx.float16)))
    assert "type mlx.core.float16" in message
    message = told("score", give(lambda rows: [1.0] * 12))
    assert "`score` gave [1.0, 1.0" in message


def test_score_is_checked_where_no_row_has_to_go():
    message = told("score", give(lambda rows: None), n_tokens=3, every_step=True)
    assert "`score` gave None" in message


def test_parts_of_scores_of_another_shape_or_type():
    one = give(lambda rows: mx.zeros(rows.positions.shape))
    message = told("score", one, score_parts=3, every_step=True)
    assert "`score` gave shape (1, 1, 12)" in message
    assert "it must give an mx.array of shape (1, 1, 12, 3)" in message
    parts = give(lambda rows: mx.zeros((*rows.positions.shape, 3)))
    fuse = lambda self, parts: parts  # noqa: E731
    message = told("score", parts, score_parts=3, every_step=True, fuse=fuse)
    assert "`fuse` gave shape (1, 1, 12, 3)" in message
    assert "it must give an mx.array of shape (1, 1, 12) and type mlx.core.float32" in message


@pytest.mark.parametrize("parts", [-1, 2.0, "2", True, None])
def test_a_number_of_parts_that_is_none_is_refused(parts):
    body = {"hook_version": 1, "score_parts": parts, "every_step": True}
    policy = attrs.frozen(eq=False, kw_only=True)(type("Parts", (Remembering,), body))
    with pytest.raises(PolicyLoadError, match=f"'Parts' .*: score_parts={parts!r} isn't allowed"):
        policy(budget=8, n_sink=2).hooks()


def test_parts_and_what_goes_with_them():
    def policy(**body):
        cls = type("Parts", (Remembering,), body)
        return attrs.frozen(eq=False, kw_only=True)(cls)(budget=8, n_sink=2)

    with pytest.raises(PolicyLoadError, match="remembered only with `every_step = True`"):
        policy(score_parts=2, every_step=False).hooks()
    with pytest.raises(PolicyLoadError, match=r"has a `fuse`.*set score_parts"):
        policy(fuse=lambda self, parts: parts[..., 0]).hooks()


def test_each_layer_that_shares_a_cache_has_its_queries_seen():
    cache = VeloxCache(Remembering(budget=8, n_sink=2), 8)
    cache.update_and_fetch(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 4)))
    layers = [mx.random.normal((1, 4, 3, 4), key=mx.random.key(i)) for i in range(3)]
    for queries in layers:
        cache.observe(Attended(queries, 1.0))
    # Of each KV head those of every layer, side by side.
    wanted = [queries[:, 2 * head : 2 * head + 2] for head in range(2) for queries in layers]
    assert mx.array_equal(cache._seen.queries, mx.concatenate(wanted, axis=1))


def test_protect_gives_something_wrong():
    message = told("protect", give(lambda rows: mx.zeros((1, 1, 12))))
    assert "`protect` gave shape (1, 1, 12) and type mlx.core.float32; it must give" in message
    assert "shape (1, 1, 12) and type mlx.core.bool" in message
    message = told("protect", give(lambda rows: mx.zeros((12,), mx.bool_)))
    assert "`protect` gave shape (12,)" in message


def test_evict_gives_something_wrong():
    def evict(value):
        return lambda self, rows, scores, protected, count: value(scores, count)

    message = told("evict", evict(lambda scores, count: mx.zeros((1, 1, count + 1), mx.int32)))
    assert "`evict` gave shape (1, 1, 5)" in message
    assert "it must give an mx.array of shape (1, 1, 4) and type mlx.core.uint32" in message
    message = told("evict", evict(lambda scores, count: mx.zeros((1, 1, count))))
    assert "`evict` gave shape (1, 1, 4) and type mlx.core.float32" in message
    message = told("evict", evict(lambda scores, count: list(range(count))))
    assert "`evict` gave [0, 1, 2, 3], not an mx.array" in message


@attrs.frozen(eq=False, kw_only=True)
class Chooser(Policy):
    """Rows that it keeps and drops by hooks of its own."""

    hook_version: ClassVar[int] = 1

    @hookimpl
    def score(self, rows):
        return -rows.positions.astype(mx.float32)  # the newest would go first

    @hookimpl
    def protect(self, rows):
        return rows.positions % 5 == 0


def test_protected_rows_stay():
    """The policy's own choice, on top of the newest row, which the core keeps."""
    cache = make_cache(LLAMA, Chooser(budget=8, n_sink=2))
    feed(cache, [20])
    assert kept(cache)[0] == [[[0, 1, 2, 3, 5, 10, 15, 19]]]
    feed(cache, [1], start=20)
    assert kept(cache)[0] == [[[0, 1, 2, 3, 5, 10, 15, 20]]]


def test_evict_of_its_own():
    class Backwards(Chooser):
        @hookimpl
        def evict(self, rows, scores, protected, count):
            return mx.argsort(rows.positions, axis=-1)[..., :count]

    backwards = attrs.frozen(eq=False, kw_only=True)(Backwards)
    cache = make_cache(LLAMA, backwards(budget=8, n_sink=2))
    feed(cache, [20, 1, 1])
    assert kept(cache) == [[[list(range(14, 22))]]] * 2


@attrs.frozen(eq=False, kw_only=True)
class InPlace(Policy):
    """Works on what it is shown, in place or on a copy."""

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 1
    every_step: ClassVar[bool] = True
    copies: bool = False

    @hookimpl
    def score(self, rows):
        seen = [rows.scores, rows.keys, rows.values]
        scores, keys, values = [array + 0 for array in seen] if self.copies else seen
        scores += rows.pool(rows.attention()).squeeze(2)
        keys += 1
        values += 1
        return scores

    @hookimpl
    def evict(self, rows, scores, protected, count):
        gone = lowest(mx.where(protected, mx.inf, scores), rows.positions, count)
        seen = [rows.positions, rows.newest]
        positions, newest = [array + 0 for array in seen] if self.copies else seen
        positions += 1
        newest += 1
        return gone


def test_a_hook_that_works_in_place_changes_nothing_that_is_held():
    found = []
    for copies in (True, False):
        cache = make_cache(LLAMA, InPlace(budget=8, n_sink=2, copies=copies))
        feed(cache, [20, 1, 1, 1, 10])
        assert trim_prompt_cache(cache, 3) == 3
        logits = feed(cache, [1, 1], start=30)
        found.append((kept(cache), np.array(logits), [np.array(layer.keys) for layer in cache]))
    (rows, logits, keys), (other_rows, other_logits, other_keys) = found
    assert rows == other_rows
    assert np.array_equal(logits, other_logits)
    assert all(map(np.array_equal, keys, other_keys))


def test_every_hook_sees_the_newest_row_without_a_score():
    """It came in the place of a row that had one."""
    seen = []

    @attrs.frozen(eq=False, kw_only=True)
    class Looks(Policy):
        hook_version: ClassVar[int] = 1
        every_step: ClassVar[bool] = True

        def look(self, rows):
            seen.append(mx.where(rows.positions == rows.newest, rows.scores, 0).sum().item())

        @hookimpl
        def score(self, rows):
            self.look(rows)
            return rows.scores + 1

        @hookimpl
        def protect(self, rows):
            self.look(rows)
            return rows.positions < 0

        @hookimpl(wrapper=True)
        def evict(self, rows):
            self.look(rows)
            return (yield)

    feed(make_cache(LLAMA, Looks(budget=8, n_sink=0)), [5, *[1] * 8])
    assert len(seen) > 20
    assert not any(seen)


# max_age, in every mix of blocks: see test_tova_oracle.py


@pytest.mark.parametrize("bad", [-1.0, -np.inf, np.nan])
def test_what_is_too_old_goes_before_the_worst_score(bad):
    @attrs.frozen(eq=False, kw_only=True)
    class FirstOnes(Policy):
        hook_version: ClassVar[int] = 1

        @hookimpl
        def score(self, rows):
            return mx.where(rows.positions >= 8, mx.array(bad), 0.0)

    cache = make_cache(LLAMA, FirstOnes(budget=8, n_sink=2, max_age=10))
    feed(cache, [8, *[1] * 52])
    assert kept(cache)[0] == [[[0, 1, *range(54, 60)]]]


def test_a_max_age_beyond_any_position_is_none():
    found = []
    for max_age in (None, 2**31 - 1, 2**64):
        cache = make_cache(LLAMA, tova(max_age=max_age))
        feed(cache, [20, 1, 1, 5, 1])
        found.append(kept(cache))
    assert found[0] == found[1] == found[2]
