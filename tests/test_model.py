"""``make_cache`` and ``apply``: which caches are replaced, and what is refused, in what words."""

from typing import ClassVar

import attrs
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
import tiny_models
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from velox_core import (
    Policy,
    PolicyConfigError,
    UnobservedAttentionError,
    UnsupportedModelError,
    VeloxCache,
    VeloxError,
    apply,
    hookimpl,
    load_policy,
    make_cache,
)

PROMPT = mx.random.randint(0, tiny_models.VOCAB, (1, 40), key=mx.random.key(0))
LLAMA = tiny_models.build("llama")


@pytest.fixture
def llama():
    return tiny_models.build("llama")


def tova(**options):
    return load_policy("tova", **{"budget": 8, "n_sink": 2} | options)


@attrs.frozen(eq=False, kw_only=True)
class Newest(Policy):
    """A sliding window: a policy that needs no queries."""

    hook_version: ClassVar[int] = 1

    @hookimpl
    def score(self, rows):
        return rows.positions.astype(mx.float32)


def refused(error, model, policy):
    with pytest.raises(error) as caught:
        make_cache(model, policy)
    assert type(caught.value) is error
    message = str(caught.value)
    assert "\n" not in message
    return message


# Which caches are replaced


def test_each_plain_cache_is_replaced():
    cache = make_cache(LLAMA, tova())
    assert [type(layer) for layer in cache] == [VeloxCache, VeloxCache]
    assert [layer.layer for layer in cache] == [0, 1]
    assert cache[0].policy is cache[1].policy
    assert cache[0] is not cache[1]


def test_what_is_bounded_stays_the_models_own():
    cache = make_cache(tiny_models.build("gemma3_text"), tova())
    assert [type(layer) for layer in cache] == [RotatingKVCache, VeloxCache] * 2
    assert [layer.layer for layer in cache if type(layer) is VeloxCache] == [1, 3]
    cache = make_cache(tiny_models.build("jamba"), tova())
    assert {type(layer) for layer in cache} == {ArraysCache, VeloxCache}


def test_each_plain_cache_in_a_list_that_can_be_taken_apart():
    model = tiny_models.build("falcon_h1")
    cache = make_cache(model, tova())
    assert all(type(layer) is CacheList for layer in cache)
    assert [type(part) for part in cache[0].caches] == [ArraysCache, VeloxCache]
    model(PROMPT, cache=cache)
    model(PROMPT[:, :1], cache=cache)
    assert all(layer.caches[1].positions.shape == (1, 1, 8) for layer in cache)
    assert all(layer.caches[1].offset == 41 for layer in cache)


# Refusals


def test_a_model_without_layers():
    class Bare(nn.Module):
        pass

    message = refused(UnsupportedModelError, Bare(), tova())
    assert message == "Bare has no layers: velox needs an mlx-lm model."
    Bare.layers = []
    message = refused(UnsupportedModelError, Bare(), tova())
    assert message.endswith("has no layers, so nothing can be bounded.")


def test_a_name_in_the_policys_place(llama):
    message = refused(PolicyConfigError, llama, "tova")
    assert message == "'tova' isn't a policy; load_policy(name, …) gives one."


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "minimax_m3_vl"])
def test_a_model_with_indexers_in_cache_lists(name):
    model = tiny_models.build(name)
    assert any(isinstance(cache, CacheList) for cache in make_prompt_cache(model))
    assert refused(UnsupportedModelError, model, tova()) == (
        f"The model {name} can't be bounded: its indexer picks rows by their place in the cache."
    )


def test_a_cache_list_of_an_unknown_model(llama):
    """A list is taken apart only where it is known that each part stands alone."""
    model = type("Model", (type(llama),), {})(llama.args)
    type(model).make_cache = lambda self: [KVCache(), CacheList(KVCache(), KVCache())]
    message = refused(UnsupportedModelError, model, tova())
    assert message.startswith("The model test_model can't be bounded: ")
    assert "has a cache of type CacheList" in message
    assert "replaces only plain KVCache entries" in message


def test_a_subclass_of_the_plain_cache(llama):
    class Clever(KVCache):
        pass

    model = type("Model", (type(llama),), {"make_cache": lambda self: [Clever(), KVCache()]})
    message = refused(UnsupportedModelError, model(llama.args), tova())
    assert "has a cache of type Clever" in message


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_recurrent_model(name):
    assert refused(UnsupportedModelError, tiny_models.build(name), tova()) == (
        f"The model {name} has no cache to bound: its layers have ArraysCache, which don't grow "
        "with the text."
    )


def test_attention_that_cant_be_observed():
    model = tiny_models.build("plamo2")  # writes its attention out
    message = refused(UnobservedAttentionError, model, tova())
    assert message.startswith("The attention of the model plamo2 can't be observed")
    assert "Use queries='keys'" in message
    assert "a policy that needs no queries" in message
    assert issubclass(UnobservedAttentionError, UnsupportedModelError)
    for policy in (tova(queries="keys"), Newest(budget=8, n_sink=2)):
        cache = make_cache(model, policy)  # what the message offers works
        for start in range(0, 40, 10):
            model(PROMPT[:, start : start + 10], cache=cache)
        model(PROMPT[:, :1], cache=cache)
        bounded = [layer for layer in cache if type(layer) is VeloxCache]
        assert bounded
        assert all(layer.positions.shape == (1, 1, 8) for layer in bounded)
        assert all(layer.offset == 41 for layer in bounded)


def test_a_cache_that_saw_no_query():
    """Found at the first row to go, whatever the reason."""
    cache = VeloxCache(tova(), budget=8, layer=3)
    rows = mx.zeros((1, 2, 12, 16))
    cache.update_and_fetch(rows, rows)
    with pytest.raises(UnobservedAttentionError) as caught:
        cache.update_and_fetch(rows, rows)
    message = str(caught.value)
    assert message.startswith("policy 'TOVA' (velox-tova ")
    assert "layer 3 took in tokens, but its attention showed no query" in message
    assert "queries='keys'" in message
    assert "\n" not in message


def test_gemma_2_with_real_queries_and_with_keys():
    """It writes its softcapped attention out, and is watched all the same."""
    model = tiny_models.build("gemma2")
    kept = {}
    for queries in ("model", "keys"):
        cache = make_cache(model, tova(queries=queries))
        for start in range(0, 40, 10):
            model(PROMPT[:, start : start + 10], cache=cache)
        assert all(type(layer) is VeloxCache for layer in cache)
        assert all(layer.positions.shape == (1, 1, 8) for layer in cache)
        assert all(layer.offset == 40 for layer in cache)
        kept[queries] = [sorted(layer.positions[0, 0].tolist()) for layer in cache]
    assert kept["model"] != kept["keys"]


# Budgets


def test_a_budget_a_layer_of_the_wrong_length():
    assert refused(PolicyConfigError, LLAMA, tova(budget=[8, 9, 10])) == (
        "TOVA: budget has 3 numbers and the model has 2 layers; give one number a layer, or a "
        "single one for all."
    )


@pytest.mark.parametrize("budgets", [(6, 20), (20, 6), (7, 8)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_budget_a_layer(name, budgets):
    """Layers of unequal length under one mask, in blocks and one by one. (What each token sees
    is compared in test_tova_oracle.)"""
    model = tiny_models.build(name)
    cache = make_cache(model, tova(budget=list(budgets)))
    total = 0
    for n in (5, 12, 1, 1, 7, 3, 1):
        logits = model(PROMPT[:, total : total + n], cache=cache)
        assert mx.isfinite(logits).all()
        total += n
        assert [layer.size() for layer in cache] == [min(total, budget) for budget in budgets]
        assert [layer.offset for layer in cache] == [total, total]
    assert [layer.positions.shape[-1] for layer in cache] == list(budgets)


# apply


def test_apply_and_remove(llama):
    applied = apply(llama, tova())
    cache = make_prompt_cache(llama)
    assert [type(layer) for layer in cache] == [VeloxCache, VeloxCache]
    assert make_prompt_cache(llama)[0] is not cache[0]
    applied.remove()
    assert [type(layer) for layer in make_prompt_cache(llama)] == [KVCache, KVCache]
    applied.remove()  # does no harm


def test_apply_within_a_block(llama):
    with apply(llama, tova()) as applied:
        assert type(make_prompt_cache(llama)[0]) is VeloxCache
        assert applied.model is llama
    assert type(make_prompt_cache(llama)[0]) is KVCache
    with pytest.raises(ZeroDivisionError), apply(llama, tova()):
        raise ZeroDivisionError
    assert type(make_prompt_cache(llama)[0]) is KVCache


def test_apply_gives_a_model_its_own_method_back():
    model = tiny_models.build("gemma3_text")
    before = [type(layer) for layer in make_prompt_cache(model)]
    with apply(model, tova()):
        assert [type(layer) for layer in make_prompt_cache(model)] == [
            RotatingKVCache,
            VeloxCache,
        ] * 2
    assert [type(layer) for layer in make_prompt_cache(model)] == before


def test_apply_twice(llama):
    with apply(llama, tova()), pytest.raises(VeloxError, match=r"already: remove\(\) it first"):
        apply(llama, tova())
    apply(llama, tova()).remove()


def test_apply_refuses_what_make_cache_refuses():
    model = tiny_models.build("mamba")
    with pytest.raises(UnsupportedModelError):
        apply(model, tova())
    assert "make_cache" not in vars(model)
    with pytest.raises(PolicyConfigError):
        apply(LLAMA, tova(budget=[8]))
    assert "make_cache" not in vars(LLAMA)


def generate(model, **more):
    steps = generate_step(PROMPT[0], model, max_tokens=30, prefill_step_size=16, **more)
    return [token for token, _ in steps]


def test_mlx_lm_generates_with_it(llama):
    """By hand, and through ``apply``, the same; and as without where there's room."""
    cache = make_cache(llama, tova())
    by_hand = generate(llama, prompt_cache=cache)
    with apply(llama, tova()):
        applied = generate(llama)
    assert by_hand == applied
    assert [layer.size() for layer in cache] == [8, 8]
    assert [layer.offset for layer in cache] == [70, 70]
    plain = generate(llama)
    assert plain != by_hand
    with apply(llama, tova(budget=100)):
        assert generate(llama) == plain


def test_other_caches_go_through_the_watched_attention_untouched():
    before = LLAMA(PROMPT)
    make_cache(LLAMA, tova())
    make_cache(LLAMA, tova())  # wrapped once
    wrapped = mlx_lm.models.llama.scaled_dot_product_attention
    assert not hasattr(wrapped.velox_wraps, "velox_wraps")
    assert mx.array_equal(before, LLAMA(PROMPT))
    assert mx.array_equal(before, LLAMA(PROMPT, cache=[KVCache(), KVCache()]))
