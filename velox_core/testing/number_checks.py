"""Checks of numbers as keys may have them: types, ties, huge and tiny ones."""

from __future__ import annotations

import mlx.core as mx

from .check import Check
from .failure import CheckFailed
from .held import full, held, stayed, untouched
from .hook_checks import all_finite, evict, no_protected_gone, protected, score, valid_choice
from .row_checks import budget, offsets
from .stream import Stream
from .trial import Trial
from .watcher import Watcher, number

NEEDS = (score, evict, protected, budget, offsets)

HUGE = {mx.float16: 6e4, mx.bfloat16: 1e15, mx.float32: 1e15}
TINY = {mx.float16: 1e-7, mx.bfloat16: 1e-30, mx.float32: 1e-30}


def survives(trial: Trial, stream: Stream, what: str) -> None:
    """Feed the stream and fail unless all that must hold holds."""
    watcher = Watcher()
    cache = trial.cache(watcher)
    for n in (5, trial.budget + 3, 1, 1, 4, *[1] * 4):
        stream.feed(cache, [n])
        when = f"after a block of {n}, with {what}"
        full(cache, when)
        stayed(cache, when)
        untouched(cache, stream, when)
    for scoring in watcher.scorings:
        try:
            all_finite(scoring.rows, scoring.scores)
        except CheckFailed as failure:
            raise CheckFailed(failure.expected, f"{failure.got}, with {what}") from None
    for evicting in watcher.evictions:
        valid_choice(evicting)
        no_protected_gone(evicting)


def _dtypes(trial: Trial) -> str:
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        survives(trial, trial.stream(trial.budget + 20, dtype=dtype), f"{dtype} keys")
    return ""


dtypes = Check(
    "dtypes",
    "keys and values of float16, bfloat16 and float32 stay as they come, and scores are float32",
    _dtypes,
    needs=NEEDS,
)


def _ties(trial: Trial) -> str:
    stream = trial.stream(trial.budget + 20)
    for what, key in (("all keys alike", 1.0), ("all keys zero", 0.0)):
        survives(trial, stream.with_keys(mx.full(stream.keys.shape, key)), what)
    one = Stream(stream.keys * 0 + 1, stream.values * 0 + 1, stream.queries * 0 + 1)
    survives(trial, one, "all tokens alike")
    return ""


ties = Check(
    "ties",
    "with keys that are all alike, or zero, scores are finite and the choice is valid",
    _ties,
    needs=NEEDS,
)


def _magnitudes(trial: Trial) -> str:
    for words, sizes in (("huge", HUGE), ("tiny", TINY)):
        for dtype, size in sizes.items():
            stream = trial.stream(trial.budget + 20)
            keys = mx.tanh(stream.keys) * size
            arrays = (keys, stream.values, stream.queries)
            stream = Stream(*(array.astype(dtype) for array in arrays))
            survives(trial, stream, f"{words} {dtype} keys (up to {size:g})")
    return ""


magnitudes = Check(
    "magnitudes",
    "with huge keys (up to 6e4 in float16, 1e15 in bfloat16 and float32) and tiny ones (up to "
    "1e-7, and 1e-30), scores are finite and the choice is valid",
    _magnitudes,
    needs=(*NEEDS, dtypes, ties),
)


def _nan(trial: Trial) -> str:
    watcher, size = Watcher(), trial.budget
    where = size - 2
    stream = trial.stream(size + 20)
    bad = mx.arange(size + 20)[:, None] == where
    stream = stream.with_keys(mx.where(bad, mx.nan, stream.keys))
    cache = trial.cache(watcher)
    for n in (size - 4, 4, 3, 5, *[1] * 8):
        stream.feed(cache, [n])
        full(cache, f"after a block of {n}, with the key of position {where} NaN")
        stayed(cache, f"after a block of {n}, with the key of position {where} NaN")
    for evicting in watcher.evictions:
        valid_choice(evicting)
        no_protected_gone(evicting)
    last = watcher.scorings[-1].scores
    spoilt = number(mx.isnan(last).sum())
    kept = any(where in head for head in held(cache))
    return (
        f"with a NaN key, {spoilt} of {last.size} scores are NaN after 20 more tokens, and its row "
        f"{'stays' if kept else 'is gone'}"
    )


nan_keys = Check(
    "nan_keys",
    "a NaN key harms no more than it must: the budget, protected rows and indices hold (what "
    "becomes of the scores is told)",
    _nan,
    needs=NEEDS,
)

NUMBER_CHECKS = [dtypes, ties, magnitudes, nan_keys]
