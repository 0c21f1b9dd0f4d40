"""Speculative decoding gives the tokens of plain greedy decoding, and ``trim`` is exact or nothing.

Plain means: the same policy, fed one token at a time.
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
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step, stream_generate
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from velox_core import (
    Policy,
    PolicyConfigError,
    Rows,
    UnsupportedModelError,
    VeloxError,
    apply,
    hookimpl,
    load_policy,
    make_cache,
)
from velox_core.lookback import LookbackCache

LOOKBACK = 8


@attrs.frozen(eq=False, kw_only=True)
class Counting(Policy):
    """A memory that goes wrong if it is asked once too often, even about rows without attention."""

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
def tiny(name="llama", **changes):
    return tiny_models.build(name, **changes)


@functools.cache
def draft_of(kind):
    """A draft model: one that is always right, one that often is, and one that never is."""
    if kind == "same":
        return tiny()
    if kind == "other":
        return tiny(seed=1)
    draft = tiny_models.build("llama")
    draft.update(tree_map(lambda x: x + 0.03 * mx.random.normal(x.shape), draft.parameters()))
    return draft


def prompt_of(n, seed=0):
    return np.random.default_rng(seed).integers(1, tiny_models.VOCAB, n).tolist()


def feed(model, cache, tokens):
    """The greedy choice after each of these tokens, fed as one block."""
    logits = model(mx.array([tokens]), cache=cache)
    mx.eval(logits)
    return mx.argmax(logits[0], axis=-1).tolist()


def assert_same(caches, others):
    for cache, other in zip(caches, others, strict=True):
        assert cache.offset == other.offset
        assert cache.size() == other.size()
        # Of copies: reading a cache settles it.
        ours, theirs = (in_order(copy.deepcopy(each)) for each in (cache, other))
        for left, right in zip(ours, theirs, strict=True):
            assert left.shape == right.shape
            if left.dtype == np.float32:
                assert np.allclose(left, right, rtol=1e-3, atol=1e-3)
            else:
                assert np.array_equal(left, right)


def speculate(model, draft, caches, prompt, steps, num_draft, prefill=LOOKBACK):
    """Tokens, and how many of them were drafted; on the way, what the caches hold is bounded."""
    generated = speculative_generate_step(
        mx.array(prompt),
        model,
        draft,
        prompt_cache=caches,
        num_draft_tokens=num_draft,
        max_tokens=steps,
        prefill_step_size=prefill,
    )
    tokens, drafted = [], 0
    for token, _, from_draft in generated:
        tokens.append(token)
        drafted += from_draft
        for cache in caches:
            assert cache.size() <= cache.budget
            assert cache.keys.shape[2] <= cache.budget + 4 * LOOKBACK
    return tokens, drafted


def assert_greedy(model, policy, prompt, tokens, caches):
    """These tokens are what the model chooses, fed one at a time, and the caches hold what is
    left then."""
    plain, text = make_cache(model, policy), prompt + tokens
    for i, token in enumerate(text):
        if i == caches[0].offset:
            assert_same(caches, plain)
        [choice] = feed(model, plain, [token])
        follows = text[i + 1 : i + 2]
        assert i + 1 < len(prompt) or follows in ([], [choice]), f"token {i + 1 - len(prompt)}"
    if caches[0].offset == len(text):
        assert_same(caches, plain)


def assert_as_if_alone(model, policy, caches, text):
    """The caches hold what those do that were fed the start of the text one token at a time."""
    plain = make_cache(model, policy)
    for token in text[: caches[0].offset]:
        feed(model, plain, [token])
    assert_same(caches, plain)


def compare(policy, draft, run):
    model, draft = tiny(), draft_of(draft)
    prompt = prompt_of(run["prompt"])
    ours = make_cache(model, policy, lookback=LOOKBACK)
    theirs = make_cache(draft, policy, lookback=LOOKBACK)
    sizes = run["steps"], run["num_draft"], run["prefill"]
    tokens, drafted = speculate(model, draft, ours + theirs, prompt, *sizes)
    assert len(tokens) == run["steps"]
    assert ours[0].offset in (len(prompt) + len(tokens) - 1, len(prompt) + len(tokens))
    assert_greedy(model, policy, prompt, tokens, ours)
    assert_as_if_alone(draft, policy, theirs, prompt + tokens)
    return tokens, drafted


RUN = {"prompt": 9, "steps": 30, "num_draft": 3, "prefill": LOOKBACK, "budget": 20}


@st.composite
def runs(draw):
    prompt = draw(st.integers(1, 24))
    return {
        "prompt": prompt,
        "steps": draw(st.integers(1, 30)),
        "num_draft": draw(st.integers(1, 5)),
        "prefill": draw(st.integers(1, LOOKBACK)),
        # Eviction starts in the prompt, after it, or never.
        "budget": draw(st.integers(9, max(9, prompt + 20))),
    }


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=4)
@given(
    run=runs(),
    scope=st.sampled_from(["layer", "head"]),
    draft=st.sampled_from(["same", "close", "other"]),
)
@example(run=RUN, scope="layer", draft="close")
@example(run=RUN | {"budget": 12, "num_draft": 5}, scope="head", draft="close")
def test_the_tokens_of_greedy_decoding(name, run, scope, draft):
    compare(policy_of(name, run["budget"], scope), draft, run)


@pytest.mark.parametrize("num_draft", [1, 3, 5])
def test_drafts_good_and_bad(num_draft):
    """Accepted altogether, in part, and hardly ever: the same tokens."""
    given, taken = [], []
    for draft in ("same", "close", "other"):
        run = RUN | {"num_draft": num_draft, "steps": 30}
        tokens, drafted = compare(policy_of("tova", 16), draft, run)
        given.append(tokens)
        taken.append(drafted / len(tokens))
    assert given[0] == given[1] == given[2]
    assert taken[0] > 0.9 * num_draft / (num_draft + 1) > taken[1] > taken[2]


@pytest.mark.parametrize("name", ["tova", "h2o"])
def test_the_tokens_of_generate_step(name):
    """The same against mlx-lm's own loop, with and without lookback."""
    model, policy, prompt = tiny(), policy_of(name, 14, "head"), prompt_of(20)
    caches = [make_cache(model, policy, lookback=LOOKBACK) for _ in range(3)]
    tokens, _ = speculate(model, model, caches[0] + caches[1], prompt, 40, 4)
    for cache, prefill in ((make_cache(model, policy), 1), (caches[2], LOOKBACK)):
        plain = generate_step(
            mx.array(prompt), model, prompt_cache=cache, prefill_step_size=prefill, max_tokens=40
        )
        assert tokens == [token for token, _ in plain]


def test_a_long_prompt_is_cut_once():
    """Blocks beyond lookback are attended whole, as without lookback, in both models alike."""
    model, policy, prompt = tiny(), policy_of("h2o", 12), prompt_of(40)
    ours = make_cache(model, policy, lookback=LOOKBACK)
    draft = make_cache(model, policy, lookback=LOOKBACK)
    tokens, drafted = speculate(model, model, ours + draft, prompt, 24, 3, prefill=64)
    plain = make_cache(model, policy)
    feed(model, plain, prompt[:-1])
    for token, wanted in zip([prompt[-1], *tokens], tokens, strict=False):
        assert feed(model, plain, [token]) == [wanted]
    assert drafted >= 12


def test_turn_by_turn():
    """The same caches for the next turn, in which the prompt comes token by token too."""
    model, draft, policy = tiny(), draft_of("close"), policy_of("remembering", 16)
    ours = make_cache(model, policy, lookback=LOOKBACK)
    theirs, text = make_cache(draft, policy, lookback=LOOKBACK), []
    for turn in range(2):
        for some, cache in ((model, ours), (draft, theirs)):
            for token in text[cache[0].offset :]:  # given, and not fed yet
                feed(some, cache, [token])
        prompt = prompt_of(5, seed=turn)
        tokens, _ = speculate(model, draft, ours + theirs, prompt, 15, 3)
        assert_greedy(model, policy, text + prompt, tokens, ours)
        text += prompt + tokens
        assert_as_if_alone(draft, policy, theirs, text)


def test_with_the_policy_applied():
    """mlx-lm makes both lists of caches itself."""
    model, draft, policy = tiny(), draft_of("close"), policy_of("tova", 12)
    prompt = prompt_of(10)
    with apply(model, policy, lookback=LOOKBACK), apply(draft, policy, lookback=LOOKBACK):
        generated = speculative_generate_step(
            mx.array(prompt), model, draft, num_draft_tokens=4, max_tokens=40, prefill_step_size=8
        )
        tokens = [token for token, *_ in generated]
    assert tokens == greedy(model, policy, prompt, 40)


def test_bounded_for_long():
    model, policy = tiny(), policy_of("h2o", 10, "head")
    caches = make_cache(model, policy, lookback=LOOKBACK)
    caches += make_cache(draft_of("close"), policy, lookback=LOOKBACK)
    speculate(model, draft_of("close"), caches, prompt_of(30), 120, 5)
    assert caches[0].offset >= 149
    for cache in caches:
        assert cache.positions.shape[-1] == 10  # which lets marked rows go for good
        assert cache.keys.shape[2] <= 10 + 4 * LOOKBACK


# Where the tokens differ, as the docs say


def without_lookback(model, policy, prompt, steps, num_draft, lookback=0):
    caches = [make_cache(model, policy, lookback=lookback) for _ in range(2)]
    generated = speculative_generate_step(
        mx.array(prompt),
        model,
        model,
        prompt_cache=caches[0] + caches[1],
        num_draft_tokens=num_draft,
        max_tokens=steps,
        prefill_step_size=1,
    )
    return [token for token, *_ in generated]


def greedy(model, policy, prompt, steps):
    cache = make_cache(model, policy)
    plain = generate_step(
        mx.array(prompt), model, prompt_cache=cache, prefill_step_size=1, max_tokens=steps
    )
    return [token for token, _ in plain]


def test_block_wise_eviction_differs():
    """Without lookback, or with too little, a round's tokens are attended whole and cut once, by
    the last one's query, so tokens part from those of plain decoding; but not below the budget."""
    model, prompt = tiny(), prompt_of(8)
    policy = policy_of("tova", 12)
    wanted = greedy(model, policy, prompt, 40)
    assert without_lookback(model, policy, prompt, 40, 4) != wanted
    assert without_lookback(model, policy, prompt, 40, 4, lookback=4) != wanted  # 5 are needed
    assert without_lookback(model, policy, prompt, 40, 4, lookback=5) == wanted
    roomy = policy_of("tova", 64)
    assert without_lookback(model, roomy, prompt, 40, 4) == greedy(model, roomy, prompt, 40)


def test_without_lookback_the_newest_block_can_be_taken_back():
    """What holds without lookback: after a round's trim, all is as if only the tokens that stay
    had come, as one block."""
    model, policy = tiny(), policy_of("h2o", 12)
    ours, plain = make_cache(model, policy), make_cache(model, policy)
    for cache in (ours, plain):
        feed(model, cache, prompt_of(20))
    feed(model, ours, [5, 6, 7, 8, 9])
    assert can_trim_prompt_cache(ours)
    assert trim_prompt_cache(ours, 3) == 3
    feed(model, plain, [5, 6])
    assert_same(ours, plain)
    assert feed(model, ours, [10, 11]) == feed(model, plain, [10, 11])


# trim


def grown(blocks, model, policy):
    """A fresh cache fed these blocks."""
    cache = make_cache(model, policy)
    for block in blocks:
        feed(model, cache, block)
    return cache


class Fed:
    """What a cache was fed and still counts, as blocks."""

    def __init__(self, lookback):
        self.lookback, self.blocks, self.n = lookback, [], 0

    def add(self, n):
        self.n += 1
        tokens = prompt_of(n, seed=self.n)
        one_by_one = n <= self.lookback
        self.blocks += [[token] for token in tokens] if one_by_one else [tokens]
        return tokens

    def take(self, n):
        while n:
            block = self.blocks.pop()
            if len(block) > n:
                self.blocks.append(block[:-n])
            n -= min(n, len(block))


ACTS = st.one_of(
    st.tuples(st.just("feed"), st.sampled_from([1, 1, 1, 2, 3, 5, 12])),
    st.tuples(st.just("trim"), st.integers(1, 5)),
    st.tuples(st.just("trim"), st.integers(1, 40)),
    st.tuples(st.just("read"), st.just(0)),
)


@pytest.mark.parametrize("lookback", [0, 4])
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=10)
@given(
    acts=st.lists(ACTS, min_size=2, max_size=14),
    budget=st.integers(6, 24),
    scope=st.sampled_from(["layer", "head"]),
)
# The row overwritten by the newest token; part of a block, then the rest; all; too much.
@example([("feed", 12), ("feed", 1), ("trim", 1), ("feed", 1), ("feed", 1)], 8, "layer")
@example([("feed", 12), ("feed", 1), ("feed", 1), ("trim", 1), ("feed", 1)], 8, "head")
@example([("feed", 5), ("feed", 12), ("trim", 5), ("trim", 7), ("feed", 3)], 8, "head")
@example([("feed", 5), ("feed", 1), ("trim", 40), ("feed", 3)], 24, "layer")
@example([("feed", 12), ("feed", 3), ("trim", 4), ("trim", 2), ("feed", 1)], 8, "layer")
# Tokens taken back that came before marked rows were let go to make room.
@example([("feed", 12), *[("feed", 3), ("feed", 1), ("trim", 3)] * 16], 6, "layer")
def test_trim_is_exact_or_nothing(name, lookback, acts, budget, scope):
    model, policy = tiny(), policy_of(name, budget, scope)
    ours, fed = make_cache(model, policy, lookback=lookback), Fed(lookback)
    for act, n in acts:
        if act == "feed":
            feed(model, ours, fed.add(n))
        elif act == "read":
            mx.eval([cache.state for cache in ours])
        else:
            trim(ours, fed, n)
        assert ours[0].offset == sum(map(len, fed.blocks))
    assert_same(ours, grown(fed.blocks, model, policy))
    # What comes next is as it would be.
    follow = fed.add(3)
    plain = grown(fed.blocks[:-3] if lookback else fed.blocks[:-1], model, policy)
    wanted = (
        [feed(model, plain, [t])[0] for t in follow] if lookback else feed(model, plain, follow)
    )
    assert feed(model, ours, follow) == wanted


def trim(ours, fed, n):
    total = ours[0].offset
    before = copy.deepcopy(ours)
    given = [cache.trim(n) for cache in ours]
    assert len(set(given)) == 1
    assert given[0] in (0, min(n, total))
    if given[0] == 0:
        assert_same(ours, before)
    if n == 1 and total:
        assert before[0].is_trimmable() == (given[0] == 1)
    assert before[0].is_trimmable() or not given[0]
    fed.take(given[0])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("lookback", [0, 4])
def test_an_empty_cache_is_trimmable(name, lookback):
    """mlx-lm asks so before it starts, and refuses to speculate otherwise."""
    cache = make_cache(tiny(), policy_of(name, 12), lookback=lookback)
    assert can_trim_prompt_cache(cache)
    assert trim_prompt_cache(cache, 3) == 0


def test_what_can_be_taken_back_is_bounded():
    """As many tokens as lookback says, and no more once rows have gone."""
    model, policy = tiny(), policy_of("h2o", 8)
    cache = make_cache(model, policy, lookback=3)
    for token in prompt_of(20):
        feed(model, cache, [token])
    assert [c.trim(4) for c in cache] == [0, 0]
    assert [c.trim(2) for c in cache] == [2, 2]
    assert [c.trim(2) for c in cache] == [0, 0]
    assert [c.trim(1) for c in cache] == [1, 1]
    assert [c.trim(1) for c in cache] == [0, 0]
    assert not cache[0].is_trimmable()
    assert cache[0].offset == 17


# What is refused

#: Why a model's blocks can't evict token by token.
NO_LOOKBACK = {
    "gemma2": "writes its attention out",
    "plamo2": "writes its attention out",
    "gemma3n": "attend to the rows of earlier ones",
    "gemma4_text": "attend to the rows of earlier ones",
    "iquestloopcoder": "second loop attends to the rows of the first",
    "deepseek_v3": "other keys than it stores",
    "mistral4": "other keys than it stores",
    "plamo": "other keys than it stores",
    "gemma3_text": "RotatingKVCache",
    "qwen3_next": "ArraysCache",
    "falcon_h1": "CacheList",
}


@pytest.mark.parametrize("name", NO_LOOKBACK)
def test_models_without_lookback(name):
    policy = policy_of("keys" if name == "plamo2" else "tova", 12)
    with pytest.raises(UnsupportedModelError, match=rf"{name}.*{NO_LOOKBACK[name]}.*lookback=0"):
        make_cache(tiny(name), policy, lookback=4)
    assert make_cache(tiny(name), policy)


@pytest.mark.parametrize("lookback", [-1, True, 2.0, None])
def test_bad_lookback(lookback):
    with pytest.raises(PolicyConfigError, match=r"lookback=.*0 or more"):
        make_cache(tiny(), policy_of("tova", 12), lookback=lookback)


def test_what_goes_not_with_lookback():
    cache = make_cache(tiny(), policy_of("tova", 12), lookback=4)[0]
    with pytest.raises(VeloxError, match="kv_bits and lookback"):
        cache.to_quantized(32, 8)
    with pytest.raises(VeloxError, match="one sequence"):
        LookbackCache.merge([cache, cache])
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        cache.make_mask(2, window_size=4)


# A real model, its own draft


@pytest.mark.smollm2
def test_smollm2(monkeypatch):
    monkeypatch.syspath_prepend("tools")
    import smollm2

    model, tokenizer = mlx_lm.load(str(smollm2.ensure()))
    prompt = tokenizer.encode("The sea was calm that morning, and the old man")
    policy = load_policy("tova", budget=20)
    with apply(model, policy, lookback=4):
        responses = stream_generate(
            model,
            tokenizer,
            prompt,
            draft_model=model,
            num_draft_tokens=3,
            max_tokens=20,
            prefill_step_size=4,
        )
        tokens, drafted = zip(*[(r.token, r.from_draft) for r in responses], strict=True)
    assert list(tokens) == greedy(model, policy, prompt, 20)[: len(tokens)]
    assert len(prompt) + len(tokens) > 20 + 8
    assert sum(drafted) >= 14
