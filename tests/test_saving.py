"""Caches in files: what is loaded goes on, bit for bit, as what was saved; and whatever may be
wrong with a file comes out as one clear error."""

import contextlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import fake_plugins
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_models
from fake_plugins import GOOD, install
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

import velox_core
from velox_core import (
    CacheFileError,
    Pin,
    VeloxCache,
    hookimpl,
    load_cache,
    load_policy,
    make_cache,
    save_cache,
)
from velox_core.model import velox_caches

see, site = fake_plugins.see, fake_plugins.site  # fixtures

LLAMA = tiny_models.build("llama")
TOKENS = mx.random.randint(0, tiny_models.VOCAB, (3, 120), key=mx.random.key(0))
POLICIES = {
    "tova": {},
    "tova-head": {"scope": "head"},
    "h2o": {"scope": "head"},  # scores that last
    "morphkv": {"window": 4},  # a window of queries that lasts
    "streaming": {},
    "tova-layers": {"budget": [9, 14]},
}


def policy(name="tova", budget=12):
    return load_policy(name.partition("-")[0], **{"budget": budget} | POLICIES.get(name, {}))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "cache.safetensors"


def run(model, cache, *blocks, start=0, rows=slice(0, 1)):
    """The last logits of each block, as raw numbers."""
    logits = []
    for n in blocks:
        out = model(TOKENS[rows, start : start + n], cache=cache)[:, -1]
        mx.eval(out)
        logits.append(out)
        start += n
    return logits


def same(ours, theirs):
    """Whether two lists of arrays are equal, bit for bit."""
    return all(
        a.dtype == b.dtype and mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item()
        for a, b in zip(ours, theirs, strict=True)
    )


def leaves(cache):
    return tree_flatten([layer.state for layer in cache])


def assert_equal(ours, theirs):
    """All that two caches are, and what they say of themselves."""
    for (place, a), (other, b) in zip(leaves(ours), leaves(theirs), strict=True):
        assert place == other
        assert type(a) is type(b), place
        assert same([a], [b]) if isinstance(a, mx.array) else a == b, place
    for a, b in zip(velox_caches(ours), velox_caches(theirs), strict=True):
        assert type(a) is type(b)
        assert a.nbytes <= b.nbytes  # room for rows to come is made anew
        assert a.size() == b.size()
        assert a.tokens_seen == b.tokens_seen
        assert a.tokens_kept == b.tokens_kept
        assert a.is_trimmable() == b.is_trimmable()
        assert mx.array_equal(mx.array(a.offset), mx.array(b.offset))


def both_ways(file, cache):
    """The cache from a file of ours, and from one of mlx-lm's."""
    save_cache(file, cache)
    ours = load_cache(file)
    assert_equal(ours, cache)
    theirs = str(file).replace("cache.", "theirs.")
    save_prompt_cache(theirs, cache)
    assert_equal(load_prompt_cache(theirs), cache)
    assert_equal(load_prompt_cache(str(file)), cache)
    assert_equal(load_cache(theirs), cache)
    return ours


# What is loaded goes on as what was saved


@pytest.mark.parametrize("name", POLICIES)
def test_goes_on_bit_for_bit(file, name):
    cache = make_cache(LLAMA, policy(name))
    run(LLAMA, cache, 5, 7, 9, *[1] * 10)  # past the budget, and each token takes another's place
    loaded = both_ways(file, cache)
    assert all(type(layer) is VeloxCache for layer in loaded)
    assert loaded[0].policy is loaded[1].policy  # one for all, as before
    then = (1, 1, 1, 8, 1, 1, 1, 20, 1)
    assert same(run(LLAMA, loaded, *then, start=31), run(LLAMA, cache, *then, start=31))
    assert_equal(loaded, cache)
    assert loaded[0].offset == 31 + sum(then)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("quantised", [False, True])
def test_types(file, dtype, quantised):
    model = tiny_models.build("llama", dtype=dtype)
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
    cache = make_cache(model, policy("h2o"))
    run(model, cache, 20, 1, 1)
    loaded = both_ways(file, cache)
    assert loaded[0].keys.dtype == dtype
    assert same(run(model, loaded, 1, 4, 1, start=22), run(model, cache, 1, 4, 1, start=22))


def test_below_the_budget_and_empty(file):
    cache = make_cache(LLAMA, policy(budget=64))
    assert_equal(both_ways(file, cache), cache)
    assert load_cache(file)[0].empty()
    run(LLAMA, cache, 20, 1)
    loaded = both_ways(file, cache)
    assert loaded[0].is_trimmable()
    for each in (loaded, cache):
        assert each[0].trim(2) == each[1].trim(2) == 2
    assert same(run(LLAMA, loaded, 3, 1, start=19), run(LLAMA, cache, 3, 1, start=19))
    for layer in cache:
        layer.trim(23)
    assert_equal(both_ways(file, cache), cache)  # arrays of no rows
    assert same(run(LLAMA, load_cache(file), 9), run(LLAMA, cache, 9))


@pytest.mark.parametrize("name", ["tova-head", "h2o", "morphkv"])
def test_batches(file, name):
    alone = [make_cache(LLAMA, policy(name)) for _ in range(3)]
    run(LLAMA, alone[0], 20, 1, 1)
    run(LLAMA, alone[1], 3)  # the third holds nothing yet
    cache = [type(layers[0]).merge(layers) for layers in zip(*alone, strict=True)]
    for layer in cache:
        layer.prepare(lengths=[10, 20, 4], right_padding=[10, 0, 16])
    three = {"rows": slice(0, 3)}
    run(LLAMA, cache, 12, start=22, **three)
    loaded = both_ways(file, cache)  # in the middle of a padded prompt
    assert loaded[0]._coming == cache[0]._coming == [-2, 8, -8]
    for each in (loaded, cache):
        run(LLAMA, each, 8, start=34, **three)
        for layer in each:
            layer.finalize()
    assert_equal(loaded, cache)
    then = (1, 1, 1, 1)
    run(LLAMA, cache, *then, start=42, **three)
    loaded = both_ways(file, cache)
    assert loaded[0].offset.tolist() == [22 + 10 + 4, 3 + 20 + 4, 4 + 4]
    ours, theirs = (run(LLAMA, each, *then, start=46, **three) for each in (loaded, cache))
    assert same(ours, theirs)
    ours, theirs = ([layer.extract(2) for layer in each] for each in (loaded, cache))
    assert same(run(LLAMA, ours, 5, 1, start=50), run(LLAMA, theirs, 5, 1, start=50))


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("gemma3_text", "RotatingKVCache"),
        ("qwen3_next", "ArraysCache"),
        ("falcon_h1", "CacheList"),
        ("llama4", "ChunkedKVCache"),
    ],
)
def test_beside_the_models_own_caches(file, architecture, kind):
    model = tiny_models.build(architecture)
    cache = make_cache(model, policy())
    run(model, cache, 20, 1, 1, 1)
    loaded = both_ways(file, cache)
    assert [type(layer) for layer in loaded] == [type(layer) for layer in cache]
    assert kind in {type(layer).__name__ for layer in loaded}
    assert same(run(model, loaded, 1, 7, 1, 1, start=23), run(model, cache, 1, 7, 1, 1, start=23))


def test_lookback(file):
    cache = make_cache(LLAMA, policy("h2o"), lookback=4)
    run(LLAMA, cache, 20, 3, 4, 1)
    loaded = both_ways(file, cache)
    assert loaded[0].lookback == 4
    for each in (loaded, cache):
        run(LLAMA, each, 4, start=28)
        assert each[0].trim(3) == each[1].trim(3) == 3
    assert same(run(LLAMA, loaded, 1, 3, start=29), run(LLAMA, cache, 1, 3, start=29))


def test_quantised_rows(file):
    model = tiny_models.build("llama", head_dim=32)
    cache = make_cache(model, policy("h2o"))
    run(model, cache, 20, 1)
    cache = [layer.to_quantized(group_size=32, bits=4) for layer in cache]
    run(model, cache, 1, 1, start=21)
    loaded = both_ways(file, cache)
    assert type(loaded[0]).__name__ == "QuantizedVeloxCache"
    assert same(run(model, loaded, 1, 5, 1, start=23), run(model, cache, 1, 5, 1, start=23))


def test_mlx_lm_alone_reads_it(file):
    """A process that only imports velox_core, and uses mlx-lm's own function."""
    model = tiny_models.build("llama", head_dim=32)
    kinds = [make_cache(model, policy()), make_cache(model, policy(), lookback=2)]
    run(model, kinds[0], 20)
    cache = [*kinds[0], *kinds[1], *(layer.to_quantized(32, 4) for layer in kinds[0])]
    save_cache(file, cache)
    code = (
        "import sys, velox_core\n"
        "from mlx_lm.models.cache import load_prompt_cache\n"
        "print([type(c).__name__ for c in load_prompt_cache(sys.argv[1])])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True
    )
    names = ["VeloxCache"] * 2 + ["LookbackCache"] * 2 + ["QuantizedVeloxCache"] * 2
    assert done.stdout.strip() == str(names)


def test_mlx_lms_own_caches(file):
    """A list without a cache of ours is as welcome."""
    cache = mlx_cache.make_prompt_cache(LLAMA)
    run(LLAMA, cache, 9)
    save_cache(file, cache)
    assert same(run(LLAMA, load_cache(file), 1, start=9), run(LLAMA, cache, 1, start=9))


def test_what_is_loaded_does_not_hang_on_the_file(file):
    cache = make_cache(LLAMA, policy())
    run(LLAMA, cache, 20, 1)
    save_cache(file, cache)
    loaded = load_cache(file)
    file.write_bytes(bytes(file.stat().st_size))
    assert_equal(loaded, cache)


# What the file says


def test_metadata(file):
    cache = make_cache(LLAMA, policy())
    said = {"title": "Der Prozeß\n", "empty": "", "0": "numbered"}
    save_cache(file, cache, said)
    loaded, metadata = load_cache(file, return_metadata=True)
    assert metadata == said
    assert_equal(loaded, cache)
    _, theirs = load_prompt_cache(str(file), return_metadata=True)
    assert theirs["title"] == said["title"]
    save_cache(file, cache)
    assert load_cache(file, return_metadata=True)[1] == {}


@pytest.mark.parametrize("wrong", [{"a.b": "x"}, {"": "x"}, {"velox": "x"}, {"n": 3}, {3: "n"}])
def test_metadata_that_cannot_be_kept(file, wrong):
    with pytest.raises(CacheFileError, match="can't be saved: both must be text"):
        save_cache(file, make_cache(LLAMA, policy()), wrong)
    assert not file.exists()


def test_the_file_names_the_policy(file):
    save_cache(file, make_cache(LLAMA, policy("h2o")))
    head = json.loads(mx.load(str(file), return_metadata=True)[1]["0.velox"])
    assert head["velox-kv"] == velox_core.__version__
    (named,) = head["policies"]
    assert named["policy"] == "h2o"
    assert named["distribution"] == "velox-h2o"
    assert named["version"]
    assert named["options"] == policy("h2o").options()


def test_protectors_come_back(file):
    pinned = load_policy("tova", budget=12, protect=[Pin(range(6, 9))])
    cache = make_cache(LLAMA, pinned)
    run(LLAMA, cache, 20, 1)
    loaded = both_ways(file, cache)
    assert same(run(LLAMA, loaded, *[1] * 30, start=21), run(LLAMA, cache, *[1] * 30, start=21))
    assert {6, 7, 8} <= set(loaded[0].positions.flatten().tolist())


def test_observers_are_left_out(file):
    class Observer:
        @hookimpl(wrapper=True)
        def score(self, rows):
            return (yield)

    cache = make_cache(LLAMA, load_policy("tova", budget=12, protect=[Observer()]))
    run(LLAMA, cache, 20)
    assert both_ways(file, cache)[0].policy.extras == ()


# What can't be loaded again isn't saved


def test_a_policy_of_no_package(file, remembering):
    cache = make_cache(LLAMA, remembering(budget=12))
    run(LLAMA, cache, 20)  # where mlx-lm evaluates the state; no error here
    mx.eval([layer.state for layer in cache])
    with pytest.raises(CacheFileError, match="'Remembering' comes from no installed package"):
        save_cache(file, cache)
    assert not file.exists()
    save_prompt_cache(str(file), cache)  # can't be kept from it, but the file says why
    for load in (load_cache, load_prompt_cache):
        with pytest.raises(CacheFileError, match="'Remembering' comes from no installed package"):
            load(str(file))


def test_a_protector_of_no_package(file):
    class Mine(Pin):
        pass

    cache = make_cache(LLAMA, load_policy("tova", budget=12, protect=[Mine([7])]))
    with pytest.raises(CacheFileError, match=r"protector 'Mine' comes from no .*velox\.protectors"):
        save_cache(file, cache)


def test_options_that_cannot_be_written(file, site):
    install(site, "velox-a", "ay", code=GOOD.replace("window: int = 8", "window: object = 8"))
    cache = make_cache(LLAMA, load_policy("ay", budget=12, window=object))
    run(LLAMA, cache, 20)
    mx.eval([layer.state for layer in cache])
    with pytest.raises(CacheFileError, match="an option of 'Fake' or its protectors can't be writ"):
        save_cache(file, cache)


def test_a_class_that_mlx_lm_would_not_find(file):
    class Mine(mlx_cache.KVCache):
        pass

    for cache in ([Mine()], [mlx_cache.CacheList(Mine())]):
        with pytest.raises(CacheFileError, match=r"mlx-lm would not find .*Mine"):
            save_cache(file, cache)
    with pytest.raises(CacheFileError, match="it has no layers"):
        save_cache(file, [])


# Whole or not at all


def test_a_save_that_fails_changes_nothing(file, monkeypatch):
    cache = make_cache(LLAMA, policy())
    save_cache(file, cache)
    before = file.read_bytes()

    run(LLAMA, cache, 20)
    for error, raised, said in (
        (RuntimeError("[write] Unable to write"), CacheFileError, r"written to .*: \[write\]"),
        (OSError(28, "No space left on device"), CacheFileError, r"written to .*: No space"),
        (KeyboardInterrupt("Ctrl-C"), KeyboardInterrupt, "Ctrl-C"),
        (None, CacheFileError, "written to"),  # only a part, without a word
    ):

        def part(name, *args, error=error):
            Path(name).write_bytes(before[:-1])
            if error is not None:
                raise error

        monkeypatch.setattr(mlx_cache, "save_prompt_cache", part)
        with pytest.raises(raised, match=said):
            save_cache(file, cache)
        assert os.listdir(file.parent) == [file.name]
        assert file.read_bytes() == before
    monkeypatch.undo()
    save_cache(file, cache)
    assert_equal(load_cache(file), cache)
    assert os.listdir(file.parent) == [file.name]


def test_a_link_stays_a_link(file):
    link = file.parent / "link.safetensors"
    link.symlink_to(file)
    save_cache(link, make_cache(LLAMA, policy()))
    assert link.is_symlink()
    assert len(load_cache(file)) == 2


def test_places_that_cannot_be_written(tmp_path):
    cache = make_cache(LLAMA, policy())
    with pytest.raises(CacheFileError, match=r"must be named ….safetensors"):
        save_cache(tmp_path / "cache", cache)
    with pytest.raises(CacheFileError, match=r"can't be written to .*: there is no folder .*no\."):
        save_cache(tmp_path / "no" / "such.safetensors", cache)
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CacheFileError, match=r"can't be written to .*: Is a directory"):
        save_cache(tmp_path / "folder.safetensors", cache)
    assert os.listdir(tmp_path) == ["folder.safetensors"]


# Files that can't be loaded


def test_no_file(tmp_path):
    with pytest.raises(CacheFileError, match=r"no cache to read in .*: No such file"):
        load_cache(tmp_path / "none.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CacheFileError, match=r"no cache to read in .*: Is a directory"):
        load_cache(tmp_path / "folder.safetensors")
    with pytest.raises(CacheFileError, match=r"must be named ….safetensors"):
        load_cache(tmp_path / "none")


def test_cut_short(file):
    cache = make_cache(LLAMA, policy())
    run(LLAMA, cache, 20)
    save_cache(file, cache)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 4, 8, 100, header - 1, header, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CacheFileError, match="isn't a safetensors file, or was cut short"):
            load_cache(file)


@pytest.mark.parametrize("content", [b"text of another kind " * 50, bytes(500), b"\xff" * 500])
def test_not_safetensors(file, content):
    file.write_bytes(content)
    with pytest.raises(CacheFileError, match="isn't a safetensors file"):
        load_cache(file)


def test_no_cache_in_it(file):
    mx.save_safetensors(str(file), {"weight": mx.ones((2, 2))})
    with pytest.raises(CacheFileError, match="holds no cache"):
        load_cache(file)
    mx.save_safetensors(str(file), {"weight": mx.ones((2, 2))}, {"format": "mlx", "1.0": "KVCache"})
    with pytest.raises(CacheFileError, match="can't be restored"):
        load_cache(file)


def edited(file, change):
    """The file with its metadata changed."""
    arrays, metadata = mx.load(str(file), return_metadata=True)
    mx.eval(arrays)
    change(arrays, metadata)
    mx.save_safetensors(str(file), arrays, metadata)


def test_from_another_version(file):
    save_cache(file, make_cache(LLAMA, policy()))
    edited(file, lambda arrays, metadata: metadata.update({"1.0": "LaterCache"}))
    with pytest.raises(CacheFileError, match="can't be restored: KeyError: 'LaterCache'"):
        load_cache(file)
    save_cache(file, make_cache(LLAMA, policy()))
    edited(file, lambda arrays, metadata: metadata.pop("2.5.1"))
    with pytest.raises(CacheFileError, match="can't be restored"):
        load_cache(file)
    head = {"0.velox": json.dumps({"format": 2, "velox-kv": "9.1"})}
    save_cache(file, make_cache(LLAMA, policy()))
    edited(file, lambda arrays, metadata: metadata.update(head))
    with pytest.raises(CacheFileError, match=r"written by velox-kv 9\.1, in a layout that"):
        load_cache(file)


def test_bytes_turned_over(file):
    """Whatever a file holds: a cache, or an error of ours."""
    cache = make_cache(LLAMA, policy())
    run(LLAMA, cache, 20)
    save_cache(file, cache)
    whole = file.read_bytes()
    for place in range(0, 8 + int.from_bytes(whole[:8], "little"), 97):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        with contextlib.suppress(CacheFileError):
            load_cache(file)


def test_the_policy_is_missing(file, see, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    install(here, "velox-a", "ay", version="1.2")
    install(there, "velox-other", "ay")  # of the same name, and another one
    see(here)
    cache = make_cache(LLAMA, load_policy("ay", budget=12))
    run(LLAMA, cache, 20)
    save_cache(file, cache)
    save_prompt_cache(str(tmp_path / "theirs.safetensors"), cache)
    assert_equal(load_cache(file), cache)
    del cache
    see(there)
    said = r"saved with the policy 'ay' of velox-a 1\.2, which can't be loaded here: no policy 'vel"
    for path in (file, tmp_path / "theirs.safetensors"):
        with pytest.raises(CacheFileError, match=said):
            load_cache(path)
    with pytest.raises(CacheFileError, match=said):
        load_prompt_cache(str(file))


def test_the_policy_has_other_options(file, site):
    install(site, "velox-a", "ay")
    save_cache(file, make_cache(LLAMA, load_policy("ay", budget=12, window=3)))
    (site / "velox_a.py").write_text("import nonesuch")
    del sys.modules["velox_a"]
    with pytest.raises(CacheFileError, match="can't be imported: ModuleNotFoundError"):
        load_cache(file)


def test_the_policy_is_of_another_version(file, see, tmp_path):
    for version in ("1.0", "1.1"):
        (tmp_path / version).mkdir()
        install(tmp_path / version, "velox-a", "ay", version=version)
    see(tmp_path / "1.0")
    cache = make_cache(LLAMA, load_policy("ay", budget=12))
    run(LLAMA, cache, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_cache(file, cache)
        load_cache(file)
    see(tmp_path / "1.1")
    with pytest.warns(UserWarning, match=r"'ay' of velox-a 1\.0, and version 1\.1 is") as warned:
        loaded = load_cache(file)
    assert len(warned) == 1  # not once a layer
    assert same(run(LLAMA, loaded, 1, 5, start=20), run(LLAMA, cache, 1, 5, start=20))


# On a real model


@pytest.mark.smollm2
def test_smollm2(file):
    """Saved past its budget, loaded, and the text goes on to the letter."""
    import mlx_lm

    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    import smollm2

    model, tokenizer = mlx_lm.load(str(smollm2.ensure()))
    prompt = tokenizer.encode("The first law of thermodynamics says that energy " * 30)
    cache = make_cache(model, load_policy("tova", budget=128))
    mx.eval(model(mx.array([prompt]), cache=cache))
    save_cache(file, cache)
    texts = [
        mlx_lm.generate(model, tokenizer, "can", prompt_cache=each, max_tokens=12)
        for each in (cache, load_cache(file))
    ]
    assert texts[0] == texts[1]
    assert_equal(load_cache(file)[:1], load_cache(file)[:1])
    assert file.stat().st_size < 1.05 * sum(layer.nbytes for layer in load_cache(file))
