"""`velox eval positions`: stretches of a long text, running on and started afresh."""

import mlx.core as mx
import pytest
import tiny_models
from click.testing import CliRunner

from velox_core import VeloxError, load_policy, make_cache
from velox_core.cli import main
from velox_core.evaluation.perplexity import perplexity, token_nll
from velox_core.evaluation.plots import DISPLAYS
from velox_core.evaluation.positions import Reading, check_length
from velox_core.evaluation.results import Results

TEXT = "To be, or not to be: that is the question. Whether 'tis nobler in the mind to suffer " * 2
STRETCH = 20


@pytest.fixture(scope="module")
def model():
    return tiny_models.build("llama")


def one_by_one(model, cache, tokens):
    """The nll of all but the first of these, fed one at a time."""
    logits = [model(mx.array([[token]]), cache=cache)[0] for token in tokens[:-1]]
    return token_nll(mx.concatenate(logits), mx.array(tokens[1:]))


@pytest.mark.parametrize("positions", ["absolute", "compressed"])
def test_the_numbers_are_those_of_a_plain_loop(model, positions):
    tokens = [ord(letter) for letter in TEXT[:70]]
    policy = load_policy("tova", budget=12, positions=positions)
    running = Reading(model, tokens, policy, 1, STRETCH, afresh=False)
    afresh = Reading(model, tokens, policy, 1, STRETCH, afresh=True)
    seen = []
    found, anew = running.measure(seen.append), afresh.measure(seen.append)
    assert sum(seen) == pytest.approx(running.cost + afresh.cost, abs=10)
    nll = one_by_one(model, make_cache(model, policy), tokens)
    for number in range(3):
        part = nll[max(number * STRETCH - 1, 0) : (number + 1) * STRETCH - 1]
        assert found["perplexity"][number] == pytest.approx(perplexity(part), rel=1e-4)
    assert anew["perplexity"][0] is None
    for number in (1, 2):
        first = max((number - 1) * STRETCH - 1, 0)
        nll = one_by_one(model, make_cache(model, policy), tokens[first : (number + 1) * STRETCH])
        assert anew["perplexity"][number] == pytest.approx(perplexity(nll[-STRETCH:]), rel=1e-4)
    assert found["perplexity"][2] != anew["perplexity"][2]
    assert found["bytes"][1] == found["bytes"][2] > 0
    assert all(seconds > 0 for seconds in found["seconds"])


def test_the_command(folder, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "results.jsonl"
    text.write_text(TEXT)

    def run(*args):
        given = ("--model", folder, "--text", text, "--out", out, "--budget", 12, "--block", 5)
        words = ["eval", "positions", *given, "--tokens", 60, "--stretch", STRETCH, *args]
        result = CliRunner().invoke(main, list(map(str, words)))
        assert result.exit_code == 0, result.output
        return result

    run("--policies", "tova")
    records = Results(out).records()
    schemes = [(r["start"], r["options"]["positions"]) for r in records]
    assert schemes == [
        ("running", "absolute"),
        ("running", "contiguous"),
        ("running", "compressed"),
        ("afresh", "absolute"),
    ]
    shown = run("--policies", "tova,streaming")
    assert Results(out).records()[:4] == records  # what was there wasn't measured again
    assert len(Results(out).records()) == 8
    headings, rows = DISPLAYS["positions"].table(Results(out).records())
    assert headings == ["policy", "from token", "afresh", "absolute", "contiguous", "compressed"]
    assert len(rows) == 2 * (3 + 2)
    last = rows[2]
    assert last[:2] == ["tova", "40"]
    base, absolute = records[3]["perplexity"][2], records[0]["perplexity"][2]
    assert last[2:4] == [f"{base:.2f}", f"{absolute:.2f} ({absolute - base:+.2f})"]
    assert "bytes, last : second" in shown.output
    assert (tmp_path / "results.positions.svg").read_text().startswith("<?xml")

    run("--policies", "tova:positions=contiguous,max_age=3")  # that way alone
    (added,) = Results(out).records()[8:]
    assert (added["start"], added["options"]["positions"]) == ("running", "contiguous")
    assert added["options"]["max_age"] == 3
    assert added["perplexity"] != records[1]["perplexity"]
    headings, rows = DISPLAYS["positions"].table([*records, added])
    assert headings[-2:] == ["compressed", "contiguous, max_age=3"]
    assert {row[0] for row in rows} == {"tova"}
    value = added["perplexity"][2]
    assert rows[2][-1] == f"{value:.2f} ({value - base:+.2f})"

    run("--policies", "h2o:max_age=3,positions=compressed")  # and afresh, without these
    named, fresh = Results(out).records()[9:]
    assert (fresh["policy"], fresh["start"]) == ("h2o", "afresh")
    assert fresh["options"]["max_age"] is None
    headings, _ = DISPLAYS["positions"].table([named, fresh])
    assert headings == ["policy", "from token", "afresh", "compressed, max_age=3"]


def test_a_text_of_one_stretch_is_refused():
    check_length(range(40), 20)
    with pytest.raises(VeloxError, match="39 tokens don't make two stretches of 20"):
        check_length(range(39), 20)


def test_without_a_subcommand_there_is_help():
    result = CliRunner().invoke(main, ["eval"])
    assert result.exit_code == 0
    assert "\n  positions " in result.output
