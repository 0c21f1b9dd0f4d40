"""Finding and loading policies: every way in which it can go wrong, by its message."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from types import ModuleType

import fake_plugins
import pytest
from fake_plugins import GOOD, install, spoil

from velox_core import (
    Policy,
    PolicyConfigError,
    PolicyLoadError,
    UnknownPolicyError,
    VeloxError,
    hookimpl,
    installed_policies,
    load_policy,
)
from velox_core.discovery import origin_of

see, site = fake_plugins.see, fake_plugins.site  # fixtures


def statuses():
    return {policy.full_name: policy.status for policy in installed_policies()}


def refused(error, name, /, **options):
    """The message with which a policy is refused, which is always a single line."""
    with pytest.raises(error) as caught:
        load_policy(name, **options)
    assert type(caught.value) is error
    message = str(caught.value)
    assert "\n" not in message
    return message


# Finding


def test_installed_policies(site):
    install(site, "velox-b", "bee", version="1.2.3")
    install(site, "velox-a", "ay")
    install(site, "unrelated", entry_points="[console_scripts]\nx = unrelated:main\n")
    ay, bee = installed_policies()
    assert (bee.name, bee.distribution, bee.version) == ("bee", "velox-b", "1.2.3")
    assert (bee.target, bee.origin, bee.status) == ("velox_b:Fake", str(site), "ok")
    assert ay.name == "ay"


def test_editable_origin(site):
    info = install(site, "velox-a", "ay")
    direct = {"url": "file:///home/me/my%20policy", "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(direct))
    assert installed_policies()[0].origin == "editable: /home/me/my policy"
    (info / "direct_url.json").write_text("{")
    assert installed_policies()[0].origin == str(site)


def test_finding_imports_nothing(tmp_path):
    install(tmp_path, "velox-a", "ay", code="raise SystemExit('imported')")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "__init__.py").write_text("raise SystemExit('parent imported')")
    install(tmp_path, "velox-b", "bee", code=None, target="deep.er:Fake")
    program = """
        import sys, velox_core
        before = set(sys.modules)
        found = [p.name for p in velox_core.installed_policies()]
        assert {"ay", "bee"} <= set(found), found
        new = set(sys.modules) - before
        assert not [name for name in new if name.startswith(("velox_a", "deep"))], new
    """
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run([sys.executable, "-c", textwrap.dedent(program)], path)


def run(command, path):
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def reads(monkeypatch):
    """Names of the metadata files that are read."""
    names = []
    distribution = importlib.metadata.PathDistribution
    read_text = distribution.read_text

    def counting(self, filename):
        names.append(filename)
        return read_text(self, filename)

    monkeypatch.setattr(distribution, "read_text", counting)
    return names


def test_a_hundred_other_distributions_cost_no_metadata(site, reads):
    for number in range(100):
        points = f"[console_scripts]\nx = d{number}:main\n" if number % 2 else None
        install(site, f"d{number}", entry_points=points, code=None)
    install(site, "velox-a", "ay")
    assert statuses() == {"velox-a:ay": "ok"}
    # One small file of each, and everything else of the only one that matters.
    assert reads.count("METADATA") == 1
    assert len(reads) <= 101 + 4


def test_a_hundred_policies_cost_three_small_files_each(site, reads, monkeypatch):
    """No file twice, and neither importlib.metadata's parsers nor a search through all folders on
    the path."""
    for number in range(100):
        install(site, f"velox-x{number}", f"x{number}")

    def dear(*_):
        raise AssertionError

    monkeypatch.setattr(importlib.util, "find_spec", dear)
    for name in ("metadata", "entry_points"):
        monkeypatch.setattr(importlib.metadata.Distribution, name, property(dear))
    assert statuses() == {f"velox-x{number}:x{number}": "ok" for number in range(100)}
    files = ("entry_points.txt", "METADATA", "direct_url.json")
    assert Counter(reads) == dict.fromkeys(files, 100)


def test_metadata_of_other_kinds(tmp_path, see):
    """As an old setuptools leaves it, and with a description that speaks of versions."""
    info = install(tmp_path, "velox-a", "ay", metadata=False)
    text = "Metadata-Version: 2.1\nName: Velox.A\nVersion: 3.0\nSummary: x\n\nName: y\nVersion: 1\n"
    (info / "PKG-INFO").write_text(text)
    info.rename(tmp_path / "velox_a.egg-info")
    info = install(tmp_path, "velox-b", "bee", entry_points="# no\n[ velox ]\n[velox.policies]\n"
                   "# more\n\n bee= velox_b:Fake\n[other]\nx = velox_b:Fake\n")  # fmt: skip
    see(tmp_path)
    ay, bee = installed_policies()
    assert (ay.name, ay.distribution, ay.version, ay.status) == ("ay", "Velox.A", "3.0", "ok")
    assert (bee.name, bee.target, bee.status) == ("bee", "velox_b:Fake", "ok")


def test_same_distribution_twice_counts_once(tmp_path, see):
    first, second = tmp_path / "first", tmp_path / "second"
    install(first, "velox-a", "ay", version="2.0")
    install(second, "velox-a", "ay", version="1.0")
    see(first, second, first)
    (policy,) = installed_policies()
    assert (policy.version, policy.status) == ("2.0", "ok")
    load_policy("ay")


def test_a_newer_version_without_the_policy_hides_the_older(tmp_path, see):
    first, second = tmp_path / "first", tmp_path / "second"
    install(first, "velox-a", version="2.0")
    install(second, "velox-a", "ay", version="1.0")
    see(first, second)
    assert installed_policies() == []


def test_what_an_interrupted_pip_left_is_not_seen(site):
    install(site, "velox-a", "ay")
    (site / "velox_a-1.0.dist-info").rename(site / "~elox_a-1.0.dist-info")
    assert installed_policies() == []


def test_stale_metadata(site):
    install(site, "velox-a", "ay", code=None)
    install(site, "velox-b", "bee", code=None)
    (site / "velox_b").mkdir()  # what is left of a package, without code
    assert statuses() == {
        "velox-a:ay": "stale: module 'velox_a' not found",
        "velox-b:bee": "stale: folder 'velox_b' holds no code",
    }
    message = refused(PolicyLoadError, "ay")
    assert message.startswith(
        "policy 'ay' (velox-a 1.0) can't be used: stale: module 'velox_a' not found."
    )
    assert message.endswith("-m pip uninstall velox-a")


def test_a_module_made_at_run_time_is_not_stale(site, monkeypatch):
    install(site, "velox-a", "ay", code=None)
    monkeypatch.setitem(sys.modules, "velox_a", ModuleType("velox_a"))  # it has no spec
    assert statuses() == {"velox-a:ay": "ok"}


def test_half_installed(site):
    install(site, "velox-a", "ay", metadata=False)
    assert statuses() == {"velox-a:ay": "half installed: METADATA is missing"}


@pytest.mark.parametrize("target", ["velox_a", "velox_a:", ":Fake", "velox a!:Fake"])
def test_malformed_target(site, target):
    install(site, "velox-a", "ay", target=target)
    (policy,) = installed_policies()
    assert policy.status.startswith("malformed target ")
    assert "it must be module:attribute" in refused(PolicyLoadError, "ay")


def test_unreadable_entry_points(site):
    install(site, "velox-a", entry_points="[velox.policies]\nno equals sign\n")
    info = install(site, "velox-b", entry_points="")
    (info / "entry_points.txt").write_bytes(b"[velox.policies]\n\xff\xfe = x:Y\n")
    install(site, "velox-c", "sea")
    found = statuses()
    assert found.pop("velox-c:sea") == "ok"
    (status,) = found.values()
    assert status.startswith("unreadable metadata: ")
    load_policy("sea")


def test_blanks_and_extras_in_a_target(site):
    install(site, "velox-a", "ay", target="velox_a : Fake [extra]")
    assert installed_policies()[0].target == "velox_a:Fake"
    load_policy("ay")


# Disabling


@pytest.mark.parametrize("value", ["ay", "velox-a", "other, Velox_A", "velox-a:ay", "all", "1"])
def test_disabled(site, monkeypatch, value):
    install(site, "velox-a", "ay")
    monkeypatch.setenv("VELOX_DISABLE_PLUGINS", value)
    assert statuses() == {"velox-a:ay": "disabled"}
    assert refused(PolicyLoadError, "ay") == (
        f"policy 'ay' (velox-a 1.0) is disabled by VELOX_DISABLE_PLUGINS={value!r}: "
        "take it out of that variable to use it."
    )


@pytest.mark.parametrize("value", ["", "0", "a", "velox-b"])
def test_not_disabled(site, monkeypatch, value):
    install(site, "velox-a", "ay")
    monkeypatch.setenv("VELOX_DISABLE_PLUGINS", value)
    assert statuses() == {"velox-a:ay": "ok"}
    load_policy("ay")


# Choosing


def test_two_distributions_claim_a_name(site, monkeypatch):
    install(site, "velox-a", "ay", version="1.0")
    install(site, "velox-b", "ay", version="2.0")
    claimed = "claimed by velox-a and velox-b"
    assert statuses() == {"velox-a:ay": claimed, "velox-b:ay": claimed}
    assert refused(PolicyLoadError, "ay") == (
        "policy 'ay' is claimed by velox-a 1.0 and velox-b 2.0: "
        "choose with 'velox-a:ay' or 'velox-b:ay'."
    )
    assert type(load_policy("velox-a:ay")).__module__ == "velox_a"
    assert type(load_policy("Velox_B:ay", budget=9)).__module__ == "velox_b"
    monkeypatch.setenv("VELOX_DISABLE_PLUGINS", "velox-a")
    assert type(load_policy("ay")).__module__ == "velox_b"


def test_a_stale_claim_stands_in_nobodys_way(site):
    install(site, "velox-a", "ay", code=None)
    install(site, "velox-b", "ay")
    assert statuses()["velox-b:ay"] == "ok"
    assert type(load_policy("ay")).__module__ == "velox_b"


def test_unknown_name(site):
    install(site, "velox-fancy", "fancy")
    message = refused(UnknownPolicyError, "fanzy")
    assert message == (
        f"no policy 'fanzy' is installed for {sys.executable}. Did you mean 'fancy'? "
        "Installed: fancy."
    )
    assert "Did you mean 'fancy'?" in refused(UnknownPolicyError, "FANCY")
    assert "--option key=value" in refused(UnknownPolicyError, "fancy:n_sink=0")
    assert "An option needs a value" in refused(UnknownPolicyError, "fancy:n_sink")
    assert "Did you mean 'velox-fancy:fancy'?" in refused(UnknownPolicyError, "velox-fanzy:fancy")
    assert "Installed: fancy." in refused(UnknownPolicyError, "other:fancy")
    with pytest.raises(LookupError):
        load_policy("fanzy")


def test_unknown_name_when_nothing_is_installed(site):
    assert refused(UnknownPolicyError, "zzz").endswith("Installed: none.")


@pytest.mark.parametrize("name", ["zzz", "snapkv", "velox-snapkv", "velox-snapkv:snapkv", ""])
def test_never_suggests_to_install_what_was_typed(site, name):
    assert "pip" not in refused(UnknownPolicyError, name)


@pytest.mark.parametrize(
    ("typed", "distribution"),
    [
        ("tova", "velox-tova"),
        ("Tova", "velox-tova"),
        ("tovva", "velox-tova"),
        ("h2o", "velox-h2o"),
        ("morphkv", "velox-morphkv"),
        ("streaming", "velox-streaming"),
    ],
)
def test_our_own_come_with_a_command(site, typed, distribution):
    message = refused(UnknownPolicyError, typed)
    assert message.endswith(f"{sys.executable} -m pip install {distribution}")


def test_no_command_for_what_is_installed(site):
    install(site, "velox-tova", "tova")
    assert "pip" not in refused(UnknownPolicyError, "tovva")


# Importing


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("from velox_core import nothing_of_the_kind", "ImportError: cannot import name"),
        ("def (", "SyntaxError: "),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("x = 1", "AttributeError: module 'velox_bad' has no attribute 'Fake'"),
    ],
)
def test_import_fails(site, code, said):
    install(site, "velox-bad", "bad", code=code)
    install(site, "velox-good", "good")
    message = refused(PolicyLoadError, "bad")
    assert message.startswith(f"policy 'bad' (velox-bad 1.0) can't be imported: {said}")
    if "no_such_thing" in code:
        assert "Install what it needs (the module 'no_such_thing')" in message
    else:
        assert message.endswith("Install another version of velox-bad, or tell its authors.")
    load_policy("good")  # a broken plugin harms no other


def test_interrupt_goes_through(site):
    install(site, "velox-bad", "bad", code="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_policy("bad")


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("class Fake: pass", "class Fake"),
        ("Fake = 3", "int object"),
        ("def Fake(): pass", "function object"),
    ],
)
def test_not_a_policy(site, code, what):
    install(site, "velox-bad", "bad", code=code)
    assert refused(PolicyLoadError, "bad").startswith(
        f"policy 'bad' (velox-bad 1.0): velox_bad:Fake must be a subclass of velox_core.Policy "
        f"and is a {what}."
    )


@pytest.mark.parametrize("decorator", ["@attrs.define", "@attrs.frozen(kw_only=True)"])
def test_unhashable_policy(site, decorator):
    install(
        site, "velox-bad", "bad", code=spoil("@attrs.frozen(eq=False, kw_only=True)", decorator)
    )
    message = refused(PolicyLoadError, "bad")
    assert "policy 'bad' (velox-bad 1.0): Fake compares by value" in message
    assert "@attrs.frozen(eq=False, kw_only=True)" in message


# Options


def test_options_reach_the_policy(site):
    install(site, "velox-a", "ay")
    policy = load_policy("ay", budget=[8, 9], n_sink=0, window=3)
    assert isinstance(policy, Policy)
    assert policy.options() == {
        "budget": [8, 9],
        "n_sink": 0,
        "scope": "layer",
        "queries": "model",
        "positions": "absolute",
        "slack": 0,
        "max_age": None,
        "window": 3,
    }


@pytest.mark.parametrize("option", ["name", "self", "_hooks", "zzz"])
def test_unknown_option(site, option):
    install(site, "velox-a", "ay")
    assert refused(PolicyConfigError, "ay", **{option: 1}) == (
        f"policy 'ay' (velox-a 1.0) has no option {option!r}. It has: budget=512, n_sink=4, "
        "scope='layer', queries='model', positions='absolute', slack=0, max_age=None, window=8."
    )


def test_misspelt_option(site):
    install(site, "velox-a", "ay")
    message = refused(PolicyConfigError, "ay", bugdet=512)
    assert "has no option 'bugdet'. Did you mean 'budget'? It has: budget=512" in message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0}, "budget=0 isn't allowed; it must be a whole number of at least 1."),
        ({"budget": -5}, "budget=-5 isn't allowed"),
        ({"budget": 2.5}, "budget=2.5 isn't allowed"),
        ({"budget": True}, "budget=True isn't allowed"),
        ({"budget": "x"}, "budget='x' isn't allowed"),
        ({"budget": []}, "budget=() isn't allowed"),
        ({"budget": [8, 0]}, "budget=0 isn't allowed"),
        ({"budget": 4}, "budget=4 leaves no room: 4 (n_sink) + 1 (the newest row) = 5 rows"),
        ({"budget": [8, 3]}, "budget=3 leaves no room"),
        ({"n_sink": -1}, "n_sink=-1 isn't allowed; it must be a whole number of at least 0."),
        ({"scope": "heads"}, "scope='heads' isn't allowed; it must be one of 'layer', 'head'."),
        ({"queries": None}, "queries=None isn't allowed"),
    ],
)
def test_option_out_of_range(site, options, said):
    install(site, "velox-a", "ay")
    message = refused(PolicyConfigError, "ay", **options)
    assert said in message
    assert "Fake" in message
    with pytest.raises(ValueError, match=r"isn't allowed|leaves no room"):
        load_policy("ay", **options)


def test_smallest_budget(site):
    install(site, "velox-a", "ay")
    assert load_policy("ay", budget=5).budget == 5


@pytest.mark.parametrize(
    ("field", "options", "said"),
    [
        (
            "window: int = attrs.field(converter=int)",
            {"window": "x"},
            "ValueError: invalid literal",
        ),
        (
            "window: int = attrs.field(default=8, validator=attrs.validators.le(9))",
            {"window": 10},
            "ValueError: 'window' must be <= 9: 10",
        ),
    ],
)
def test_what_a_policys_own_checks_raise(site, field, options, said):
    install(site, "velox-a", "ay", code=spoil("window: int = 8", field))
    message = refused(PolicyConfigError, "ay", **options)
    assert message.startswith(f"policy 'ay' (velox-a 1.0) refuses its options: {said}")


def test_kinds_of_defaults_are_listed(site):
    fields = "window: int\n        more: list = attrs.field(factory=list)"
    install(site, "velox-a", "ay", code=spoil("window: int = 8", fields))
    assert "window=(required), more=…." in refused(PolicyConfigError, "ay", zzz=1)
    assert refused(PolicyConfigError, "ay") == (
        "policy 'ay' (velox-a 1.0) needs the option 'window', window=…."
    )


# Hooks


# What is replaced in the good policy, by what, and what is said of it.
WRONG_HOOKS = [
    ("def score", "def scorre", "unknown hook 'scorre'"),
    ("        @hookimpl\n", "", "has no `score` hook (there is a method of that name: mark it"),
    ("def score(self, rows)", "def protect(self, rows)", "has no `score` hook; it is required."),
    (
        "(self, rows)",
        "(self, rows, last=1)",
        "the hook `score` takes last, which it will never get",
    ),
    ("(self, rows)", "(self, rows=None)", "the hook `score` gives a default to rows"),
    (
        "(self, rows)",
        "(self, rows, keys)",
        "takes keys, which it will never get. It may take rows.",
    ),
    ("hook_version = 1", "hook_version = 99", "was written for hook version 99"),
    ("        hook_version = 1\n", "", "doesn't say which hook version it was written for"),
    ("window: int = 8", "def check(self): 1 / 0", "hooks can't be set up: ZeroDivisionError"),
]


@pytest.mark.parametrize(("old", "new", "said"), WRONG_HOOKS)
def test_hooks_that_are_wrong(site, old, new, said):
    install(site, "velox-bad", "bad", code=spoil(old, new), version="7.1")
    install(site, "velox-good", "good")
    message = refused(PolicyLoadError, "bad")
    assert said in message
    assert "(velox-bad 7.1)" in message  # whose fault it is
    load_policy("good")


def test_protectors_run_beside_the_policy(site):
    class Pin:
        @hookimpl
        def protect(self, rows):
            return None

    install(site, "velox-a", "ay")
    pin = Pin()
    policy = load_policy("ay", protect=[pin])
    plugins = [impl.plugin for impl in policy.hooks().hook.protect.get_hookimpls()]
    assert pin in plugins
    assert policy in plugins


def test_a_protector_without_its_list(site):
    install(site, "velox-a", "ay")
    message = refused(PolicyConfigError, "ay", protect=object())
    assert message.endswith("isn't a list: [Pin(tokens=range(120))] is.")


def test_protector_that_is_wrong(site):
    class Pin:
        @hookimpl
        def protec(self, rows):
            return None

    install(site, "velox-a", "ay")
    message = refused(PolicyLoadError, "ay", protect=[Pin()])
    assert "unknown hook 'protec'" in message
    assert "'Pin'" in message


# Where a policy came from


def test_origin(site):
    install(site, "velox-a", "ay", target="velox_a:Fake")
    (site / "velox_a.py").write_text("from inner_a import Fake\n")
    (site / "inner_a.py").write_text(textwrap.dedent(GOOD))
    install(site, "velox-b", "bee")
    policy = load_policy("ay")
    assert origin_of(policy).full_name == "velox-a:ay"
    assert origin_of(type(policy)).full_name == "velox-a:ay"
    assert "velox_b" not in sys.modules
    assert origin_of(load_policy("bee")).name == "bee"


def test_origin_of_what_no_distribution_declares(site):
    install(site, "velox-a", "ay")

    class Mine(type(load_policy("ay"))):
        pass

    assert origin_of(Mine()) is None
    assert origin_of(3) is None


def test_every_error_is_a_velox_error():
    for error in (UnknownPolicyError, PolicyLoadError, PolicyConfigError):
        assert issubclass(error, VeloxError)
