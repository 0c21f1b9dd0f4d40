"""A text that outgrows the trained context is pointed out, unless rows are numbered anew."""

from types import SimpleNamespace

import pytest
import tiny_folder
from click.testing import CliRunner
from test_server import ask, serving

from velox_core.cli import main
from velox_core.outgrown import trained_context


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A model that was trained on 64 positions."""
    folder = tmp_path_factory.mktemp("short")
    return tiny_folder.write(folder, template=tiny_folder.TEMPLATE, max_position_embeddings=64)


def generate(folder, tokens, *args):
    given = ("--model", folder, "--policy", "tova", "--budget", "32", "--raw", "-m", "2")
    result = CliRunner().invoke(main, ["generate", *given, "--prompt", "x" * tokens, *args])
    assert result.exit_code == 0, result.output
    return result.stderr


def test_generate(short):
    said = generate(short, 80)
    assert "trained on 64. " in said
    assert "--option positions=compressed" in said
    assert "--option max_age=32 lets" in said
    anew = ("-o", "positions=compressed")
    assert "its thread: --option max_age=32 lets" in generate(short, 80, *anew)
    assert "trained on" not in generate(short, 80, *anew, "-o", "max_age=40")
    assert "max_age" not in generate(short, 80, "--policy", "streaming")
    assert "trained on" not in generate(short, 50)


def test_chat_says_it_once(short):
    given = ("chat", "--model", short, "--policy", "tova", "--budget", "32", "-m", "4")
    result = CliRunner().invoke(main, given, input="Hello, you there\n" * 8)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("trained on 64.") == 1


def test_serve(short, caplog):
    with serving(short, policy="tova", budget=32) as server:
        ask(server, "x" * 40)
        assert "trained on" not in caplog.text
        ask(server, "x" * 80)
    assert "trained on 64. " in caplog.text


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": None}, None),
        ({"text_config": {"max_position_embeddings": 128}}, 128),
        ({"text_config": None}, None),
        ({}, None),
    ],
)
def test_the_trained_context(args, wanted):
    assert trained_context(SimpleNamespace(args=SimpleNamespace(**args))) == wanted
    assert trained_context(SimpleNamespace()) is None
