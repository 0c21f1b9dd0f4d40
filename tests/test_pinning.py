"""`velox generate --system`, `--pin-system` and `--protect`, and `velox policies --protectors`."""

import json

import fake_plugins
import pytest
import tiny_folder
from click.testing import CliRunner
from fake_plugins import install

from velox_core import model
from velox_core.cli import main
from velox_core.cli.pinning import before_message
from velox_core.testing.held import held

see, site = fake_plugins.see, fake_plugins.site  # fixtures

PROMPT = "apples and pears"
OPENING = "^system\nBe brief.~\n^user\n"  # a token a character

EVEN = """
    import attrs
    from velox_core import Protector, hookimpl

    @attrs.frozen(eq=False)
    class Fake(Protector):
        hook_version = 1
        below: int = 12

        @hookimpl
        def protect(self, rows):
            return (rows.positions % 2 == 0) & (rows.positions < self.below)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder.write(tmp_path_factory.mktemp("model"), template=tiny_folder.TEMPLATE)


@pytest.fixture
def caches(monkeypatch):
    """The caches that were made."""
    made = []
    make = model.make_cache

    def remember(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(model, "make_cache", remember)
    return made


@pytest.fixture
def ay(site):
    """The policy "ay", which keeps the newest rows, and the protector "even"."""
    install(site, "velox-a", "ay")
    points = "[velox.protectors]\neven = velox_even:Fake\n"
    install(site, "velox-even", entry_points=points, code=EVEN)


def velox(*args):
    return CliRunner().invoke(main, args)


def generate(folder, *args):
    defaults = ("generate", "--model", folder, "--policy", "ay", "-m", "20", "--json")
    return velox(*defaults, "--prompt", PROMPT, *args)


def rows(folder, caches, *args):
    """The result, and the positions that the first layer held in the end."""
    result = generate(folder, "--budget", "40", *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), set(held(caches[-1][0])[0])


def test_system(folder, ay, caches):
    data, kept = rows(folder, caches, "--system", "Be brief.")
    assert data["prompt_tokens"] == len(OPENING) + len(PROMPT) + len("~\n^assistant\n")
    assert data["pinned_tokens"] == 0
    assert 4 not in kept


def test_pin_system(folder, ay, caches):
    data, kept = rows(folder, caches, "--system", "Be brief.", "--pin-system")
    assert data["pinned_tokens"] == len(OPENING)
    assert set(range(len(OPENING))) <= kept
    assert len(OPENING) not in kept
    assert data["rows_kept"] == [40, 40]


def test_pinned_tokens_are_in_the_table(folder, ay):
    args = ("generate", "--model", folder, "--policy", "ay", "-m", "2", "-p", PROMPT)
    assert "pinned" not in velox(*args).stderr
    table = velox(*args, "--system", "Be brief.", "--pin-system").stderr
    assert f"│ pinned      │ {len(OPENING)} tokens" in table


def test_pin_system_without_a_system_prompt_pins_what_the_template_puts_first(folder, ay, caches):
    data, _ = rows(folder, caches, "--pin-system")
    assert data["pinned_tokens"] == len("^user\n")


def test_protect(folder, ay, caches):
    _, kept = rows(folder, caches, "--protect", "even", "--protect", 'pin:{"tokens": [[13, 15]]}')
    assert {4, 6, 8, 10, 13, 14} <= kept
    assert not {5, 7, 9, 11, 12} & kept
    _, kept = rows(folder, caches, "--protect", 'velox-even:even:{"below": 8}')
    assert {4, 6} <= kept
    assert 8 not in kept


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--system", "x", "--raw"], "--system and --pin-system need the chat template"),
        (["--pin-system", "--raw"], "--system and --pin-system need the chat template"),
        (["--system", "x" * 99, "--pin-system", "--budget", "64"], "4 (n_sink) + 111 (pinned: "),
        (["--protect", "evne"], "no protector 'evne' is installed"),
        (["--protect", "even:{nonsense}"], "must be NAME or NAME:{…} with options in JSON"),
        (["--protect", 'even:{"belw": 1}'], "has no option 'belw'. Did you mean 'below'?"),
        (["--protect", "pin"], "protector 'pin' (velox-kv "),
        (["--protect", 'pin:{"tokens": [[0, 900]]}'], "896 (pinned: tokens 4 to 899)"),
        (["-o", "protect=even"], "'protect' can't be given as an --option"),
    ],
)
def test_what_is_refused(folder, ay, args, said):
    result = generate(folder, *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


@pytest.mark.parametrize("option", [["--system", "x"], ["--pin-system"]])
def test_without_a_chat_template(ay, tmp_path, option):
    result = generate(tiny_folder.write(tmp_path), *option)
    assert result.exit_code == 2
    assert f"{option[0]} needs a chat template, and this model has none" in result.stderr


@pytest.mark.parametrize("message", ["apples", "bees", " a", "\na", "a", "", "~"])
@pytest.mark.parametrize("strip", [False, True])
def test_before_message_counts_no_token_of_the_message(message, strip):
    def encode(text):
        return list(map(ord, f"<system>{text.strip() if strip else text}<end>"))

    assert before_message(encode, message) == len("<system>")


def test_nothing_before_the_message():
    with pytest.raises(Exception, match="puts nothing before the message"):
        before_message(lambda text: list(map(ord, text)), "x")


def test_policies_lists_protectors(ay):
    listed = json.loads(velox("policies", "--protectors", "--json").stdout)
    assert [(each["name"], each["distribution"]) for each in listed] == [
        ("even", "velox-even"),
        ("pin", "velox-kv"),
    ]
    assert "│ even │ velox-even" in velox("policies", "--protectors").stdout
    assert "even" not in velox("policies").stdout
