"""What calling a policy's hooks costs, as a share of a decode step.

A step builds its graph in Python, and runs it elsewhere; hooks are part of the building. The calls
of one step, all layers', are noted, and made again and again: through pluggy, and as plain calls
of the same methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from ...hooks import hookimpl
from ...model import make_cache
from ...policy import Policy
from ...registry import load_policy
from ...rows import Rows
from ..policies import PolicySpec
from .caches import decode, filled
from .plan import Plan, Progress
from .rounds import interleave

REPEAT = 50  # a step's calls take well under a millisecond


class Calls:
    """An observer that notes each call of a hook: its name and what it was given."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, dict[str, Any]]] = []

    @hookimpl(wrapper=True)
    def score(self, rows: Rows) -> Any:
        self.noted.append(("score", {"rows": rows}))
        return (yield)

    @hookimpl(wrapper=True)
    def protect(self, rows: Rows) -> Any:
        self.noted.append(("protect", {"rows": rows}))
        return (yield)

    @hookimpl(wrapper=True)
    def evict(self, rows: Rows, scores: mx.array, protected: mx.array, count: int) -> Any:
        given = {"rows": rows, "scores": scores, "protected": protected, "count": count}
        self.noted.append(("evict", given))
        return (yield)


def hooks(model: Any, plan: Plan, progress: Progress) -> list[dict[str, Any]]:
    """Time of each policy's hooks in a decode step.

    Returns:
        Cases with ``calls`` (hook calls in a step) and, each by round, the ``seconds`` of a step,
        ``hook_seconds``, what its hook calls take, and ``direct_seconds``, what the same methods
        take without pluggy.
    """
    cases = []
    for spec in plan.policies:
        policy, noted = spec.load(plan.budget), noted_calls(model, spec, plan)
        cache = filled(model, partial(make_cache, model, policy), plan)
        times = interleave(
            {
                "seconds": partial(decode, model, cache, plan.steps),
                "hook_seconds": partial(_repeat, through_pluggy(policy, noted)),
                "direct_seconds": partial(_repeat, directly(policy, noted)),
            },
            plan.rounds,
            progress,
        )
        cases.append({"cache": spec.text, "calls": len(noted), **times})
    return cases


def noted_calls(model: Any, spec: PolicySpec, plan: Plan) -> list[tuple[str, dict[str, Any]]]:
    """The hook calls of one step."""
    calls = Calls()
    options = {"budget": plan.budget, **spec.options}
    policy = load_policy(spec.name, protect=[calls], **options)
    cache = filled(model, partial(make_cache, model, policy), plan)
    for _ in range(2):  # a step does the eviction of the one before: of a token too, not a block
        calls.noted.clear()
        mx.eval(model(mx.array([[1]]), cache=cache))
    return calls.noted


def through_pluggy(
    policy: Policy, noted: list[tuple[str, dict[str, Any]]]
) -> list[Callable[[], object]]:
    return [partial(getattr(policy.hooks().hook, name), **given) for name, given in noted]


def directly(policy: Policy, noted: list[tuple[str, dict[str, Any]]]) -> list[Callable[[], object]]:
    """The methods that pluggy would call, in its order."""
    found: list[Callable[[], object]] = []
    for name, given in noted:
        caller = getattr(policy.hooks().hook, name)
        methods = caller.get_hookimpls()[::-1]  # the last one comes first
        if caller.spec.opts["firstresult"]:
            methods = methods[:1]
        found += [partial(m.function, *(given[arg] for arg in m.argnames)) for m in methods]
    return found


def _repeat(calls: list[Callable[[], object]]) -> float:
    """Seconds that the calls take once."""
    started = time.perf_counter()
    for _ in range(REPEAT):
        for call in calls:
            call()
    return (time.perf_counter() - started) / REPEAT
