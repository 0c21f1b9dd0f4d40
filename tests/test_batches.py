"""Batches: a sequence's rows, tokens and logits are those that it has when it is alone.

Token 0 pads, and no prompt holds it. Its embedding is made huge, so that any row of padding that
is attended to, scored or kept would be seen at once.
"""

import copy
import functools
from typing import ClassVar

import attrs
import conftest
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import tiny_models
from conftest import in_order
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache

from velox_core import (
    Policy,
    Rows,
    UnsupportedModelError,
    VeloxCache,
    VeloxError,
    apply,
    hookimpl,
    load_policy,
    make_cache,
)
from velox_core.model import velox_caches

CLOSE = {"rtol": 1e-3, "atol": 2e-3}  # of logits, between a batch and a sequence alone
HUGE = 1e12


@attrs.frozen(eq=False, kw_only=True)
class Counting(Policy):
    """A memory that goes wrong if it is asked once too often, even about rows without attention:
    the seventh part of the score is lost in each round, and what is left is rounded."""

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 1
    every_step: ClassVar[bool] = True

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        return (rows.scores + 1) * 0.85 + rows.pool(rows.received(rows.n_new))


POLICIES = {
    "tova": functools.partial(load_policy, "tova"),
    "h2o": functools.partial(load_policy, "h2o"),
    "morphkv": functools.partial(load_policy, "morphkv", window=4),
    "streaming": functools.partial(load_policy, "streaming"),
    "keys": functools.partial(load_policy, "tova", queries="keys"),
    "remembering": conftest.Remembering,
    "counting": Counting,
}


def policy_of(name, budget, scope="layer", n_sink=1):
    return POLICIES[name](budget=budget, scope=scope, n_sink=n_sink)


@functools.cache
def tiny(name, **changes):
    """A tiny model whose padding would be noticed."""
    model = tiny_models.build(name, **changes)
    for path, module in model.named_modules():
        if path.endswith("embed_tokens"):
            module.weight[0] = HUGE
    return model


def prompts_of(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(1, tiny_models.VOCAB, n).tolist() for n in lengths]


def no_padding(logprobs):
    """Greedy, but for the token that pads."""
    return mx.argmax(logprobs[..., 1:], axis=-1) + 1


def assert_same_rows(ours, alone):
    """The caches of a sequence from a batch hold what those of the same sequence alone do."""
    ours, alone = list(velox_caches(ours)), list(velox_caches(alone))
    assert ours
    assert len(ours) == len(alone)
    for one, other in zip(ours, alone, strict=True):
        assert one.offset == other.offset
        assert isinstance(one.offset, int)
        assert one.size() == other.size()
        for name, left, right in zip(HELD, in_order(one), in_order(other), strict=True):
            assert left.shape == right.shape, name
            assert np.isfinite(left).all(), name
            if "positions" in name:
                assert np.array_equal(left, right), name
            else:
                assert np.allclose(left, right, **CLOSE), name


HELD = ("positions", "keys", "values", "scores", "window", "window_positions")


# mlx-lm's generation


def generate_alone(model, prompt, steps, prefill, cache=None):
    """What mlx-lm generates from one prompt: tokens, their logarithms, and the caches."""
    cache = cache or make_prompt_cache(model)
    steps = generate_step(
        mx.array(prompt),
        model,
        prompt_cache=cache,
        prefill_step_size=prefill,
        max_tokens=steps,
        sampler=no_padding,
    )
    tokens, logprobs = zip(*[(token, np.array(odds)) for token, odds in steps], strict=True)
    return list(tokens), np.stack(logprobs), cache


@attrs.define
class Sequence:
    """What a batch generated for one prompt."""

    prompt: list
    steps: int
    tokens: list = attrs.Factory(list)
    logprobs: list = attrs.Factory(list)
    cache: list | None = None


def generate_together(model, sequences, joins, removed, **sizes):
    """Generate with all in one ``BatchGenerator``; sequence ``i`` comes after ``joins[i]`` rounds,
    and those of ``removed`` are taken out after that many rounds."""
    generator = BatchGenerator(model, sampler=no_padding, **sizes)
    by_uid, waiting, rounds = {}, list(zip(joins, sequences, strict=True)), 0
    while waiting or any(s.cache is None for s in by_uid.values()):
        for pair in [pair for pair in waiting if pair[0] <= rounds]:
            waiting.remove(pair)
            [uid] = generator.insert([pair[1].prompt], [pair[1].steps])
            by_uid[uid] = pair[1]
        rounds += 1
        assert rounds < 1000
        for response in generator.next()[1]:
            sequence = by_uid[response.uid]
            sequence.tokens.append(response.token)
            sequence.logprobs.append(np.array(response.logprobs))
            if response.finish_reason:
                assert response.finish_reason == "length"
                sequence.cache = response.prompt_cache
        leaving = [u for u, s in by_uid.items() if s.cache is None and removed.get(u) == rounds]
        for uid, (cache, _) in generator.remove(leaving, return_prompt_caches=True).items():
            by_uid[uid].cache = cache


@st.composite
def runs(draw):
    """Prompts, what is kept of them, and how a generator is to go about them."""
    n = draw(st.integers(2, 5))
    lengths = draw(st.lists(st.just(1) | st.integers(1, 40), min_size=n, max_size=n))
    steps = draw(st.lists(st.integers(1, 14), min_size=n, max_size=n))
    longest = max(map(int.__add__, lengths, steps))
    return {
        "lengths": lengths,
        "steps": steps,
        "joins": draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)),
        "removed": draw(st.dictionaries(st.integers(0, n - 1), st.integers(1, 12), max_size=1)),
        # Far below, around some sequence's length, or beyond all.
        "budget": draw(st.integers(10, 20) | st.sampled_from([max(10, longest // 2), longest])),
        "scope": draw(st.sampled_from(["layer", "head"])),
        "prefill_step_size": draw(st.sampled_from([1, 3, 8, 64])),
        "completion_batch_size": draw(st.integers(1, 5)),
        "prefill_batch_size": draw(st.integers(1, 5)),
    }


def compare_generated(model, policy, run):
    prompts = prompts_of(run["lengths"])
    sequences = [Sequence(*pair) for pair in zip(prompts, run["steps"], strict=True)]
    prefill = run["prefill_step_size"]
    with apply(model, policy):
        generate_together(
            model,
            sequences,
            run["joins"],
            run["removed"],
            prefill_step_size=prefill,
            completion_batch_size=max(run["completion_batch_size"], run["prefill_batch_size"]),
            prefill_batch_size=run["prefill_batch_size"],
        )
        for sequence in sequences:
            if not sequence.tokens:  # removed while it was waiting, or in its prompt
                continue
            n = len(sequence.tokens)
            tokens, logprobs, cache = generate_alone(model, sequence.prompt, n, prefill)
            assert sequence.tokens == tokens
            assert np.allclose(sequence.logprobs, logprobs, **CLOSE)
            if n == sequence.steps:  # otherwise the generator is a step ahead of what it gave
                assert_same_rows(sequence.cache, cache)


RUN = {
    "lengths": [3, 40, 17, 1, 33],
    "steps": [12, 4, 9, 12, 7],
    "joins": [0, 0, 3, 5, 0],
    "removed": {},
    "budget": 12,
    "scope": "layer",
    "prefill_step_size": 8,
    "completion_batch_size": 4,
    "prefill_batch_size": 3,
}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8)
@given(run=runs())
@example(run=RUN)
@example(run=RUN | {"scope": "head", "removed": {0: 9}})
def test_batch_generator(name, run):
    compare_generated(tiny("llama"), policy_of(name, run["budget"], run["scope"]), run)


#: Attention of other kinds: softcapped, with sinks, latent, beside linear layers, convolutions and
#: sliding windows, and rows that layers share.
OTHERS = {
    "gemma2": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "qwen3_next": {},
    "lfm2": {},
    "gemma3_text": {},
    "gemma3n": {},
    "gemma4_text": {"num_key_value_heads": 2},
    "iquestloopcoder": {},
}


@pytest.mark.parametrize("scope", ["layer", "head"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_attention(name, scope):
    # The linear layers of some hybrids forget the tokens before a prompt of fewer than their
    # convolution's width (mlx-lm's own caches too), so none is as short as that here.
    run = RUN | {"lengths": [5, 40, 17, 6, 33], "scope": scope}
    for policy in ("tova", "h2o"):
        compare_generated(tiny(name, **OTHERS[name]), policy_of(policy, 12, scope), run)


def test_gemma2_with_a_kv_head_for_each_query_head():
    model = tiny("gemma2", num_key_value_heads=4)
    compare_generated(model, policy_of("tova", 12), RUN)
    compare_generated(model, policy_of("tova", 12, "head"), RUN | {"scope": "head"})


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_budget_for_each_layer(name):
    """One mask is made for all layers, and it fits none but the first."""
    n_layers = len(make_prompt_cache(tiny(name)))
    compare_generated(tiny(name), policy_of("tova", [10 + 7 * i for i in range(n_layers)]), RUN)


@pytest.mark.parametrize("name", ["deepseek_v3", "mistral4", "iquestloopcoder"])
def test_a_budget_for_each_layer_where_the_mask_is_the_models_own(name):
    n_layers = len(make_prompt_cache(tiny(name)))
    with pytest.raises(UnsupportedModelError, match=r"one mask for all layers.*one budget"):
        make_cache(tiny(name), policy_of("tova", [10 + i for i in range(n_layers)]))
    assert make_cache(tiny(name), policy_of("tova", [10] * n_layers))


class Letters:
    """As much of a tokenizer as ``batch_generate`` wants."""

    eos_token_ids = (0,)

    def decode(self, tokens):
        return "".join(map(chr, tokens))


@pytest.mark.parametrize("name", ["tova", "h2o", "morphkv"])
def test_batch_generate_turn_by_turn(name):
    """mlx-lm's own function, its caches handed back for the next turn."""
    model, policy = tiny("llama"), policy_of(name, 14, "head")
    alone, caches = [None] * 3, None
    with apply(model, policy):
        for turn, lengths in enumerate([(5, 30, 1), (9, 2, 20), (1, 1, 1)]):
            prompts = prompts_of(lengths, seed=turn)
            batch = mlx_lm.batch_generate(
                model,
                Letters(),
                prompts,
                prompt_caches=caches,
                max_tokens=[7, 4, 11],
                return_prompt_caches=True,
                return_token_ids=True,
                sampler=no_padding,
                prefill_step_size=8,
            )
            caches = batch.caches
            for i, (prompt, steps) in enumerate(zip(prompts, [7, 4, 11], strict=True)):
                tokens, _, alone[i] = generate_alone(model, prompt, steps, 8, alone[i])
                assert batch.token_ids[i] == tokens
                assert_same_rows(caches[i], alone[i])
    assert [cache[0].size() for cache in caches] == [14, 14, 14]
    assert [cache[0].offset for cache in caches] == [36, 45, 55]


# Each operation by itself, in any order


class Life:
    """A batch of one layer list, beside the same sequences each alone."""

    def __init__(self, model, policy):
        self.model, self.policy = model, policy
        self.batch, self.alone, self.fed = None, [], 0

    def tokens(self, n):
        self.fed += 1
        return prompts_of([n], seed=self.fed)[0]

    def run(self, tokens, cache):
        logits = np.array(self.model(mx.array(tokens), cache=cache))
        assert np.isfinite(logits).all()
        return logits

    def new(self, lengths, blocks, merged_first):
        """Sequences that have seen prompts of these lengths; as caches alone or merged empty."""
        caches = [make_cache(self.model, self.policy) for _ in lengths]
        mirrors = [make_cache(self.model, self.policy) for _ in lengths]
        other = Life(self.model, self.policy)
        other.fed, other.alone = self.fed + 1000, mirrors
        if merged_first:
            other.batch = merge(caches)
            other.pad(lengths, blocks)
        else:
            for cache, mirror, n in zip(caches, mirrors, lengths, strict=True):
                if n:
                    tokens = self.tokens(n)
                    self.run([tokens], cache)
                    self.run([tokens], mirror)
            other.batch = merge(caches)
        return other

    def join(self, lengths, blocks, merged_first):
        other = self.new(lengths, blocks, merged_first)
        if self.batch is None:
            self.batch = other.batch
        else:
            for ours, theirs in zip(self.batch, other.batch, strict=True):
                ours.extend(theirs)
        self.alone += other.alone

    def pad(self, lengths, block):
        """A prompt of unequal length for each, padded on the right, in blocks."""
        lengths = [lengths[i % len(lengths)] for i in range(len(self.alone))]
        longest = max(lengths)
        if not longest:
            return
        prompts = [self.tokens(n) if n else [] for n in lengths]
        padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
        for cache in self.batch:
            cache.prepare(lengths=lengths, right_padding=[longest - n for n in lengths])
        for start in range(0, longest, block):
            part = slice(start, start + block)
            logits = self.run([tokens[part] for tokens in padded], self.batch)
            if block > 1:  # reading states settles them, and single tokens may come without that
                mx.eval([cache.state for cache in self.batch])
            for i, prompt in enumerate(prompts):
                if prompt[part]:
                    wanted = self.run([prompt[part]], self.alone[i])
                    assert np.allclose(logits[i, : wanted.shape[1]], wanted[0], **CLOSE)
        for cache in self.batch:
            cache.finalize()

    def step(self, n):
        """Single tokens for all."""
        for _ in range(n):
            tokens = [self.tokens(1) for _ in self.alone]
            logits = self.run(tokens, self.batch)
            for i, token in enumerate(tokens):
                wanted = self.run([token], self.alone[i])
                assert np.allclose(logits[i], wanted[0], **CLOSE)

    def trim(self, n):
        """The newest tokens taken back, where all can be, or nothing done at all."""
        trimmed = [cache.trim(n) for cache in self.batch]
        assert trimmed[0] in (0, min(n, *(alone[0].offset for alone in self.alone)))
        assert len(set(trimmed)) == 1
        if trimmed[0]:
            for alone in self.alone:
                assert [cache.trim(trimmed[0]) for cache in alone] == trimmed

    def keep(self, picks):
        """Only some stay, in another order perhaps."""
        picks = list(dict.fromkeys(i % len(self.alone) for i in picks))
        for cache in self.batch:
            cache.filter(picks)
        self.alone = [self.alone[i] for i in picks]

    def copy(self):
        """The copy goes on, and the original is used up before."""
        other = copy.deepcopy(self.batch)
        self.run([[1]] * len(self.alone), self.batch)
        self.batch = other

    def rebuild(self):
        """Every sequence taken out and put together again, with an empty one for a moment."""
        taken = [extract(self.batch, i) for i in range(len(self.alone))]
        self.batch = merge([*taken, make_cache(self.model, self.policy)])
        for cache in self.batch:
            cache.filter(list(range(len(taken))))

    def check(self):
        for i, alone in enumerate(self.alone):
            assert_same_rows(extract(self.batch, i), alone)
        for cache in self.batch:
            assert cache.offset.tolist() == [alone[0].offset for alone in self.alone]
            assert cache.size() == max(alone[0].size() for alone in self.alone)
            assert cache.tokens_kept == sum(alone[0].tokens_kept for alone in self.alone)
            assert cache.tokens_seen == sum(alone[0].tokens_seen for alone in self.alone)
            assert (cache.positions is None) == cache.empty()


def merge(caches):
    return [layer[0].merge(list(layer)) for layer in zip(*caches, strict=True)]


def extract(batch, i):
    return [cache.extract(i) for cache in batch]


LENGTHS = st.lists(st.sampled_from([0, 1]) | st.integers(0, 18), min_size=1, max_size=3)
ACTS = {
    "join": st.tuples(LENGTHS, st.integers(1, 20), st.booleans()),
    "pad": st.tuples(LENGTHS, st.integers(1, 20)),
    "step": st.tuples(st.integers(1, 5)),
    "trim": st.tuples(st.integers(1, 3)),
    "keep": st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=3)),
    "copy": st.tuples(),
    "rebuild": st.tuples(),
}
ACT = st.sampled_from(list(ACTS)).flatmap(lambda act: ACTS[act].map(lambda how: (act, *how)))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=10)
@given(
    start=ACTS["join"],
    acts=st.lists(ACT, max_size=8),
    budget=st.integers(5, 16),
    scope=st.sampled_from(["layer", "head"]),
)
# A sequence with nothing but padding in a block, with and without rows from before.
@example(([0, 9], 3, True), [("pad", [0, 11], 4), ("step", 2)], 5, "layer")
@example(([12, 9], 20, False), [("pad", [9, 1], 3), ("step", 3)], 8, "head")
# Of single tokens, some are padding, and come in the place of rows that go.
@example(([12, 9], 20, False), [("step", 1), ("pad", [4, 2], 1), ("step", 3)], 8, "head")
# Rows at the end that are padding, or that a step has overwritten, when tokens are taken back.
@example(([3, 9], 20, True), [("trim", 2), ("step", 1), ("trim", 1), ("step", 1)], 14, "layer")
@example(([14, 9], 20, True), [("step", 2), ("trim", 1), ("step", 1), ("trim", 2)], 8, "head")
# Empty ones, joined by one past its budget; all but one leave.
@example(([0, 0], 1, False), [("join", [18], 20, False), ("step", 3), ("keep", [1])], 6, "layer")
@example(([18, 2], 20, False), [("step", 1), ("copy",), ("step", 1), ("rebuild",)], 6, "head")
def test_any_life_of_a_batch(name, start, acts, budget, scope):
    window = {"morphkv": 4, "h2o": budget // 2}.get(name, 1)
    model, policy = tiny("llama"), policy_of(name, budget, scope, n_sink=min(2, budget - window))
    life = Life(model, policy)
    life.join(*start)
    life.check()
    for act, *how in acts:
        getattr(life, act)(*how)
        life.check()


def test_rows_leave_with_the_longest_sequence():
    life = Life(tiny("llama"), policy_of("tova", 64))
    life.join([3, 20, 7], 8, True)
    life.pad([6, 1, 2], 3)
    assert [sorted(p) for p in life.batch[0].positions[:, 0].tolist()] == [
        [-1] * (21 - n) + list(range(n)) for n in (9, 21, 9)
    ]
    assert life.batch[0].extract(2).positions[0, 0].tolist() == list(range(9))
    life.keep([0, 2])
    assert life.batch[0].positions.tolist() == [[list(range(9))]] * 2


def test_a_copy_shares_nothing():
    life = Life(tiny("llama"), policy_of("remembering", 9))
    life.join([4, 15], 8, True)
    before = [in_order(cache) for cache in life.batch]
    other = copy.deepcopy(life.batch)
    assert other[0].policy is life.policy
    life.run([[1], [2]], other)
    mx.eval([cache.state for cache in other])
    after = [in_order(cache) for cache in life.batch]
    for old, new in zip(before, after, strict=True):
        assert all(map(np.array_equal, old, new))
    assert [n.tolist() for n in (life.batch[0].offset, other[0].offset)] == [[4, 15], [5, 16]]


def test_extract_leaves_the_batch_as_it_was():
    life = Life(tiny("llama"), policy_of("h2o", 9, "head"))
    life.join([4, 15], 8, True)
    for i in (1, 0, 1):
        alone = extract(life.batch, i)
        life.run([[1]], alone)
        mx.eval([cache.state for cache in alone])
    life.check()
    life.step(3)
    life.check()


# Padding


@attrs.frozen(eq=False, kw_only=True)
class Watching(Policy):
    """Writes down what it is shown."""

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 8
    every_step: ClassVar[bool] = True
    seen: ClassVar[list] = []

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        n = rows.queries.shape[2]
        shown = rows.attention(n), rows.received(n), rows.positions, rows.query_positions
        self.seen.append([np.array(array) for array in shown])
        return rows.pool(rows.attention(1)).squeeze(2)


@pytest.mark.parametrize("scope", ["layer", "head"])
def test_padding_is_never_attention(scope):
    Watching.seen.clear()
    life = Life(tiny("llama"), Watching(budget=9, scope=scope, n_sink=1))
    life.join([1, 20, 6], 5, True)
    life.step(4)
    padded = 0
    assert len(Watching.seen) >= 8
    for weights, received, positions, queries in Watching.seen:
        assert np.isfinite(weights).all()
        positions = np.repeat(positions, weights.shape[1] // positions.shape[1], axis=1)
        empty = np.broadcast_to(positions[:, :, None] < 0, weights.shape)
        newer = positions[:, :, None] > queries[:, None, :, None]
        missing = np.broadcast_to(queries[:, None, :, None] < 0, weights.shape)
        assert not weights[empty | newer | missing].any()
        there = np.broadcast_to(queries[:, None] >= 0, weights.shape[:-1])
        # A query sees at least itself, unless its own row has gone since.
        kept = (positions[:, :, None] <= queries[:, None, :, None]) & ~empty
        assert np.allclose(weights.sum(-1)[there & kept.any(-1)], 1, atol=1e-5)
        assert np.allclose(weights.sum(2), received, atol=1e-5)
        padded += empty.sum() + missing.sum()
    assert padded  # there was something to get wrong


def test_many_queries_with_padding():
    """A block so long that its attention is summed in parts."""
    life = Life(tiny("llama"), policy_of("h2o", 20, "head"))
    life.join([300, 610, 2], 700, True)
    life.check()


@pytest.mark.parametrize("scope", ["layer", "head"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_no_nan_from_padding_alone(name, scope):
    """Sequences for which a block, or all there ever was, is padding."""
    model = tiny(name)
    policy = policy_of("tova", 7, scope)
    batch = merge([make_cache(model, policy) for _ in range(3)])
    for lengths in ([0, 12, 0], [0, 3, 9]):
        for cache in batch:
            cache.prepare(lengths=lengths, right_padding=[12 - n for n in lengths])
        tokens = [prompts_of([n], seed=1)[0] + [0] * (12 - n) for n in lengths]
        for start in (0, 4, 8):
            # A softmax over nothing is NaN on some devices: padding sees something.
            for cache in velox_caches(batch):
                assert cache.make_mask(4).any(axis=-1).all()
            logits = model(mx.array(tokens)[:, start : start + 4], cache=batch)
            assert mx.isfinite(logits).all()
        for cache in batch:
            cache.finalize()
        for cache in velox_caches(batch):
            assert all(mx.isfinite(array).all() for array in cache.state[:2])
    assert all(cache.positions[0].max().item() == -1 for cache in velox_caches(batch))
    logits = model(mx.array([[5], [5], [5]]), cache=batch)
    fresh = model(mx.array([[5]]), cache=make_cache(model, policy))
    assert np.allclose(logits[0], fresh[0], **CLOSE)


def test_padding_would_be_noticed():
    """What these tests rest on: attending to the padding token changes everything."""
    model, policy = tiny("llama"), policy_of("tova", 64)
    logits = [model(mx.array([prompt]), cache=make_cache(model, policy)) for prompt in ([5], [0])]
    with_padding = make_cache(model, policy)
    model(mx.array([[0]]), cache=with_padding)
    seen = model(mx.array([[5]]), cache=with_padding)
    assert mx.isfinite(logits[1]).all()
    assert mx.abs(seen - logits[0]).max() > 0.1


# What is refused


def test_refusals():
    model = tiny("llama")
    cache = make_cache(model, policy_of("tova", 9))[0]
    with pytest.raises(VeloxError, match="padded on the right"):
        cache.prepare(left_padding=[0, 3])
    cache.prepare(left_padding=[0, 0])
    for other in (policy_of("tova", 10), policy_of("streaming", 9), policy_of("keys", 9)):
        theirs = make_cache(model, other)[0]
        with pytest.raises(VeloxError, match=r"one policy.*and one budget.*TOVA"):
            VeloxCache.merge([cache, theirs])
        with pytest.raises(VeloxError, match=r"one policy.*and one budget"):
            cache.extend(theirs)
    again = make_cache(model, policy_of("tova", 9))[0]  # another object, the same choice
    assert VeloxCache.merge([cache, again]).offset.tolist() == [0, 0]


# A real model


@pytest.mark.smollm2
def test_smollm2(monkeypatch):
    monkeypatch.syspath_prepend("tools")
    import smollm2

    model, tokenizer = mlx_lm.load(str(smollm2.ensure()))
    texts = [
        "The capital of France is",
        "Once upon a time there was a small village by the sea, where an old fisherman lived with "
        "his three daughters. Every morning he went out in his boat, and every evening he came "
        "back with less than the day before, until one day",
        "1, 2, 3, 4, 5, 6,",
        "Hi",
    ]
    prompts = [tokenizer.encode(text) for text in texts]
    with apply(model, load_policy("h2o", budget=24)):
        batch = mlx_lm.batch_generate(
            model,
            tokenizer,
            prompts,
            max_tokens=[6, 16, 10, 16],
            return_prompt_caches=True,
            return_token_ids=True,
            prefill_step_size=16,
            completion_batch_size=3,
            prefill_batch_size=2,
        )
        for i, prompt in enumerate(prompts):
            n = len(batch.token_ids[i])
            cache = make_prompt_cache(model)
            steps = generate_step(
                mx.array(prompt), model, prompt_cache=cache, prefill_step_size=16, max_tokens=n
            )
            assert batch.token_ids[i] == [token for token, _ in steps]
            for ours, alone in zip(batch.caches[i], cache, strict=True):
                assert np.array_equal(in_order(ours)[0], in_order(alone)[0])
    assert batch.caches[1][0].offset > 24 == batch.caches[1][0].size()
