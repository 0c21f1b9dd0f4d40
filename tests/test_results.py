"""The file of results: whole lines, whatever stops the run, and errors that name the line."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import velox_core
from velox_core import VeloxError
from velox_core.evaluation.results import Results


def record(**more):
    return {"kind": "perplexity", "model": "m", **more}


def test_what_is_appended_is_there(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    assert results.records() == []
    results.append(record(budget=8, text="a\nb é"))
    results.append(record(budget=16))
    assert results.path.read_text(encoding="utf-8").count("\n") == 2
    version = velox_core.__version__
    assert Results(results.path).records() == [
        record(budget=8, text="a\nb é", velox=version),
        record(budget=16, velox=version),
    ]


def test_several_may_append(tmp_path, monkeypatch):
    results, read = Results(tmp_path / "results.jsonl"), Results._read

    def slow(self):
        found = read(self)
        time.sleep(0.002)
        return found

    monkeypatch.setattr(Results, "_read", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: results.append(record(budget=i)), range(40)))
    assert sorted(found["budget"] for found in results.records()) == list(range(40))


def test_find(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.append(record(budget=[8, 16], value=1))
    results.append(record(budget=8, value=2))
    results.append(record(budget=8, value=3))
    assert results.find(kind="perplexity", budget=8)["value"] == 3
    assert results.find(budget=(8, 16))["value"] == 1
    assert results.find(budget=8, model="another") is None
    assert results.find(absent=None) is None


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_line_that_was_cut_off_is_overwritten(tmp_path, cut):
    results = Results(tmp_path / "results.jsonl")
    for value in (1, 2, 3):
        results.append(record(value=value))
    lines = results.path.read_bytes().splitlines(keepends=True)
    results.path.write_bytes(b"".join(lines[:2]) + lines[2][:-cut])
    kept = [1, 2] if cut > 1 else [1, 2, 3]  # without its line end alone, a line is whole
    assert [found["value"] for found in Results(results.path).records()] == kept
    results.append(record(value=4))
    text = results.path.read_text()
    assert [json.loads(line)["value"] for line in text.splitlines()] == [*kept, 4]


def test_cut_in_the_midst_of_a_letter(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.append(record(value=1))
    results.path.write_bytes(results.path.read_bytes() + '{"model": "é'.encode()[:-1])
    results.append(record(value=2))
    assert [found["value"] for found in results.records()] == [1, 2]


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"kind": "perp"}', '{"kind": "bench"}'])
def test_a_line_that_is_no_result(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(record()) + f"\n{line}\n" + json.dumps(record()) + "\n")
    with pytest.raises(VeloxError, match=r"line 2 of .*isn't a result"):
        Results(path)


def test_places_where_no_file_can_be(tmp_path):
    with pytest.raises(VeloxError, match=r"no folder .*none for the results"):
        Results(tmp_path / "none" / "results.jsonl")
    with pytest.raises(VeloxError, match=r"can't read .*: Is a directory"):
        Results(tmp_path)
