"""mlx-lm's LRUPromptCache, which the server keeps prompts in, with caches that evict."""

import mlx.core as mx
import pytest
import tiny_models
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from velox_core import load_policy, make_cache

LLAMA = tiny_models.build("llama")
TOKENS = mx.random.randint(0, tiny_models.VOCAB, (200,), key=mx.random.key(0)).tolist()
POLICIES = {"tova": {}, "tova-head": {"scope": "head"}, "h2o": {}, "morphkv": {"window": 4}}
every_policy = pytest.mark.parametrize("name", POLICIES)


def made(name="tova", budget=16, model=LLAMA, **options):
    options = {"budget": budget} | POLICIES.get(name, {}) | options
    return make_cache(model, load_policy(name.partition("-")[0], **options))


def feed(cache, tokens, *blocks, model=LLAMA):
    """Feed the tokens in blocks of these lengths, the last one of what is left."""
    for n in (*blocks, len(tokens)):
        if tokens:
            logits = model(mx.array([tokens[:n]]), cache=cache)[:, -1]
            mx.eval(logits)
        tokens = tokens[n:]
    return logits


def go_on(cache, model=LLAMA, n=12):
    """Tokens and logits of a greedy decode."""
    tokens, logits = [TOKENS[199]], []
    for _ in range(n):
        logits.append(model(mx.array([tokens[-1:]]), cache=cache)[:, -1])
        tokens.append(mx.argmax(logits[-1]).item())
    return tokens, mx.concatenate(logits)


def same(ours, theirs):
    return ours[0] == theirs[0] and mx.array_equal(ours[1], theirs[1]).item()


def kept(cache):
    return [layer.positions.tolist() for layer in cache]


@pytest.fixture
def lru():
    return LRUPromptCache()


@every_policy
def test_an_exact_hit(lru, name):
    """A copy, which is all that the stored one is."""
    cache = made(name)
    feed(cache, TOKENS[:40], 30)
    lru.insert_cache("model", TOKENS[:40], cache)
    before = kept(cache)
    first, rest = lru.fetch_nearest_cache("model", TOKENS[:40])
    assert rest == []
    assert kept(first) == before
    ours = go_on(first)
    again, _ = lru.fetch_nearest_cache("model", TOKENS[:40])
    assert kept(again) == before  # going on with one left the stored one alone
    assert same(go_on(again), ours)
    fresh = made(name)
    feed(fresh, TOKENS[:40], 30)
    [layer.nbytes for layer in fresh]  # storing settles
    assert same(go_on(fresh), ours)
    assert lru.fetch_nearest_cache("another", TOKENS[:40]) == (None, TOKENS[:40])


@every_policy
def test_an_extension(lru, name):
    """Only the rest is fed, and all is as if the same blocks had gone to a fresh cache."""
    cache = made(name)
    feed(cache, TOKENS[:40], 30)
    lru.insert_cache("model", TOKENS[:40], cache)
    hit, rest = lru.fetch_nearest_cache("model", TOKENS[:70])
    assert rest == TOKENS[40:70]
    assert hit[0].offset == 40
    fresh = made(name)
    feed(fresh, TOKENS[:40], 30)
    [layer.nbytes for layer in fresh]
    assert mx.array_equal(feed(hit, rest, 20), feed(fresh, TOKENS[40:70], 20))
    assert kept(hit) == kept(fresh)
    assert same(go_on(hit), go_on(fresh))
    lru.insert_cache("model", TOKENS[:70], hit)
    assert len(lru) == 2  # the shorter one is still of use: nothing cuts the longer back
    assert lru.fetch_nearest_cache("model", TOKENS[:50])[1] == TOKENS[40:50]


@every_policy
def test_a_longer_one_never_stands_in(lru, name):
    """Rows have gone that a shorter prompt, or one that goes another way, needs."""
    cache = made(name)
    feed(cache, TOKENS[:60])
    lru.insert_cache("model", TOKENS[:60], cache)
    for prompt in (TOKENS[:30], TOKENS[:59], [*TOKENS[:30], TOKENS[30] ^ 1], [*TOKENS[:10], 1, 1]):
        assert lru.fetch_nearest_cache("model", prompt) == (None, prompt)
    shorter = made(name)
    feed(shorter, TOKENS[:20])
    lru.insert_cache("model", TOKENS[:20], shorter)
    hit, rest = lru.fetch_nearest_cache("model", TOKENS[:30])
    assert (hit[0].offset, rest) == (20, TOKENS[20:30])
    assert lru.fetch_nearest_cache("model", TOKENS[:19]) == (None, TOKENS[:19])


@every_policy
@pytest.mark.parametrize("last", [1, 7])
def test_one_whose_newest_tokens_could_be_taken_back(lru, name, last):
    """Before its eviction, the newest block can be taken back; an entry is past that."""
    cache = made(name)
    feed(cache, TOKENS[:40], 40 - last)
    assert cache[0].is_trimmable()
    lru.insert_cache("model", TOKENS[:40], cache)
    assert not cache[0].is_trimmable()
    for end in (40 - last, 39):
        assert lru.fetch_nearest_cache("model", TOKENS[:end]) == (None, TOKENS[:end])


def test_below_the_budget_a_longer_one_is_cut_back():
    """As mlx-lm's own caches are, and to the same; and prefixes that are of no more use go."""
    outcomes = []
    for cache in (made(budget=64), make_prompt_cache(LLAMA)):
        lru = LRUPromptCache()
        feed(cache, TOKENS[:10])
        lru.insert_cache("model", TOKENS[:10], cache)
        longer, _ = lru.fetch_nearest_cache("model", TOKENS[:10])
        feed(longer, TOKENS[10:40])
        lru.insert_cache("model", TOKENS[:40], longer)
        assert len(lru) == 1
        for prompt in (TOKENS[:25], [*TOKENS[:25], *(token ^ 1 for token in TOKENS[25:28])]):
            hit, rest = lru.fetch_nearest_cache("model", prompt)
            assert hit[0].offset + len(rest) == len(prompt)
            assert hit[0].offset in (24, 25)
            feed(hit, rest)
            outcomes.append(go_on(hit))
    assert same(outcomes[0], outcomes[2])
    assert same(outcomes[1], outcomes[3])


@pytest.mark.parametrize("name", ["h2o", "morphkv"])
def test_a_policy_with_a_memory_is_never_cut_back(lru, name):
    """Below the budget all rows are there, but what the policy remembers can't be undone."""
    cache = made(name, budget=64)
    feed(cache, TOKENS[:40])
    lru.insert_cache("model", TOKENS[:40], cache)
    assert lru.fetch_nearest_cache("model", TOKENS[:25]) == (None, TOKENS[:25])


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_next", "falcon_h1"])
def test_hybrids(lru, architecture):
    model = tiny_models.build(architecture)
    cache = made(model=model)
    feed(cache, TOKENS[:40], model=model)
    lru.insert_cache("model", TOKENS[:40], cache)
    assert lru.fetch_nearest_cache("model", TOKENS[:30]) == (None, TOKENS[:30])
    hit, rest = lru.fetch_nearest_cache("model", TOKENS[:50])
    fresh = made(model=model)
    feed(fresh, TOKENS[:40], model=model)
    [layer.nbytes for layer in fresh]
    feed(hit, rest, model=model), feed(fresh, rest, model=model)
    assert same(go_on(hit, model), go_on(fresh, model))


def test_out_of_a_batch(lru):
    """The server stores sequences that it takes out of one."""
    alone = [made(), made()]
    for cache, n in zip(alone, (40, 20), strict=True):
        feed(cache, TOKENS[:n])
    batch = [type(layers[0]).merge(layers) for layers in zip(*alone, strict=True)]
    last = mx.array([[TOKENS[40]], [TOKENS[20]]])
    mx.eval(LLAMA(last, cache=batch))
    for i, n in enumerate((41, 21)):
        lru.insert_cache(i, TOKENS[:n], [layer.extract(i) for layer in batch])
        hit, rest = lru.fetch_nearest_cache(i, TOKENS[: n + 10])
        assert (hit[0].offset, rest) == (n, TOKENS[n : n + 10])
        feed(hit, rest), feed(alone[i], TOKENS[n - 1 : n]), feed(alone[i], rest)
        assert go_on(hit)[0] == go_on(alone[i])[0]
        assert kept(hit) == kept(alone[i])


def test_bytes(lru):
    """What is counted is what is held, so a limit in bytes holds."""
    for start in range(6):
        cache = made(budget=16)
        feed(cache, TOKENS[start : start + 100])
        lru.insert_cache("model", TOKENS[start : start + 100], cache)
        one = sum(layer.nbytes for layer in cache)
        assert lru.nbytes == (start + 1) * one
    assert one < 2 * 2 * 2 * 20 * 16 * 4  # layers, keys and values, heads, rows, numbers, bytes
    lru.trim_to(n_bytes=3 * one)
    assert len(lru) == 3
