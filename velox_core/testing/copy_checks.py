"""Checks of caches that are batched, copied, saved and loaded."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from ..cache import VeloxCache
from ..discovery import origin_of
from .check import Check
from .failure import CheckFailed
from .held import held, same, same_scores
from .hook_checks import evict, protected, score
from .row_checks import deterministic, offsets, stateless
from .together import Together, own_blocks
from .trial import Trial

NEEDS = (score, evict, protected, deterministic, stateless, offsets)


def _batch(trial: Trial) -> str:
    size = trial.budget
    lengths = [size + 6, size // 2, size + 1, size - 1]
    streams = [trial.stream(2 * size + 40, more=i) for i in range(4)]
    policy = trial.policy()
    expected = "a sequence in a batch keeps the rows that it keeps alone"

    def compare(together: Together, sequence: int, alone: VeloxCache, what: str) -> None:
        ours = together.alone(sequence)
        where = f"as sequence {sequence} {what}"
        same(expected, "alone it", held(alone), f"{where} it", held(ours))
        same_scores(
            "a sequence's scores in a batch are those that it has alone", alone, where, ours
        )

    def alone(i: int, blocks: list[int]) -> VeloxCache:
        return streams[i].feed(trial.cache(policy=policy), blocks)

    # Sequences of unequal length, merged; one joins, one goes.
    caches = [streams[i].feed(trial.cache(policy=policy), [lengths[i]]) for i in range(4)]
    together = Together.of(caches[:3], streams[:3])
    together.steps(6)
    together.add(Together.of(caches[3:], streams[3:]))
    together.steps(3)
    together.keep([3, 0, 1])
    together.steps(8)
    for sequence, (i, steps) in enumerate([(3, 11), (0, 17), (1, 17)]):
        what = "of a batch by merge, extend and filter"
        compare(together, sequence, alone(i, [lengths[i], *[1] * steps]), what)

    # Prompts of unequal length, padded on the right, in blocks.
    for blocks in ([size + 6], [size - 3, 5, 4]):
        together = Together.of([trial.cache(policy=policy) for _ in range(4)], streams)
        together.prompts(lengths, blocks)
        together.steps(6)
        for i, length in enumerate(lengths):
            what = f"of a batch whose prompts came padded in blocks of {blocks}"
            compare(together, i, alone(i, [*own_blocks(length, blocks), *[1] * 6]), what)
        own = together.alone(1)
        streams[1].feed(own, [1] * 9)
        whole = alone(1, [*own_blocks(lengths[1], blocks), *[1] * 15])
        same(expected, "alone from the start it", held(whole), "extracted and fed on it", held(own))
    return ""


batch = Check(
    "batch",
    "a sequence in a batch (merge, extend, filter, prompts padded on the right) keeps the rows "
    "that it keeps alone, and goes on so when extracted",
    _batch,
    needs=NEEDS,
)


def _prefix(trial: Trial) -> VeloxCache:
    return trial.stream(trial.budget + 30).feed(trial.cache(), [trial.budget + 4, 1, 1, 1])


def _go_on(trial: Trial, original: VeloxCache, other: VeloxCache, how: str) -> None:
    """Feed a cache and the one made of it different texts, in turn, and compare both with caches
    of their own."""
    one = trial.stream(trial.budget + 30)
    two = one.then(trial.stream(trial.budget + 30, more=1), at=trial.budget + 7)
    for _ in range(12):
        one.feed(original, [1])
        two.feed(other, [1])
    for what, cache, stream in (("the original", original, one), (f"the {how} one", other, two)):
        fresh = stream.feed(trial.cache(), [trial.budget + 4, *[1] * 15])
        expected = f"a cache and its {how} one go on each by itself, as if there were no other"
        same(expected, "a cache of its own", held(fresh), what, held(cache))


def _copies(trial: Trial) -> str:
    original = _prefix(trial)
    _go_on(trial, original, copy.deepcopy(original), "deep-copied")
    return ""


copies = Check(
    "copies",
    "a deep-copied cache and its original go on each by itself, as if there were no other",
    _copies,
    needs=NEEDS,
)


def _saved(trial: Trial) -> str:
    original = _prefix(trial)
    policy = original.policy
    if origin_of(policy):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "cache.safetensors")
            save_prompt_cache(path, [original])
            (loaded,) = load_prompt_cache(path)
        note = ""
    else:  # what saving and loading would do with the policy, as far as that goes
        loaded = copy.deepcopy(original)
        loaded.policy = type(policy)(**json.loads(json.dumps(policy.options())))
        loaded.policy.hooks(policy.extras)
        note = "as no installed distribution declares the policy, only its options were saved"
    before, after = policy.options(), loaded.policy.options()
    if json.dumps(before) != json.dumps(after):
        raise CheckFailed(f"options come back from a file as they were: {before}", f"{after}")
    _go_on(trial, original, loaded, "saved and loaded")
    return note


saved = Check(
    "saved",
    "a cache that was saved and loaded, with its policy, goes on as if it hadn't been",
    _saved,
    needs=NEEDS,
)

COPY_CHECKS = [batch, copies, saved]
