"""`velox eval retention`: which tokens it says survived, beside what a cache holds at each step."""

import json

import mlx.core as mx
import numpy as np
import pytest
import tiny_folder
import tiny_models
from click.testing import CliRunner

from velox_core import VeloxError, load_policy, make_cache
from velox_core.cli import main
from velox_core.evaluation.plots import retention as shown
from velox_core.evaluation.retention import layers_to_watch, retention
from velox_core.evaluation.survival import classify, held_share, summaries

N = 72
TOKENS = np.random.default_rng(0).integers(1, 128, N).tolist()


@pytest.fixture(scope="module")
def model():
    return tiny_models.build("llama")


# Watching


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("block", [1, 5])
def test_a_window_is_known_beforehand(model, sinks, block):
    """Sinks stay; any other token goes with the block that makes it the oldest too many."""
    found = retention(model, TOKENS, "streaming", {"budget": 16, "n_sink": sinks}, [0, 1], block)
    assert found["budgets"] == [16, 16]
    for (head,) in found["evicted_at"]:
        for p, step in enumerate(head):
            last = p + 16 - sinks  # at which the window has moved past it
            ends = [*range(16 + block - 1, N, block), N - 1]  # of the blocks
            expected = next((end for end in ends if end >= last), None)
            assert step == (None if p < sinks else expected), p


CASES = [
    ("tova", {}),
    ("tova", {"scope": "head"}),
    ("h2o", {}),
    ("morphkv", {"window": 4}),
    ("streaming", {}),
]


@pytest.mark.parametrize(("policy", "options"), CASES)
@pytest.mark.parametrize("block", [1, 6])
def test_it_says_what_the_cache_holds_at_every_step(model, policy, options, block):
    options = {"budget": 20, "n_sink": 0, **options}
    record = {"tokens": N} | retention(model, TOKENS, policy, options, [1], block)
    held = held_share(record, 0)
    cache = make_cache(model, load_policy(policy, **options))  # nobody watches this one
    for start, stop in [(0, 20), *((i, min(i + block, N)) for i in range(20, N, block))]:
        model(mx.array([TOKENS[start:stop]]), cache=cache)
        positions = np.array(cache[1].positions)[0]
        expected = np.mean([np.isin(np.arange(N), head) for head in positions], axis=0)
        np.testing.assert_allclose(held[stop - 1], expected)
    assert held[-1].sum() == pytest.approx(20)


def test_a_layer_that_never_evicts(model):
    found = retention(model, TOKENS, "tova", {"budget": [16, 100]}, [0, 1])
    assert found["budgets"] == [16, 100]
    assert found["evicted_at"][1] == [[None] * N]
    assert found["evicted_at"][0][0].count(None) == 16


def test_which_layers(model):
    policy = load_policy("tova")
    assert layers_to_watch(model, policy) == [0, 1]
    assert layers_to_watch(model, policy, [1]) == [1]
    with pytest.raises(VeloxError, match="no layer 2 that evicts; those that do are 0, 1"):
        layers_to_watch(model, policy, [0, 2])


def test_a_text_that_fits(model):
    with pytest.raises(VeloxError, match="72 tokens fit into 72 rows"):
        retention(model, TOKENS, "tova", {"budget": N}, [0])


# What follows


def test_classes_of_tokens():
    pieces = ["The", " cat", ".", "\n\n", " ", "'s", "A4", " 12", " Mat", "=\n", "é", " É"]
    assert classify(pieces) == "fopbboddcpoc"
    assert classify(["1"]) == "f"


#: Eight tokens, a budget of two, one head. Held: 0, 01, 12, 13, 34, 35, 35, 37.
RECORD = {
    "policy": "x",
    "tokens": 8,
    "layers": [4],
    "budgets": [2],
    "classes": "fppccopo",
    "evicted_at": [[[2, 3, 3, None, 5, 7, 6, None]]],
}


def test_a_summary_by_hand():
    (found,) = summaries(RECORD)
    assert found.policy == "x"
    assert found.layer == 4
    # Of the steps 4 to 7: 3 and 4 (both recent), 3 and 5, 3 and 5 (neither: 5 isn't 6), 3 and 7.
    assert held_share(RECORD, 0)[6].tolist() == [0, 0, 0, 1, 0, 1, 0, 0]
    assert found.recent == pytest.approx(np.mean([1, 1 / 2, 1 / 2, 1 / 2]))
    # Tokens 6 and 7 came too late to count; 3 stayed, and counts up to the end.
    assert found.lives == {
        "first token": 2,
        "punctuation": (2 + 1) / 2,
        "capitalised": (5 + 1) / 2,
        "other": 2,
    }
    assert not found.first_stays


def test_heads_are_averaged():
    other = [[None, 2, 3, 4, 5, 6, 7, None]]
    record = RECORD | {"evicted_at": [RECORD["evicted_at"][0] + other]}
    assert held_share(record, 0)[1].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert held_share(record, 0)[2].tolist() == [0.5, 0.5, 1, 0, 0, 0, 0, 0]
    (found,) = summaries(record)
    assert found.lives["first token"] == (2 + 8) / 2
    assert not found.first_stays
    assert summaries(RECORD | {"evicted_at": [other]})[0].first_stays


def test_table_and_maps():
    records = [RECORD, RECORD | {"policy": "y", "evicted_at": [[[None] * 8]]}]
    headings, rows = shown.table(records)
    assert headings[:4] == ["policy", "layer", "recent", "first token"]
    assert rows[0] == ["x", "4", "62%", "2", "2", "", "3", "", "2"]
    assert rows[1][:2] == ["y", "4"]
    assert rows[1][3] == "8 (to the end)"
    figure = shown.plot(records)
    maps = [axes.images[0].get_array() for axes in figure.axes]
    assert [axes.get_ylabel() for axes in figure.axes] == ["x", "y"]
    np.testing.assert_array_equal(maps[0], held_share(RECORD, 0))
    np.testing.assert_array_equal(maps[1], np.tril(np.ones((8, 8))))


# The command


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("A text of 3 lines,\nwith Words in it.\n" * 4)
    return file


def velox(folder, text, *args):
    defaults = ["--policies", "tova,streaming:n_sink=2", "--budget", "16", "--tokens", "64"]
    out = ["--out", str(text.with_name("out.jsonl"))]
    args = ["eval", "retention", "--model", folder, "--text", str(text), *defaults, *out, *args]
    return CliRunner().invoke(main, args)


def test_the_command(folder, text, monkeypatch):
    result = velox(folder, text)
    assert result.exit_code == 0, result.output
    assert "punctuation" in result.stdout
    out = text.with_name("out.jsonl")
    assert out.with_suffix(".retention.svg").read_text().startswith("<?xml")
    tova, streaming = map(json.loads, out.read_text().splitlines())
    assert (tova["kind"], tova["policy"], tova["tokens"]) == ("retention", "tova", 64)
    assert tova["options"]["n_sink"] == tova["sinks"] == streaming["sinks"] == 0
    assert streaming["options"]["n_sink"] == 2
    assert tova["layers"] == [0, 1]
    assert len(tova["classes"]) == 64
    assert tova["classes"].startswith("fboooobo" + "obdbooooopb")  # A text of 3 lines,
    assert streaming["evicted_at"][0] == [[None] * 2 + [*range(16, 64)] + [None] * 14]

    # Stopped after the first, it goes on with the second, and only with that.
    whole = out.read_text()
    out.write_text(whole[: whole.index("\n") + 20])
    assert velox(folder, text).exit_code == 0
    assert list(map(json.loads, out.read_text().splitlines())) == [tova, streaming]

    def fail(*args):
        raise AssertionError("it is there already")

    monkeypatch.setattr("velox_core.evaluation.retention.retention", fail)
    again = velox(folder, text, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == [tova, streaming]
    assert isinstance(velox(folder, text, "--sinks", "1").exception, AssertionError)
    assert isinstance(velox(folder, text, "--layers", "1").exception, AssertionError)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--layers", "0,5"], "there is no layer 5 that evicts; those that do are 0, 1"),
        (["--layers", "first"], "'first' is not a valid integer range"),
        (["--tokens", "16"], "16 tokens fit into 16 rows"),
        (["--tokens", "640"], "the text has"),
        (["--budget", "2"], "budget=2 leaves no room"),
        (["--policies", "tovva"], "tovva"),
    ],
)
def test_bad_input(folder, text, args, message):
    result = velox(folder, text, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("velox: ")
    assert not text.with_name("out.jsonl").exists()


@pytest.mark.parametrize(
    ("args", "layers"),
    [([], [0, 2, 4]), (["--layers", "all"], [0, 1, 2, 3, 4]), (["--layers", "3,1"], [3, 1])],
)
def test_layers(tmp_path, text, args, layers):
    folder = tiny_folder.write(tmp_path, num_hidden_layers=5)
    result = velox(folder, text, "--json", *args)
    assert result.exit_code == 0, result.output
    for record in json.loads(result.stdout):
        assert record["layers"] == layers
        assert len(record["evicted_at"]) == len(layers)
