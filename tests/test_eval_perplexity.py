"""`velox eval perplexity`: what is measured, that a stopped run goes on, and bad input."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
import tiny_models
from click.testing import CliRunner
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from velox_core import PolicyConfigError, UnknownPolicyError, VeloxError, load_policy, make_cache
from velox_core.cli import main
from velox_core.evaluation import perplexity as measures
from velox_core.evaluation import policies as specs
from velox_core.evaluation.perplexity import (
    perplexity,
    stream_nll,
    token_nll,
    truncated_nll,
    truncated_work,
)
from velox_core.evaluation.plots import DISPLAYS
from velox_core.evaluation.policies import code_of, parse_policies
from velox_core.evaluation.results import Results
from velox_core.evaluation.text import first_tokens

TEXT = "To be, or not to be: that is the question. Whether 'tis nobler in the mind to suffer " * 2


@pytest.fixture(scope="module")
def model():
    return tiny_models.build("llama")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def velox(*args):
    return CliRunner().invoke(main, ["eval", "perplexity", *map(str, args)])


def evaluate(folder, text, *args):
    given = (
        "--model",
        folder,
        "--text",
        text,
        "--budgets",
        "16,32",
        "--policies",
        "tova,streaming",
    )
    result = velox(*given, "--tokens", 80, "--block", 8, "--out", text.with_name("r.jsonl"), *args)
    assert result.exit_code == 0, result.output
    return result


# The measure


def test_slack_is_measured(model):
    """Reading token by token is decoding: nothing settles a block that slack lets grow."""
    tokens = [ord(letter) for letter in TEXT[:60]]
    found = {}
    for slack in (0, 6):
        policy = load_policy("tova", budget=12, slack=slack)
        cache = make_cache(model, policy)
        logits = [model(mx.array([[token]]), cache=cache)[0] for token in tokens[:-1]]
        wanted = token_nll(mx.concatenate(logits), mx.array(tokens[1:]))
        found[slack] = stream_nll(model, tokens, make_cache(model, policy), 1, 1)
        assert mx.allclose(found[slack], wanted, rtol=1e-4)
    assert not mx.allclose(found[0], found[6], rtol=1e-3)


@pytest.mark.parametrize(("block", "first"), [(1, 1), (7, 1), (64, 1), (8, 8), (8, 9), (5, 49)])
def test_blocks_change_nothing_with_the_full_cache(model, block, first):
    tokens = [ord(letter) for letter in TEXT[:50]]
    seen = []
    nll = stream_nll(model, tokens, make_prompt_cache(model), block, first, seen.append)
    wanted = token_nll(model(mx.array([tokens[:-1]]))[0], mx.array(tokens[1:]))
    assert mx.allclose(nll, wanted[first - 1 :], atol=1e-4)
    assert sum(seen) == 49
    assert perplexity(nll) == pytest.approx(mx.exp(wanted[first - 1 :].mean()).item(), rel=1e-4)


@pytest.mark.parametrize(("budget", "block", "opening"), [(10, 4, 0), (10, 4, 1), (3, 8, 0)])
def test_truncation_reads_the_last_tokens_afresh(model, budget, block, opening):
    tokens = [ord(letter) for letter in TEXT[:50]]
    seen = []

    def make():
        return make_prompt_cache(model)

    got = truncated_nll(model, tokens, make, budget, block, 1, opening, seen.append)
    wanted = []
    for start in range(0, 49, block):
        stop = min(start + block, 49)
        before = tokens[:start]
        if start > budget:
            before = tokens[:opening] + tokens[start - budget + opening : start]
        logits = model(mx.array([before + tokens[start:stop]]))[0, len(before) :]
        wanted.append(token_nll(logits, mx.array(tokens[start + 1 : stop + 1])))
    assert mx.allclose(got, mx.concatenate(wanted), atol=1e-4)
    assert sum(seen) == truncated_work(50, budget, block)


def test_nothing_to_score(model):
    for first in (0, 5):
        with pytest.raises(ValueError, match="wanted 1 to 4"):
            stream_nll(model, [1, 2, 3, 4, 5], make_prompt_cache(model), 2, first)


# The command


def test_what_is_measured(folder, text):
    printed = evaluate(folder, text).stdout
    records = Results(text.with_name("r.jsonl")).records()
    assert [(record["policy"], record["budget"]) for record in records] == [
        ("full", None),
        *[("truncated", budget) for budget in (16, 32)],
        *[(name, budget) for budget in (16, 32) for name in ("rotating", "tova", "streaming")],
    ]
    model = mlx_lm.load(folder)[0]
    tokens = [ord(letter) for letter in TEXT[:80]]
    by_hand = {
        "full": make_prompt_cache(model),
        "tova": measures.contenders(model, parse_policies("tova"), [16])[2].make(),
        "rotating": [RotatingKVCache(16, keep=4) for _ in model.layers],
    }
    for record in records:
        assert record["tokens"] == 80
        if record["budget"] in (None, 16) and record["policy"] in by_hand:
            value = perplexity(stream_nll(model, tokens, by_hand[record["policy"]], 8, 1))
            assert record["perplexity"] == pytest.approx(value, rel=1e-5)
        assert record["options"].get("n_sink") == (4 if record["options"] else None)
        assert "budget" not in record["options"]
    assert "cache" in printed
    assert "16 rows" in printed
    assert f"{records[0]['perplexity']:.2f}" in printed
    assert (text.with_name("r.perplexity.svg")).read_text().startswith("<?xml")


def test_with_room_for_all_every_cache_is_the_full_one(folder, text):
    result = evaluate(folder, text, "--budgets", 80, "--json", "--policies", "all")
    values = {record["policy"]: record["nll"] for record in json.loads(result.stdout)}
    assert set(values) >= {"full", "rotating", "truncated", "tova", "h2o", "morphkv", "streaming"}
    assert all(value == pytest.approx(values["full"], rel=1e-5) for value in values.values())


def test_policies_with_options_stand_beside_each_other(folder, text):
    named = "morphkv:window=2,scope=layer,morphkv:window=8"
    result = evaluate(
        folder, text, "--policies", named, "--json", "--plot", text.with_name("p.png")
    )
    records = [each for each in json.loads(result.stdout) if each["policy"].startswith("morphkv")]
    assert [each["policy"] for each in records[::2]] == ["morphkv:window=2,scope=layer"] * 2
    assert [each["options"]["window"] for each in records] == [2, 8, 2, 8]
    assert text.with_name("p.png").read_bytes().startswith(b"\x89PNG")


def test_a_stopped_run_goes_on(folder, text, monkeypatch):
    """After an interrupt, and a line that was cut off."""
    measured = []
    measure = measures.Reading.measure

    def stop_at_third(self, progress=None):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(str(self.contender))
        return measure(self, progress)

    monkeypatch.setattr(measures.Reading, "measure", stop_at_third)
    path = text.with_name("r.jsonl")
    given = (
        "--model",
        folder,
        "--text",
        text,
        "--budgets",
        "16,32",
        "--policies",
        "tova,streaming",
    )
    stopped = velox(*given, "--tokens", 80, "--block", 8, "--out", path)
    assert stopped.exit_code == 130
    assert "goes on where it was" in stopped.stderr
    path.write_bytes(path.read_bytes()[:-20])
    monkeypatch.undo()
    monkeypatch.setattr(
        measures.Reading,
        "measure",
        lambda self, progress: measured.append(str(self.contender)) or measure(self, progress),
    )
    evaluate(folder, text)
    assert measured[2] == measured[3]  # the one whose line was cut off
    assert len(measured) == 9 + 1
    records = Results(path).records()
    assert len({(record["policy"], record["budget"]) for record in records}) == len(records) == 9
    evaluate(folder, text)  # all is there
    assert len(measured) == 10
    evaluate(folder, text, "--block", 4)  # another measurement
    assert len(measured) == 19
    monkeypatch.setattr(specs, "code_of", lambda policy: "changed")
    evaluate(folder, text)  # the policies' four, and no baseline
    assert len(measured) == 19 + 4


def test_code_is_of_all_files_of_a_package(tmp_path, monkeypatch):
    package = tmp_path / "rule_of_two_files"
    package.mkdir()
    (package / "__init__.py").write_text("class Rule: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    rule = importlib.import_module(package.name).Rule()
    codes = {code_of(rule)}
    for text in ("a = 1\n", "a = 2\n"):
        (package / "more.py").write_text(text)
        codes.add(code_of(rule))
    assert len(codes) == 3
    assert code_of(type("Nowhere", (), {"__module__": "builtins"})()) == ""


def test_ctrl_c_leaves_whole_lines(folder, text):
    path = text.with_name("r.jsonl")
    text.write_text(TEXT * 20)
    options = ["--model", folder, "--text", text, "--budgets", "16", "--policies", "tova"]
    command = [sys.executable, "-m", "velox_core.cli", "eval", "perplexity", *options]
    env = {**os.environ, "MPLBACKEND": "agg"}
    run = subprocess.Popen(
        [*map(str, command), "--block", "2", "--out", str(path)],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not (path.exists() and path.read_bytes()) and time.monotonic() < until:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 130, said
    *done, last = said.strip().splitlines()  # without a terminal each record is reported
    assert last == "Stopped. The same command goes on where it was."
    names = ["full", *(f"{name}, 16 rows" for name in ("rotating", "truncated", "tova"))]
    assert done == [f"{i} of 4: {name}" for i, name in enumerate(names[: len(done)], 1)]
    assert path.read_bytes().endswith(b"\n")
    assert 1 <= len(Results(path).records()) < 4


# Bad input, all of it seen before a model is loaded


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--policies", "nonesuch"), "no policy 'nonesuch' is installed"),
        (("--policies", "tova,tova"), "the policy tova is named twice"),
        (("--policies", "tova:window=8"), "has no option 'window'"),
        (("--policies", "tova:budget=8"), "'budget' can't be given as an option of"),
        (("--budgets", "16,x"), "Invalid value for '--budgets'"),
        (("--budgets", "0"), "Invalid value for '--budgets'"),
        (("--budgets", "64,4"), "budget=4 leaves no room"),
        (("--tokens", "1"), "Invalid value for '--tokens'"),
        (("--text", "no/such"), "File 'no/such' does not exist"),
        (("--out", "no/such.jsonl"), "no folder no for the results"),
        (("--plot", "plot.gif"), "must end in .svg, .png, .pdf"),
        (("--plot", "no/plot.svg"), "no folder no for the plot"),
    ],
)
def test_bad_input(text, monkeypatch, args, said):
    def load(*args, **kwargs):
        raise AssertionError("the model is loaded first")

    monkeypatch.setattr(mlx_lm, "load", load)
    monkeypatch.chdir(text.parent)
    result = velox("--model", "x", "--text", text, *args)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert not Path("velox-results.jsonl").exists()


def test_without_matplotlib(text, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = velox("--model", "x", "--text", text, "--out", text.with_name("r.jsonl"))
    assert result.exit_code == 2
    assert "plots need matplotlib" in result.stderr
    assert "pip install 'velox-kv[eval]'" in result.stderr


def test_texts_that_are_too_short(folder, text):
    def fails(*args):
        result = velox("--model", folder, "--text", text, "--out", text.with_name("r.jsonl"), *args)
        assert result.exit_code == 2
        return result.stderr

    n = len(TEXT)
    assert f"has {n} tokens and 1,000 are wanted" in fails("--tokens", "1000")
    assert f"leaves nothing to score: the text has {n} tokens" in fails("--first-scored", n)
    text.write_text("T")
    assert "has 1 tokens and 2 are wanted" in fails()
    text.write_bytes(b"caf\xe9")
    assert "isn't UTF-8" in fails()


def test_the_tokenizer_does_not_warn_of_long_texts():
    class Tokenizer:
        def encode(self, text, verbose=True):
            assert not verbose, "Token indices sequence length is longer than …"
            return [ord(letter) for letter in text]

    assert first_tokens(Tokenizer(), "abc") == [97, 98, 99]
    assert first_tokens(Tokenizer(), "abc", 2) == [97, 98]
    with pytest.raises(VeloxError, match="ask for 3 or fewer"):
        first_tokens(Tokenizer(), "abc", 4)


# Policies by name


def test_policies_by_name(monkeypatch):
    def named(text):
        return [(spec.text, spec.name, spec.options) for spec in parse_policies(text)]

    assert named("tova") == [("tova", "tova", {})]
    assert named("tova, h2o:scope=layer") == [
        ("tova", "tova", {}),
        ("h2o:scope=layer", "h2o", {"scope": "layer"}),
    ]
    assert named("a:window=8,x=[1],b,d:c:x=False") == [
        ("a:window=8,x=[1]", "a", {"window": 8, "x": [1]}),
        ("b", "b", {}),
        ("d:c:x=False", "d:c", {"x": False}),
    ]
    for wrong in ("", "tova,", "window=8", "tova:window=", "tova:=8"):
        with pytest.raises(PolicyConfigError, match="isn't a list of policies"):
            parse_policies(wrong)
    monkeypatch.setenv("VELOX_DISABLE_PLUGINS", "all")
    with pytest.raises(UnknownPolicyError, match="no policy is installed"):
        parse_policies("all")


# Table and plot


def records():
    base = {"kind": "perplexity", "model": "m"}
    values = {("full", None): 10, ("tova", 64): 12.5, ("tova", 8): 20, ("h2o", 64): 11}
    return [
        {**base, "policy": policy, "budget": budget, "perplexity": value}
        for (policy, budget), value in values.items()
    ]


def test_table():
    display = DISPLAYS["perplexity"]
    assert display.table(records()) == (
        ["cache", "8 rows", "64 rows"],
        [
            ["full", "10.00", "10.00"],
            ["tova", "20.00 (+10.00)", "12.50 (+2.50)"],
            ["h2o", "", "11.00 (+1.00)"],
        ],
    )
    assert display.table(records()[:1]) == (["cache", "perplexity"], [["full", "10.00"]])
    again = {**records()[2], "perplexity": 19}  # measured anew: the newest counts
    assert display.table([*records(), again])[1][1][1] == "19.00 (+9.00)"


def test_plot():
    (axes,) = DISPLAYS["perplexity"].plot(records()).axes
    assert axes.get_xscale() == "log"
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines) == ["tova", "h2o", "full"]
    assert [list(each) for each in lines["tova"].get_data()] == [[8, 64], [20, 12.5]]
    assert list(lines["full"].get_ydata()) == [10, 10]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "64"]
