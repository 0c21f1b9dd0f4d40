"""The choices of a decode step, made for all layers at once.

A layer that attended to a token leaves a turn: its rows' positions and scores, and the token's
attention weights. When the next token comes and the first layer needs to know which row goes, the
hooks are asked for all turns together, as though the layers were sequences of one batch. What is
dear there is to launch operations, not to do them, and of 30 layers that takes a 30th.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any, NoReturn

import attrs
import mlx.core as mx

from . import storage
from .eviction import ask
from .policy import Policy
from .rows import Attended, Rows

#: Indices of the row to go, all rows' scores, and positions with room made.
Choice = tuple[mx.array, mx.array, mx.array]

_ALL = "all layers"  # whose record that is, among a policy's


@attrs.define(eq=False, kw_only=True)
class Turn:
    """What a layer leaves whose newest token took another row's place, and one row is to go."""

    policy: Policy
    budget: int
    #: Tokens seen, by sequence.
    tokens: tuple[int, ...]
    #: Of keys, values, and queries if the policy asks for them.
    shapes: tuple[tuple[int, ...], ...]
    #: Positions, ``[batch, heads or 1, rows]``; with ``every_step`` scores, as ``rows.scores``,
    #: else None; and the newest query's weights, as ``attended.weights``, or None without queries.
    arrays: tuple[mx.array | None, ...]
    choice: Choice | None = None

    def goes_with(self, other: Turn) -> bool:
        """Whether one choice may be made for both."""
        return (
            self.policy is other.policy
            and self.tokens == other.tokens
            and self.budget == other.budget
            and self.shapes == other.shapes
            and _shapes(self.arrays) == _shapes(other.arrays)
        )


def _shapes(arrays: tuple[mx.array | None, ...]) -> list[tuple[int, ...]]:
    return [array.shape for array in storage.arrays(*arrays)]


class _Waiting(threading.local):
    """The turns without a choice, of all caches of a thread. A cache that is dropped, or does
    otherwise, drops its turn."""

    def __init__(self) -> None:
        self.turns: list[weakref.ref[Turn]] = []


_waiting = _Waiting()


def leave(turn: Turn) -> Turn:
    """Let this turn be chosen for together with those that go with it."""
    _waiting.turns.append(weakref.ref(turn))
    return turn


def possible(policy: Policy) -> bool:
    """Whether the policy's hooks may be asked for all layers at once: they must be pure, and do
    with the newest query's weights."""
    known_not_to = policy._replays.get(_ALL, ask) is None
    return policy.replayable and policy.n_queries <= 1 and not known_not_to


def choose(turn: Turn) -> Choice | None:
    """The choice for this turn, made for all that go with it; None where the hooks want to know
    what a turn hasn't."""
    if turn.choice is None and possible(turn.policy):
        together, others = [turn], list[Turn]()
        for ref in _waiting.turns:
            each = ref()
            if each is not None and each is not turn:
                (together if turn.goes_with(each) else others).append(each)
        _waiting.turns = [weakref.ref(each) for each in others]
        _choose(turn.policy, together)
    return turn.choice


def weights(rows: Rows) -> mx.array:
    """The newest query's weights, ``[batch, query_heads, 1, rows]``, where the model's attention
    doesn't give them."""
    assert rows.attended is not None
    return _over(attrs.astuple(rows.attended, recurse=False), rows.keys)


#: It is the same work at each step and in each layer, so it is recorded once.
_over = mx.compile(lambda seen, keys: Attended(*seen).over(keys))


def _choose(policy: Policy, turns: list[Turn]) -> None:
    replay = policy._replays.get(_ALL)
    if replay is None:
        replay = policy._replays[_ALL] = mx.compile(partial(_ask_for_all, policy))
    first = turns[0]
    tokens = first.tokens if len(first.tokens) == 1 else first.tokens * len(turns)
    last = tuple([seen - 1 for seen in tokens])
    arrays = [turn.arrays for turn in turns]
    numbers = storage.column(last, 3), storage.column(last, 2)
    try:
        chosen = replay(arrays, *numbers, first.budget, first.shapes)
    except Exception:  # asked by itself, a layer shows what is wrong, if anything is
        policy._replays[_ALL] = None
        return
    for turn, choice in zip(turns, chosen, strict=True):
        turn.choice = choice


def _ask_for_all(
    policy: Policy,
    arrays: list[tuple[Any, ...]],
    newest: mx.array,
    query_positions: mx.array,
    budget: int,
    shapes: tuple[tuple[int, ...], ...],
) -> list[Choice]:
    n = len(arrays)
    positions, scores, weights = (
        None if layers[0] is None else mx.concatenate(list(layers))
        for layers in zip(*arrays, strict=True)
    )
    assert positions is not None
    if scores is None:
        scores = mx.zeros(policy.score_shape(positions.shape))
    keys, values, *queries = (elsewhere(n * batch, *rest) for batch, *rest in shapes)
    seen = dict.fromkeys(["scale", "sinks", "softcap", "keys", "bias"], elsewhere())
    rows = Rows(
        keys=keys,
        values=values,
        positions=positions,
        scores=scores,
        query_positions=query_positions,
        newest=newest,
        n_new=1,
        attended=Attended(queries[0], **seen, weights=weights) if queries else None,
        budget=budget,
        layer=elsewhere(),
        scope=policy.scope,
        padded=False,
    )
    chosen = ask(policy, rows, 1, stale=True)
    gone, *rest = (mx.split(array, n) for array in chosen)
    # Evaluated along with it: a graph that nobody evaluates would grow with every token.
    gone = mx.depends(gone, [*rest[0], *rest[1]])
    return list(zip(gone, *rest, strict=True))


class _Elsewhere:
    """What is known to each layer by itself alone, but for the shape: keys, values, queries, the
    layer's index. An operation with it fails, and then the hooks are asked layer by layer."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.ndim = shape, len(shape)

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("not known where all layers' choices are made at once")

    __bool__ = __eq__
    __hash__ = None  # type: ignore[assignment]


elsewhere: Any = _Elsewhere  # in the place of an array, or of an index
