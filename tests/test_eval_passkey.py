"""`velox eval passkey`: the prompts, what counts as found, and how it is shown."""

import json
import re

import mlx.core as mx
import mlx_lm
import pytest
import tiny_models
from click.testing import CliRunner

from velox_core import VeloxError
from velox_core.cli import main
from velox_core.evaluation import passkey as measures
from velox_core.evaluation.caches import contenders
from velox_core.evaluation.passkey import FILLER, QUESTION, Prompt, Prompts, rates, recall
from velox_core.evaluation.plots import DISPLAYS
from velox_core.evaluation.policies import parse_policies
from velox_core.evaluation.results import Results

NEEDLE = re.compile(r"The pass key: (\d{5})\. Remember the pass key: \1\. ")


def encode(text):
    return [ord(letter) for letter in text]


def decode(tokens):
    return "".join(map(chr, tokens))


@pytest.fixture(scope="module")
def model():
    return tiny_models.build("llama")


# The prompts


@pytest.mark.parametrize("length", [200, 333, 1000])
@pytest.mark.parametrize("depth", [0, 25, 50, 100])
def test_prompts(length, depth):
    prompt = Prompts(encode).make(length, depth)
    text = decode(prompt.tokens)
    needle = NEEDLE.search(text)
    assert len(NEEDLE.findall(text)) == 1
    assert decode(prompt.answer) == f" {needle[1]}"
    assert text.endswith(QUESTION)
    filler = text[: needle.start()] + text[needle.end() : -len(QUESTION)]
    assert (FILLER * 20).startswith(filler)
    whole = len(prompt.tokens) + len(prompt.answer)
    assert length - len("There and back again. ") < whole <= length
    # At the end of the nearest sentence.
    assert abs(needle.start() - len(filler) * depth / 100) <= len("There and back again. ") / 2
    assert text[: needle.start()].endswith(". ") or not depth


def test_each_trial_has_its_own_key():
    def key(*which):
        return NEEDLE.search(decode(Prompts(encode).make(*which).tokens))[1]

    keys = [key(300, 0, trial) for trial in range(20)]
    assert len(set(keys)) == 20
    assert keys == [key(300, 0, trial) for trial in range(20)]
    assert key(300, 50, 0) != keys[0]
    assert key(400, 0, 0) != keys[0]


def test_another_filler():
    prompts = Prompts(encode, "One.  Two three!\nfour\n\nFive")
    assert prompts.sentences == ["One.  ", "Two three!\n", "four\n\n", "Five "]
    text = decode(prompts.make(180, 100).tokens)
    assert text.startswith("One.  Two three!\nfour\n\nFive One.  Two")
    with pytest.raises(VeloxError, match="the filler is blank"):
        Prompts(encode, " \n")


def test_tokens_that_do_not_add_up():
    """Where a whole has more tokens than its parts have, or fewer, it isn't too long, and full."""

    def more(text):
        return [*encode(text), *[2] * text.count(". T")]

    def fewer(text):
        return [1, *encode(text)]  # the token that begins each text

    for costly in (more, fewer):
        prompt = Prompts(costly).make(400, 50)
        assert 340 < len(prompt.tokens) + len(prompt.answer) <= 400
        assert len(costly(decode(t for t in prompt.tokens if t > 2))) == len(prompt.tokens)


def test_no_room():
    least = len("The pass key: 12345. Remember the pass key: 12345. " + QUESTION) + 6
    first = len("The grass is green. ")
    assert Prompts(encode).make(least + first, 0)
    with pytest.raises(VeloxError, match=f"has no room .* {least} tokens: make it longer"):
        Prompts(encode).make(least + first - 1, 0)


# What counts as found


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("block", [16, 200])
def test_found_is_what_greedy_decoding_gives(model, number, block):
    tokens = Prompts(encode).make(250, 50).tokens
    contender = contenders(model, parse_policies("tova"), [64])[number]
    cache, last = contender.make(), len(tokens) - 1
    for start in range(0, last, block):
        model(mx.array([tokens[start : min(start + block, last)]]), cache=cache)
    answer, feed = [], tokens[-1]
    for _ in range(6):
        feed = mx.argmax(model(mx.array([[feed]]), cache=cache)[0, -1]).item()
        answer.append(feed)

    def found(answer, seen=None):
        return recall(model, Prompt(tokens, answer), contender.make(), block, seen)

    seen = []
    right = found(answer, seen.append)
    assert right["found"]
    assert seen[-6:] == [1] * 6
    assert sum(seen) == Prompt(tokens, answer).cost == len(tokens) + 5
    for at in (0, 5):
        other = [*answer]
        other[at] = (other[at] + 1) % 128
        wrong = found(other)
        assert not wrong["found"]
        assert 0 < wrong["probability"] < right["probability"] <= 1


def test_probability_is_the_geometric_mean(model):
    prompt = Prompt([5, 6, 7], [8, 9])
    logits = model(mx.array([[5, 6, 7, 8]]))[0, 2:]
    p = mx.softmax(logits, axis=-1)
    cache = contenders(model, [], [])[0].make()
    wanted = (p[0, 8] * p[1, 9]).item() ** 0.5
    assert recall(model, prompt, cache, 2)["probability"] == pytest.approx(wanted, rel=1e-4)


# The command


def evaluate(folder, path, *args):
    given = (
        "--model",
        folder,
        "--policies",
        "streaming",
        "--budgets",
        "48",
        "--lengths",
        "150,200",
    )
    command = ["eval", "passkey", *given, "--depths", "0,100", "--out", path, *args]
    return CliRunner().invoke(main, list(map(str, command)))


def test_what_is_measured(folder, tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    result = evaluate(folder, path, "--trials", 2, "--json")
    assert result.exit_code == 0, result.output
    records = Results(path).records()
    assert json.loads(result.stdout) == records
    assert [tuple(record[name] for name in ("policy", "budget")) for record in records[::8]] == [
        ("full", None),
        ("rotating", 48),
        ("streaming", 48),
    ]
    units = [(r["length"], r["depth"], r["trial"]) for r in records[:8]]
    assert units == [(n, d, t) for n in (150, 200) for d in (0, 100) for t in (0, 1)]
    assert (tmp_path / "r.passkey.svg").exists()
    # Greater budgets than lengths change nothing; nor is what is there measured anew.
    measured = []
    monkeypatch.setattr(
        measures,
        "recall",
        lambda *args: measured.append(1) or recall(*args),
    )
    again = evaluate(folder, path, "--budgets", "48,300", "--json")
    assert len(measured) == 8
    wide = {r["policy"]: r["probability"] for r in json.loads(again.stdout) if r["budget"] == 300}
    assert wide["streaming"] == wide["rotating"]
    assert evaluate(folder, path).exit_code == 0
    assert len(measured) == 8
    other = tmp_path / "filler.txt"
    other.write_text("All is well. ")
    assert evaluate(folder, path, "--text", other).exit_code == 0
    assert len(measured) == 8 + 12


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--depths", "0,101"), "Invalid value for '--depths'"),
        (("--depths", "-1"), "Invalid value for '--depths'"),
        (("--lengths", ""), "Invalid value for '--lengths'"),
        (("--trials", "0"), "Invalid value for '--trials'"),
        (("--policies", "nonesuch"), "no policy 'nonesuch' is installed"),
        (("--plot", "x.txt"), "must end in .svg, .png, .pdf"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, args, said):
    def load(*args, **kwargs):
        raise AssertionError("the model is loaded first")

    monkeypatch.setattr(mlx_lm, "load", load)
    result = evaluate("x", tmp_path / "r.jsonl", *args)
    assert result.exit_code == 2, result.output
    assert said in result.stderr


def test_too_short(folder, tmp_path):
    result = evaluate(folder, tmp_path / "r.jsonl", "--lengths", "1000,20")
    assert result.exit_code == 2
    assert "a prompt of 20 tokens has no room" in result.stderr
    assert not (tmp_path / "r.jsonl").exists()


# Table and plot


def records():
    """With 8 rows, what is in the first half of the longer prompts is lost, in one trial of two."""
    return [
        {
            "kind": "passkey",
            "model": "m",
            "policy": "full" if budget is None else "tova",
            "budget": budget,
            "length": length,
            "depth": depth,
            "trial": trial,
            "found": not (budget == 8 and length == 200 and depth < 50 and trial),
            "probability": 0.5,
        }
        for budget in (8, None, 16)
        for length in (100, 200)
        for depth in (0, 50, 100)
        for trial in (0, 1)
    ]


def test_table():
    assert DISPLAYS["passkey"].table(records()) == (
        ["cache", "rows", "100 tokens", "200 tokens", "all"],
        [
            ["full", "", "100% (0.50)", "100% (0.50)", "100% (0.50)"],
            ["tova", "8", "100% (0.50)", "83% (0.50)", "92% (0.50)"],
            ["tova", "16", "100% (0.50)", "100% (0.50)", "100% (0.50)"],
        ],
    )
    assert rates(records()[:12]) == (11 / 12, 0.5)


def test_heat_maps():
    panels = DISPLAYS["passkey"].plot(records()).axes
    assert [axes.get_title() for axes in panels] == ["full", "tova\n8 rows", "tova\n16 rows"]
    shares = [axes.collections[0].get_array().tolist() for axes in panels]
    assert shares[0] == shares[2] == [[1, 1]] * 3
    assert shares[1] == [[1, 0.5], [1, 1], [1, 1]]  # depth by length
    assert [text.get_text() for text in panels[1].texts][:2] == ["100%", "50%"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["0 %", "50 %", "100 %"]
    top, bottom = panels[0].get_ylim()[::-1]
    assert top < bottom  # the beginning of the prompt is above


def test_a_map_with_gaps():
    some = [each for each in records() if (each["budget"], each["length"]) != (8, 200)]
    panels = DISPLAYS["passkey"].plot(some).axes
    assert len(panels[1].texts) == 3
    assert DISPLAYS["passkey"].table(some)[1][1][3] == ""
