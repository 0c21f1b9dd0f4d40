"""`velox bench`: what it runs, and the figures it makes of the times. No time itself is tested."""

import json
from functools import partial
from typing import ClassVar

import attrs
import mlx.core as mx
import pytest
import tiny_models
from click.testing import CliRunner
from mlx_lm.models.cache import KVCache

from velox_core import Policy, VeloxError, hookimpl
from velox_core.cli import main
from velox_core.evaluation.bench import decoding
from velox_core.evaluation.bench.caches import bounded, decode, filled, grown, made_up
from velox_core.evaluation.bench.hooks import directly, hooks, noted_calls, through_pluggy
from velox_core.evaluation.bench.imports import imports
from velox_core.evaluation.bench.plan import Plan
from velox_core.evaluation.bench.rounds import interleave, speed_ratio
from velox_core.evaluation.caches import full
from velox_core.evaluation.plots.bench import plot, table
from velox_core.evaluation.plots.bench.tables import hook_shares, throughput_ratio
from velox_core.evaluation.policies import parse_policies

POLICIES = "tova,h2o,morphkv:window=4,streaming"
CACHES = ["KVCache", "RotatingKVCache", "tova", "h2o", "morphkv:window=4", "streaming"]


@pytest.fixture(scope="module")
def model():
    return tiny_models.build("llama")


def plan(policies=POLICIES, **changes):
    defaults = {"budget": 16, "rounds": 2, "steps": 3, "block": 16}
    return Plan(policies=parse_policies(policies), **defaults | changes)


class Count:
    """How often progress was told."""

    n = 0

    def __call__(self):
        self.n += 1


# Times


def test_cases_take_turns():
    run = []

    def case(name):
        run.append(name)
        return float(len(run))

    count = Count()
    seconds = interleave({name: partial(case, name) for name in "abc"}, 3, count)
    assert "".join(run) == "cba" + "abc" + "cba" + "abc"
    assert seconds == {"a": [4, 9, 10], "b": [5, 8, 11], "c": [6, 7, 12]}  # without the first round
    assert count.n == 12


def test_a_ratio_is_of_the_same_round():
    # The machine was busy in the second round, and a hiccup hit the third.
    assert speed_ratio([1, 10, 9], [2, 20, 2]) == 2
    assert speed_ratio([2.0], [1.0]) == 0.5


# Caches


def test_decoding_leaves_a_full_cache_as_long_as_it_was(model):
    cache = grown(model, [40], 16)[40]
    before = [mx.array(layer.keys[:, :, :40]) for layer in cache]
    calls = Calls(model)
    assert decode(calls, cache, 5) > 0
    assert calls.shapes == [(1, 1)] * 6  # one to warm up
    assert [layer.offset for layer in cache] == [40, 40]
    for layer, keys in zip(cache, before, strict=True):
        assert mx.array_equal(layer.keys[:, :, :40], keys)


class Calls:
    """A model that notes the shapes of its input."""

    def __init__(self, model):
        self.model, self.shapes = model, []

    def __call__(self, tokens, cache):
        self.shapes.append(tokens.shape)
        return self.model(tokens, cache=cache)


def test_decoding_goes_on_with_the_likeliest_token(model):
    fed = []

    def watched(tokens, cache):
        fed.append(tokens)
        return model(tokens, cache=cache)

    decode(watched, full(model), 4)
    fed = [token.item() for token in fed]
    assert fed[0] == 1
    for i in range(1, 5):
        assert fed[i] == mx.argmax(model(mx.array([fed[:i]]))[0, -1]).item()


def test_full_caches_of_each_length(model):
    copies = grown(model, [33, 1, 33, 20], 16)
    assert {n: [layer.offset for layer in cache] for n, cache in copies.items()} == {
        1: [1, 1],
        20: [20, 20],
        33: [33, 33],
    }
    alone = full(model)
    model(made_up(model, 33)[:, :20], cache=alone)
    assert mx.allclose(copies[20][1].keys[:, :, :20], alone[1].keys[:, :, :20], atol=1e-5)
    decode(model, copies[20], 3)  # doesn't touch the others
    assert mx.allclose(copies[33][1].keys[:, :, :20], alone[1].keys[:, :, :20], atol=1e-5)


def test_bounded_caches_are_full(model):
    made = {name: filled(model, make, plan()) for name, make in bounded(model, plan()).items()}
    assert list(made) == CACHES[1:]
    for cache in made.values():
        decode(model, cache, 2)
        assert [layer.size() for layer in cache] == [16, 16]
        assert [layer.offset for layer in cache] == [16 + 64 + 3] * 2


def test_sliding_layers_keep_their_own_caches():
    model = tiny_models.build("gemma3_text")
    kinds = [type(layer).__name__ for layer in full(model)]
    assert len(set(kinds)) == 2  # or this would say nothing
    rotating = bounded(model, plan("streaming"))["RotatingKVCache"]()
    for theirs, layer in zip(full(model), rotating, strict=True):
        size = 16 if type(theirs) is KVCache else theirs.max_size
        assert (type(layer).__name__, layer.max_size) == ("RotatingKVCache", size)
    decoding.speed(model, plan("streaming", rounds=1), 40, Count())


# Measures


def test_speed(model):
    count = Count()
    cases = decoding.speed(model, plan(), 64, count)
    assert [case["cache"] for case in cases] == CACHES
    assert count.n == 6 * (4 + 3)
    for case in cases:
        assert len(case["prompt_seconds"]) == 3
        assert len(case["seconds"]) == 2
        assert case["peak_bytes"] > 0
    # The full cache has room for 256 rows, RotatingKVCache for its 16; a policy keeps positions.
    row = 2 * 2 * 2 * 16 * 4
    assert cases[0]["bytes"] == 256 * row
    assert cases[1]["bytes"] == 16 * row
    for case in cases[2:]:
        assert 16 * row < case["bytes"] < 2 * 16 * row
    with pytest.raises(VeloxError, match="16 tokens fits into 16 rows"):
        decoding.speed(model, plan(), 16, count)


def test_all_decode_with_as_many_rows(model, monkeypatch):
    """In `speed` the full cache is cut down after the prompt."""
    rows = {}

    def note(model, cache, steps):
        rows[type(cache[0]).__name__] = cache[0].size()
        return decode(model, cache, steps)

    monkeypatch.setattr(decoding, "decode", note)
    decoding.speed(model, plan("streaming"), 64, Count())
    assert rows == {"KVCache": 16, "RotatingKVCache": 16, "VeloxCache": 16}


def test_context(model):
    count = Count()
    cases = decoding.context(model, plan(), [20, 40], count)
    expected = [("KVCache", 1), ("KVCache", 20), ("KVCache", 40), *((n, 16) for n in CACHES[1:])]
    assert [(case["cache"], case["rows"]) for case in cases] == expected
    assert all(len(case["seconds"]) == 2 for case in cases)
    assert count.n == 8 * 3


def test_batch(model, monkeypatch):
    sizes = []

    def note(model, cache, steps, batch):
        sizes.append((batch, cache[0].offset.tolist()))
        return decode(model, cache, steps, batch)

    monkeypatch.setattr(decoding, "decode", note)
    count = Count()
    cases = decoding.batch(model, plan(), 70, 2, count)
    # Twice 70 rows are room for eight times 16.
    expected = [("KVCache", 2, 70), *((name, 8, 16) for name in CACHES[1:])]
    assert [(case["cache"], case["batch"], case["rows"]) for case in cases] == expected
    assert sizes[-6:][::-1].count((2, [70, 70])) == 1
    assert all(len(offsets) == batch for batch, offsets in sizes)
    assert count.n == 6 * 3
    with pytest.raises(VeloxError, match="12 rows are fewer than a budget of 16"):
        decoding.batch(model, plan(), 12, 2, count)


@pytest.mark.parametrize("spec", parse_policies(POLICIES), ids=lambda spec: spec.name)
def test_hooks_are_called_alike_through_pluggy_and_directly(model, spec):
    noted = noted_calls(model, spec, plan())
    assert [name for name, _ in noted] == ["score", "protect", "evict"] * 2
    assert [given["rows"].layer for _, given in noted] == [0, 0, 0, 1, 1, 1]
    assert [given["rows"].n_new for _, given in noted] == [1] * 6
    policy = spec.load(16)
    through = [call() for call in through_pluggy(policy, noted)]
    direct = [call() for call in directly(policy, noted)]
    assert len(direct) == len(through)
    for ours, theirs in zip(direct, through, strict=True):
        theirs = theirs[0] if isinstance(theirs, list) else theirs
        assert mx.array_equal(ours, theirs)


@attrs.frozen(eq=False, kw_only=True)
class FirstRows(Policy):
    """A policy with an ``evict`` of its own, which then stands before the core's."""

    hook_version: ClassVar[int] = 1

    @hookimpl
    def score(self, rows):
        return mx.zeros(rows.positions.shape)

    @hookimpl
    def evict(self, rows, count):
        return mx.full((*rows.positions.shape[:2], count), 7, dtype=mx.int32)


def test_a_direct_call_takes_the_method_that_pluggy_takes(model):
    evictions = [
        call
        for call in noted_calls(model, *parse_policies("streaming"), plan())
        if call[0] == "evict"
    ]
    for make in (through_pluggy, directly):
        for call in make(FirstRows(budget=16), evictions):
            assert call().tolist() == [[[7]]]


def test_hooks(model):
    count = Count()
    cases = hooks(model, plan(), count)
    assert [case["cache"] for case in cases] == CACHES[2:]
    for case in cases:
        assert case["calls"] == 6
        for name in ("seconds", "hook_seconds", "direct_seconds"):
            assert len(case[name]) == 2
            assert min(case[name]) > 0
    assert count.n == 4 * 3 * 3


def test_imports():
    count = Count()
    (case,) = imports(1, count)
    assert count.n == 2
    assert len(case["import"]) == len(case["own"]) == 2
    assert len(case["policies"]) == len(case["entry_points"]) == 1
    assert all(0 < own < whole for own, whole in zip(case["own"], case["import"], strict=True))
    assert case["distributions"] > 10


# Tables and plots

CASE = {"cache": "KVCache", "batch": 2, "rows": 100, "seconds": [0.1, 0.2, 0.1]}
FAST = {"cache": "tova", "batch": 10, "rows": 20, "seconds": [0.2, 0.5, 0.25]}


def test_throughput():
    # Five times the sequences, in 2, 2.5 and 2.5 times the time.
    assert throughput_ratio(FAST, CASE) == pytest.approx(5 / 2.5)
    headings, rows = table([{"measure": "batch", "cases": [CASE, FAST]}])
    assert headings == [
        "cache",
        "sequences",
        "rows each",
        "ms a step",
        "tokens/s",
        "beside KVCache",
    ]
    assert rows[0] == ["KVCache", "2", "100", "100.0", "20.0", "1.00x"]
    assert rows[1] == ["tova", "10", "20", "250.0", "40.0", "2.00x"]


def test_shares_of_hooks():
    case = {
        "cache": "tova",
        "calls": 6,
        "seconds": [1.0, 2.0, 1.0],
        "hook_seconds": [0.1, 0.2, 0.4],
        "direct_seconds": [0.08, 0.14, 0.1],
    }
    assert hook_shares(case) == pytest.approx((0.1, 0.03))
    _, (row,) = table([{"measure": "hooks", "cases": [case]}])
    assert row == ["tova", "1000.00", "6", "200.000", "10.00%", "100.000", "3.00%"]


def test_context_beside_each_length():
    seconds = {("KVCache", 1): 0.01, ("KVCache", 50): 0.02, ("KVCache", 100): 0.04}
    seconds["tova", 20] = 0.016
    cases = [{"cache": c, "rows": n, "seconds": [s]} for (c, n), s in seconds.items()]
    headings, rows = table([{"measure": "context", "cases": cases}])
    assert headings[4:] == ["beside KVCache, 50", "beside KVCache, 100"]
    assert rows[0] == ["none (one row)", "1", "10.00", "100.0", "2.00x", "4.00x"]
    assert rows[3] == ["tova", "20", "16.00", "62.5", "1.25x", "2.50x"]


def test_speed_beside_both_caches():
    def case(name, prompt, step):
        seconds = {"prompt_seconds": [prompt], "seconds": [step]}
        return {"cache": name, **seconds, "peak_bytes": 3_000_000, "bytes": 500_000}

    cases = [case("KVCache", 2, 0.1), case("RotatingKVCache", 1, 0.05), case("tova", 4, 0.2)]
    _, rows = table([{"measure": "speed", "prompt": 1000, "cases": cases}])
    expected = ["tova", "250", "0.50x", "5.0", "0.50x", "0.25x", "3.0 MB", "0.5 MB"]
    assert rows[2] == expected


def test_listing_beyond_what_python_needs():
    case = {"import": [2.0, 3.0], "own": [0.1, 0.3], "policies": [0.02], "entry_points": [0.015]}
    _, rows = table([{"measure": "import", "cases": [{**case, "distributions": 9}]}])
    assert [ms for _, ms in rows] == ["2500.0", "200.0", "20.0", "15.0", "5.0"]


def test_plot_of_some():
    batches = [
        {"measure": "batch", "sequences": n, "cases": [CASE, FAST], "budget": 20} for n in (1, 2, 2)
    ]
    axes = plot(batches).axes
    assert len(axes) == 2
    assert [bar.get_width() for bar in axes[0].patches] == [40, 20]  # from below


# The command


def velox(folder, out, *args):
    defaults = ["--policies", "tova,streaming", "--budget", "16", "--prompt", "40", "--block", "16"]
    sizes = ["--contexts", "20,40", "--long", "32", "--batches", "1,2", "--steps", "2"]
    args = ["bench", "--model", folder, *defaults, *sizes, "--rounds", "1", "--out", out, *args]
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_the_command(folder, tmp_path, monkeypatch):
    took = {"import": [1.0], "own": [0.5], "policies": [0.1], "entry_points": [0.1]}
    monkeypatch.setattr(
        "velox_core.evaluation.bench.imports", lambda *_: [{**took, "distributions": 2}]
    )
    out = tmp_path / "out.jsonl"
    result = velox(folder, out)
    assert result.exit_code == 0, result.output
    for measure in ("speed", "context", "batch", "hooks", "import"):
        assert f"{measure}, 1 round," in result.stdout
    records = list(map(json.loads, out.read_text().splitlines()))
    measures = [(record["measure"], record.get("sequences")) for record in records]
    assert measures == [
        ("speed", None),
        ("context", None),
        ("batch", 1),
        ("batch", 2),
        ("hooks", None),
        ("import", None),
    ]
    assert all(record["kind"] == "bench" and record["model"] == folder for record in records)
    assert out.with_suffix(".bench.svg").exists()

    # Nothing is measured twice; what is missing is.
    out.write_text("".join(json.dumps(record) + "\n" for record in records[:3] + records[4:]))
    again = velox(folder, out, "--measures", "hooks,batch", "--json")
    assert again.exit_code == 0, again.output
    now = list(map(json.loads, out.read_text().splitlines()))
    assert now[:-1] == records[:3] + records[4:]
    assert (now[-1]["measure"], now[-1]["sequences"]) == ("batch", 2)
    shown = [(record["measure"], record.get("sequences")) for record in json.loads(again.stdout)]
    assert shown == [("hooks", None), ("batch", 1), ("batch", 2)]
    velox(folder, out, "--measures", "hooks", "--steps", "3")
    assert len(out.read_text().splitlines()) == 7


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--measures", "speed,latency"], "'latency' is not one of"),
        (["--prompt", "16"], "16 tokens fits into 16 rows"),
        (["--long", "8", "--measures", "batch"], "8 rows are fewer than a budget of 16"),
        (["--policies", "tovva"], "tovva"),
        (["--policies", "morphkv"], "budget=16 leaves no room"),
        (["--contexts", "x"], "'x' is not a valid integer range"),
        (["--plot", "x.jpeg"], "x.jpeg"),
    ],
)
def test_bad_input(folder, tmp_path, args, message):
    result = velox(folder, tmp_path / "out.jsonl", *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("velox: ")
