"""Protectors and observers beside a policy."""

import copy

import fake_plugins
import mlx.core as mx
import pytest
from fake_plugins import install
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from velox_core import (
    Pin,
    PolicyConfigError,
    PolicyHookError,
    PolicyLoadError,
    Protector,
    UnknownPolicyError,
    VeloxCache,
    VeloxError,
    hookimpl,
    installed_policies,
    load_policy,
    load_protector,
)
from velox_core.discovery import PROTECTORS, origin_of
from velox_core.testing.held import held
from velox_core.testing.stream import Stream

see, site = fake_plugins.see, fake_plugins.site  # fixtures

# A distribution with a protector, and one with a policy.
EVEN = """
    import attrs
    from velox_core import Protector, hookimpl

    @attrs.frozen(eq=False)
    class Fake(Protector):
        hook_version = 1
        every: int = 2
        below: int = 12

        @hookimpl
        def protect(self, rows):
            return (rows.positions % self.every == 0) & (rows.positions < self.below)

        def reserved(self, policy, budget):
            return {"even": self.below // self.every}
"""


def install_even(site, name="even", distribution="velox-even"):
    points = f"[velox.protectors]\n{name} = {distribution.replace('-', '_')}:Fake\n"
    return install(site, distribution, entry_points=points, code=EVEN)


def fed(policy, tokens=60, block=20):
    """A cache that was fed with that many tokens, the last ones one by one."""
    cache = VeloxCache(policy, policy.budget)
    return Stream.random(100, seed=1).feed(cache, [block, *[1] * (tokens - block)])


OURS = ["tova", "h2o", "morphkv", "streaming"]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("scope", ["layer", "head"])
def test_pinned_rows_stay_beside_any_policy(name, scope):
    pins = [*range(7, 12), 15]
    options = {"window": 4} if name == "morphkv" else {}
    free = fed(load_policy(name, budget=24, scope=scope, **options))
    assert not all(set(pins) <= set(head) for head in held(free))  # or this would say nothing
    cache = fed(load_policy(name, budget=24, scope=scope, protect=[Pin(pins)], **options))
    for head in held(cache):
        assert {*pins, 0, 1, 2, 3, 59} <= set(head)
        assert len(head) == 24


def test_several_protectors_and_a_copied_cache():
    policy = load_policy("streaming", budget=20, protect=[Pin([6]), Pin(range(8, 10))])
    cache = copy.deepcopy(fed(policy))
    Stream.random(100, seed=1).feed(cache, [1] * 20)
    assert held(cache) == [[0, 1, 2, 3, 6, 8, 9, *range(67, 80)]]


@pytest.mark.parametrize(
    ("tokens", "spans"),
    [
        (range(120), ((0, 120),)),
        (range(4, 10, 2), ((4, 5), (6, 7), (8, 9))),
        ([9, 3, 4, 3], ((3, 5), (9, 10))),
        ([[5, 9], [0, 5]], ((0, 9),)),
        ([(0, 8), (2, 3)], ((0, 8),)),
        ({7}, ((7, 8),)),
    ],
)
def test_pin_takes_positions(tokens, spans):
    pin = Pin(tokens)
    assert pin.tokens == spans
    assert Pin(**pin.options()).tokens == spans


@pytest.mark.parametrize(
    "tokens",
    [[], range(0), range(5, 2), [-1], range(-3, 4), 7, "12", [1.0], [True], [(3, 3)], None],
)
def test_pin_refuses_what_is_no_position(tokens):
    with pytest.raises(PolicyConfigError, match=r"^Pin: tokens=.* isn't allowed; it must hold"):
        Pin(tokens)


# At the door


def test_pins_must_leave_room():
    with pytest.raises(PolicyConfigError) as caught:
        load_policy("tova", budget=64, protect=[Pin(range(120))])
    assert str(caught.value) == (
        "TOVA: budget=64 leaves no room: 4 (n_sink) + 116 (pinned: tokens 4 to 119) + "
        "1 (the newest row) = 121 rows always stay. Raise the budget or lower them."
    )
    load_policy("tova", budget=121, protect=[Pin(range(120))])
    with pytest.raises(PolicyConfigError, match=r"\+ 1 \(pinned: tokens 9\)"):
        load_policy("streaming", budget=[64, 5], protect=[Pin([2, 9])])
    assert load_policy("streaming", budget=5, protect=[Pin([2])]).claimed(5) == {"n_sink": 4}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (Pin, "protect takes protectors, not <class .*Pin'>. Give it Pin"),
        ("pin", r"protect takes protectors, not 'pin'. Give it load_protector\('pin'\)"),
    ],
)
def test_what_is_no_protector(extra, said):
    with pytest.raises(PolicyLoadError, match=said):
        load_policy("tova", protect=[extra])


def test_a_protector_may_not_take_the_policys_place():
    class Usurper:
        @hookimpl
        def score(self, rows):
            return rows.scores

    with pytest.raises(PolicyLoadError, match=r"^protector 'Usurper' \(module .* no `score` of"):
        load_policy("tova", protect=[Usurper()])


def test_a_protector_of_another_hook_version():
    class Old(Protector):
        hook_version = 99

    with pytest.raises(PolicyLoadError, match=r"^protector 'Old' .* for hook version 99"):
        load_policy("tova", protect=[Old()])


def test_protectors_cant_join_later():
    policy = load_policy("tova")
    with pytest.raises(PolicyConfigError, match="protectors can't join later"):
        policy.hooks([Pin([1])])


# Observers


class Counts:
    """Watches, and changes nothing."""

    def __init__(self):
        self.scored, self.gone = 0, 0

    @hookimpl(wrapper=True)
    def score(self, rows):
        scores = yield
        assert scores.shape == rows.scores.shape
        self.scored += 1
        return scores

    @hookimpl(wrapper=True)
    def evict(self, rows, scores, protected, count):
        gone = yield
        assert gone.shape[-1] == count
        assert protected.dtype == mx.bool_
        self.gone += count
        return gone


@pytest.mark.parametrize("name", OURS)
def test_observers_see_every_score_and_eviction(name):
    options = {"budget": 24, **({"window": 4} if name == "morphkv" else {})}
    counts, pin = Counts(), Pin([9])
    cache = fed(load_policy(name, protect=[counts, pin], **options))
    assert held(cache) == held(fed(load_policy(name, protect=[pin], **options)))
    # 20 tokens at once fit, and so do 4 more; those with a memory score all the same.
    assert counts.scored == (41 if name in ("h2o", "morphkv") else 36)
    assert counts.gone == 60 - 24


# Batches and files


def test_other_protectors_dont_merge():
    pinned = fed(load_policy("tova", budget=24, protect=[Pin([9])]))
    with pytest.raises(VeloxError, match=r"same protectors.*protect=\[Pin\(tokens=\(\(9, 10\),\)"):
        VeloxCache.merge([pinned, fed(load_policy("tova", budget=24))])
    with pytest.raises(VeloxError, match="same protectors"):
        pinned.extend(fed(load_policy("tova", budget=24, protect=[Pin([8])])))


def test_other_policies_dont_merge():
    with pytest.raises(VeloxError, match="one policy"):
        VeloxCache.merge([fed(load_policy(name, budget=24)) for name in ("tova", "streaming")])


def test_like_protectors_merge_whatever_watches():
    first = fed(load_policy("tova", budget=24, protect=[Pin([9, 10])]))
    second = fed(load_policy("tova", budget=24, protect=[Counts(), Pin(range(9, 11))]))
    assert held(VeloxCache.merge([first, second]), 1) == held(first)


def test_protectors_are_saved(tmp_path, site):
    install(site, "velox-a", "ay")
    install_even(site)
    pins = [Pin([9]), load_protector("even", below=8), Counts()]
    cache = fed(load_policy("ay", budget=24, protect=pins))
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, [cache])
    (loaded,) = load_prompt_cache(path)
    assert [extra.options() for extra in loaded.policy.extras] == [
        {"tokens": [(9, 10)]},
        {"every": 2, "below": 8},
    ]
    Stream.random(100, seed=1).feed(loaded, [1] * 30)
    assert held(loaded) == [[0, 1, 2, 3, 4, 6, 9, *range(73, 90)]]


def test_what_cant_be_found_again_isnt_lost_in_silence(tmp_path):
    class Mine:
        @hookimpl
        def protect(self, rows):
            return rows.positions == 9

    cache = fed(load_policy("tova", budget=24, protect=[Mine()]))
    path = str(tmp_path / "cache.safetensors")
    save_prompt_cache(path, [cache])
    with pytest.raises(VeloxError, match="protector 'Mine'"):
        load_prompt_cache(path)


# Distributions with protectors


def test_installed_protectors(site):
    install(site, "velox-a", "ay")
    install_even(site)
    even, pin = installed_policies(PROTECTORS)
    assert str(even) == "protector 'even' (velox-even 1.0)"
    assert (pin.name, pin.distribution, pin.status) == ("pin", "velox-kv", "ok")
    assert [policy.name for policy in installed_policies()] == ["ay"]


def test_load_protector(site):
    install_even(site)
    even = load_protector("even", below=6)
    assert even.options() == {"every": 2, "below": 6}
    assert origin_of(even, PROTECTORS).full_name == "velox-even:even"
    assert type(load_protector("pin", tokens=[[0, 4]])) is Pin
    assert type(load_protector("velox-kv:pin", tokens=[1])) is Pin


def test_loading_a_protector_fails_as_policies_do(site, monkeypatch):
    install_even(site)
    with pytest.raises(UnknownPolicyError) as caught:
        load_protector("evne")
    assert str(caught.value).startswith("no protector 'evne' is installed for ")
    assert str(caught.value).endswith("Did you mean 'even'? Installed: even, pin.")
    with pytest.raises(UnknownPolicyError) as caught:
        load_protector("tova")  # a policy
    assert "pip" not in str(caught.value)
    with pytest.raises(PolicyConfigError, match=r"protector 'even' \(velox-even 1.0\) has no opt"):
        load_protector("even", beow=3)
    install(site, "velox-not", entry_points="[velox.protectors]\nnot = velox_a:Fake\n", code=None)
    install(site, "velox-a", "ay")
    with pytest.raises(
        PolicyLoadError, match=r"must be a subclass of velox_core\.Protector and is"
    ):
        load_protector("not")
    monkeypatch.setenv("VELOX_DISABLE_PLUGINS", "even")
    with pytest.raises(PolicyLoadError, match=r"^protector 'even' .* is disabled"):
        load_protector("even")


def test_nobody_takes_pins_name(site):
    install_even(site, "pin")
    with pytest.raises(PolicyLoadError, match=r"^protector 'pin' is claimed by velox-even 1.0 and"):
        load_protector("pin", tokens=[1])


def test_a_broken_protector_harms_no_policy(site):
    points = "[velox.protectors]\nbad = velox_bad:Fake\n"
    install(site, "velox-bad", entry_points=points, code="1 / 0")
    install(site, "velox-a", "ay")
    load_policy("ay", budget=24, protect=[load_protector("pin", tokens=[9])])
    with pytest.raises(PolicyLoadError, match="can't be imported: ZeroDivisionError"):
        load_protector("bad")


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (lambda rows: rows.positions, "^protector 'Odd' .*: `protect` gave shape"),
        (lambda rows: 3, "^protector 'Odd' .*: `protect` gave 3"),
        (lambda rows: None, "^`protect` of .* or protector 'Odd' .* or policy 'TOVA' .* gave None"),
    ],
)
def test_a_protector_that_gives_nonsense_is_named(gives, said):
    class Odd:
        @hookimpl
        def protect(self, rows):
            return gives(rows)

    with pytest.raises(PolicyHookError, match=said):
        held(fed(load_policy("tova", budget=24, protect=[Counts(), Odd(), Pin([9])])))
