"""Checks of what a step costs, and that none waits for the host."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import attrs
import mlx.core as mx

from ..cache import VeloxCache
from ..hooks import HOOK_VERSION, hookimpl
from ..policy import Policy
from ..rows import Rows
from .check import Check
from .failure import CheckFailed
from .held import held, same, same_scores
from .hook_checks import evict, protected, score, watch_all
from .stream import Stream, step
from .trial import Trial

ABSURD = 50.0  # times a step of the cheapest policy that there is
NO_REPLAY = "MLX replays nothing here: on Linux's CPU that takes g++"


@attrs.frozen(eq=False, kw_only=True)
class Recency(Policy):
    """The newest rows stay, as with StreamingLLM: what no policy can be much cheaper than."""

    hook_version: ClassVar[int] = HOOK_VERSION

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        """By age."""
        return (rows.positions - rows.newest).astype(mx.float32)


def without_values(rows: Rows, call: Callable[[Rows], Any]) -> None:
    """Call with rows of which nothing can be computed yet: whatever asks for a number fails."""
    names = [f.name for f in attrs.fields(Rows) if isinstance(getattr(rows, f.name), mx.array)]
    queries = rows.attended.queries if rows.attended else mx.array(0)

    def traced(queries: mx.array, *shown: mx.array) -> mx.array:
        attended = attrs.evolve(rows.attended, queries=queries) if rows.attended else None
        arrays: Any = dict(zip(names, shown, strict=True))
        call(attrs.evolve(rows, **arrays, attended=attended))
        return mx.array(0)

    # Exporting traces also where compiling is off, or has no compiler.
    mx.export_function(lambda _: None, traced, queries, *(getattr(rows, name) for name in names))


def compiles() -> bool:
    """Whether ``mx.compile`` records what a function builds."""

    def asks(array: mx.array) -> mx.array:
        return mx.array(array.item())

    try:
        mx.compile(asks)(mx.array(0.0))
    except ValueError:
        return True
    return False


@contextmanager
def compiling() -> Iterator[bool]:
    """Turn ``mx.compile`` on, where it was off; gives whether it works."""
    was_on = compiles()
    mx.enable_compile()
    try:
        yield was_on or compiles()
    finally:
        if not was_on:
            mx.disable_compile()


def _waiting(trial: Trial) -> str:
    watcher = watch_all(trial)
    calls: dict[Any, tuple[Rows, Callable[[Rows], Any]]] = {}  # one of each kind
    scopes = trial.subject.scopes
    policies = {scope: trial.subject.make(scope=scope) for scope in scopes}
    hooks = {scope: policy.hooks().hook for scope, policy in policies.items()}
    for scoring in watcher.scorings:
        rows = scoring.rows
        hook = hooks[rows.scope]
        kind = (rows.scope, rows.padded, rows.n_new > 1)
        calls["score", kind] = rows, partial(_call, hook.score)
        calls["protect", kind] = rows, partial(_call, hook.protect)
        if rows.scores.ndim > 3:
            calls["fuse", kind] = rows, partial(_call_fuse, policies[rows.scope])
    for evicting in watcher.evictions:
        rows = evicting.rows
        hook = hooks[rows.scope]
        kind = (rows.scope, rows.padded, evicting.count > 1)
        calls["evict", kind] = rows, partial(_call_evict, hook.evict, evicting.count)
    for (name, _), (rows, call) in calls.items():
        try:
            without_values(rows, call)
        except Exception as error:
            if "eval" not in str(error):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise CheckFailed(
                "hooks build arrays and never wait for their numbers (no .item(), .tolist(), "
                "float(), bool() or `if` of an array, no mx.eval)",
                f"`{name}` waits: `{last.line}` in {last.name}, line {last.lineno}",
            ) from error
    return ""


def _call(hook: Any, rows: Rows) -> Any:
    return hook(rows=rows)


def _call_fuse(policy: Policy, rows: Rows) -> Any:
    return policy.fuse(rows.scores)


def _call_evict(hook: Any, count: int, rows: Rows) -> Any:
    protected = rows.positions == rows.newest
    scores = mx.zeros(rows.positions.shape)
    return hook(rows=rows, scores=scores, protected=protected, count=count)


waiting = Check(
    "waiting",
    "no hook waits for a number: mlx-lm computes a token ahead, and that would stop it",
    _waiting,
    needs=(score, evict, protected),
)


def step_time(cache: VeloxCache, stream: Stream) -> float:
    """Seconds that the next token's step takes."""
    assert isinstance(cache.offset, int)
    block = stream.block(cache.offset, 1)
    mx.eval(block.keys, block.values, block.queries)
    start = time.perf_counter()
    mx.eval(*step(cache, block))
    return time.perf_counter() - start


def _cost(trial: Trial) -> str:
    size = max(trial.budget, 256)
    stream = Stream.random(size + 100, trial.seed, dim=64)
    policies = trial.subject.make(size), Recency(budget=size)
    caches = [trial.cache(policy=policy) for policy in policies]
    stream.feed(trial.cache(budget=size), [size, 1, 1])  # guarded: the others aren't
    for cache in caches:
        stream.feed(cache, [size, 1, 1])
    # In turn, and the fastest of each: what else the machine does makes steps dear, never cheap.
    # Several at a time: the first after another's is slower.
    ours = cheapest = math.inf
    for _ in range(8):
        ours = min(ours, *(step_time(caches[0], stream) for _ in range(3)))
        cheapest = min(cheapest, *(step_time(caches[1], stream) for _ in range(6)))
    ratio = ours / cheapest
    if ratio > ABSURD:
        raise CheckFailed(cost.expected, f"{ratio:.0f} times: {1e3 * ours:.1f} ms with {size} rows")
    return f"{ratio:.1f} times a step that keeps the newest rows ({size} rows)"


cost = Check(
    "cost",
    f"a step takes less than {ABSURD:.0f} times one that merely keeps the newest rows",
    _cost,
    needs=(score, evict, protected),
)


def _replay(trial: Trial) -> str:
    if not trial.subject.make().replayable:
        return "not pure: its hooks are asked at each step"
    streams = [trial.stream(trial.budget + 20, layer) for layer in range(2)]
    blocks = trial.budget + 3, *[1] * 10
    with compiling() as works:
        if not works:
            return NO_REPLAY
        for scope in trial.subject.scopes:
            policy = trial.subject.make(scope=scope)
            layers = [trial.cache(policy=policy) for _ in streams]  # of one model, as it were
            for n in blocks:
                for layer, stream in zip(layers, streams, strict=True):
                    stream.feed(layer, [n])
                mx.eval([layer.keys for layer in layers])
            for layer, stream in zip(layers, streams, strict=True):
                asked = stream.feed(trial.cache(scope=scope), blocks)  # its guard sees each step
                same(replay.expected, "the replayed one", held(layer), "the one asked", held(asked))
                same_scores(replay.expected, asked, "replayed", layer)
    return ""


replay = Check(
    "replay",
    "a policy that says it is pure keeps the same rows whether its hooks are asked at each step "
    "and in each layer, or once, and replayed",
    _replay,
    needs=(score, evict, protected, waiting),
)

STEP_CHECKS = [waiting, cost, replay]
