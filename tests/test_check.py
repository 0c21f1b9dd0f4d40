"""`velox check`: the suite on an installed policy, as a table and as JSON."""

import json

import fake_plugins
import pytest
from click.testing import CliRunner
from fake_plugins import GOOD, install, spoil

from velox_core.cli import main
from velox_core.testing import CHECKS

see, site = fake_plugins.see, fake_plugins.site  # fixtures

FORGETS = spoil(
    "        @hookimpl\n",
    "        @hookimpl\n        def protect(self, rows):\n"
    "            return rows.positions < 0\n\n        @hookimpl\n",
)


def velox(*args):
    return CliRunner().invoke(main, ["check", *args])


def test_a_good_one(site):
    install(site, "velox-a", "ay")
    result = velox("ay")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    for check in CHECKS:
        assert [line for line in lines if check.name in line and "passed" in line], check.name
    assert "times a step that keeps the newest rows" in result.stdout
    assert "to repeat it" not in result.stdout


def test_a_bad_one(site):
    install(site, "velox-a", "ay", code=FORGETS)
    result = velox("ay", "--seed", "7")
    assert result.exit_code == 1
    table, _, details = result.stdout.partition("\nprotected\n")
    assert table.count(" failed ") == 1
    assert " skipped " not in table or "it builds on 'protected', which fails" in table
    assert details == (
        "  expected: the first n_sink=4 rows and the newest one stay\n"
        "  got: positions 0, 1, 2, 3 are gone after a block of 19, 24 tokens seen\n"
        "  to repeat it:\n"
        "    from velox_core.testing import check_policy\n"
        "    print(*check_policy('ay', only=['protected'], seed=7))\n"
    )


def test_options(site):
    install(site, "velox-a", "ay")
    result = velox("ay", "-o", "n_sink=30", "--option", "scope=head", "--json")
    assert result.exit_code == 0
    repeat = json.loads(result.stdout)[0]["repeat"]
    assert "from velox_a import Fake\n" in repeat
    assert "n_sink=30, scope='head'" in repeat


@pytest.mark.parametrize("code", [GOOD, FORGETS])
def test_json(site, code):
    install(site, "velox-a", "ay", code="    print('a plugin that prints')\n" + code)
    result = velox("ay", "--json")
    found = json.loads(result.stdout)
    failed = [each for each in found if each["outcome"] == "failed"]
    assert bool(failed) == (code is FORGETS), failed
    assert result.exit_code == (code is FORGETS)
    assert [each["name"] for each in found] == [check.name for check in CHECKS]
    assert set(found[0]) == {"name", "outcome", "expected", "got", "repeat"}
    assert {each["outcome"] for each in found} <= {"passed", "failed", "skipped"}
    assert "a plugin that prints" in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["ey"], "no policy 'ey' is installed"),
        (["ay", "-o", "bugdet=3"], "has no option 'bugdet'. Did you mean 'budget'?"),
        (["ay", "-o", "n_sink"], "must be key=value"),
        (["ay", "-o", "n_sink=900"], "leaves no room"),
        (["bad"], "can't be imported: ZeroDivisionError"),
        ([], "Missing argument 'NAME'"),
    ],
)
def test_what_cant_be_checked(site, args, said):
    install(site, "velox-a", "ay")
    install(site, "velox-bad", "bad", code="1 / 0")
    result = velox(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("velox: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
