"""A broken, slow or careless plugin harms none but itself."""

import importlib
import importlib.metadata
import subprocess
import sys
import time
from functools import partial

import fake_plugins
import pytest
from fake_plugins import GOOD, install

from velox_core import PolicyLoadError, installed_policies, load_policy
from velox_core.discovery import PROTECTORS, origin_of
from velox_core.saving import describe

see, site = fake_plugins.see, fake_plugins.site  # fixtures


def fastest(call):
    """Seconds that the fastest of some calls took."""
    times = []
    for _ in range(9):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("group", ["velox.policies", PROTECTORS])
def test_listing_takes_no_longer_than_importlib_itself(site, group):
    for number in range(100):
        install(site, f"d{number}", entry_points=f"[console_scripts]\nx = d{number}:f\n", code=None)
    install(site, "velox-a", "ay")
    context = importlib.metadata.DistributionFinder.Context(path=[str(site)])
    finder = importlib.metadata.MetadataPathFinder

    def theirs():
        for dist in finder.find_distributions(context):
            assert dist.name
            list(dist.entry_points)

    assert fastest(partial(installed_policies, group)) < fastest(theirs) + 0.005


@pytest.mark.parametrize(
    "code",
    [
        "def __getattr__(name): raise RuntimeError('lazy, and broken')",
        "def __getattr__(name): raise SystemExit(3)",
        "class Fake:\n    def __eq__(self, other): raise RuntimeError('no')\nFake = Fake()",
    ],
)
def test_an_imported_broken_plugin_harms_no_other(site, code):
    install(site, "aaa-bad", "aa", code=code)  # before "ay" wherever they are sorted
    install(site, "velox-a", "ay")
    importlib.import_module("aaa_bad")  # as some program may have
    policy = load_policy("ay")
    assert origin_of(policy).name == "ay"
    assert '"velox-a"' in describe(policy)
    with pytest.raises(PolicyLoadError, match=r"^policy 'aa' \(aaa-bad 1.0\)"):
        load_policy("aa")


def test_a_slow_plugin_slows_none_but_itself(site):
    install(site, "velox-slow", "slow", code="raise AssertionError('imported')")
    install(site, "velox-a", "ay")
    assert [policy.status for policy in installed_policies()] == ["ok", "ok"]
    load_policy("ay").hooks()
    assert "velox_slow" not in sys.modules


def test_a_plugin_that_leaves_a_mess_of_names(site):
    # It hides what others import, in its own module only.
    install(site, "velox-mess", "mess", code=GOOD + "\n    Policy = hookimpl = mx = attrs = None\n")
    install(site, "velox-a", "ay")
    load_policy("ay")
    load_policy("mess")


def test_policies_lists_a_plugin_with_its_fault_and_exits_well(site):
    install(site, "velox-gone", "gone", code=None)
    install(site, "velox-half", "half", metadata=False)
    install(site, "velox-a", "ay")
    command = [sys.executable, "-m", "velox_core.cli", "policies"]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(site), "VELOX_DISABLE_PLUGINS": "ay"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "stale: module 'velox_gone' not found" in done.stdout
    assert "half installed: METADATA is missing" in done.stdout
    assert "│ disabled" in done.stdout
