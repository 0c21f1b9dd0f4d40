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
from .eviction import ask, unscored
from .policy import Policy
from .rows import Attended, Rows

_ALL = "all layers"  # whose record that is, among a policy's
_NOT_HERE = "not known where all layers' choices are made at once"


@attrs.frozen(eq=False)
class Share:
    """A layer's share of what several hold in common. Its part is only taken when it is asked for:
    the next choice goes on with the whole."""

    #: ``[layers * batch, heads or 1, rows]`` int32
    all_positions: mx.array
    #: As ``rows.scores``, if the policy has ``every_step``.
    all_scores: mx.array | None
    layers: int = 1
    place: int = 0  # among the layers

    @property
    def batch(self) -> int:
        return self.all_positions.shape[0] // self.layers

    @property
    def positions(self) -> mx.array:
        return self._part(self.all_positions)

    @property
    def scores(self) -> mx.array | None:
        return None if self.all_scores is None else self._part(self.all_scores)

    def _part(self, whole: mx.array) -> mx.array:
        return whole[self.place * self.batch : (self.place + 1) * self.batch]


@attrs.define(eq=False, kw_only=True)
class Turn:
    """What a layer leaves whose newest token took another row's place, and one row is to go."""

    policy: Policy
    budget: int
    #: Tokens seen, by sequence.
    tokens: tuple[int, ...]
    #: Shapes of keys and values.
    shapes: tuple[tuple[int, ...], ...]
    #: What hooks may go by of what the layer attended with, if the policy asks for queries: their
    #: shape, the softcap, and which others there are.
    attended: tuple[Any, ...] | None
    #: Its rows' positions and scores.
    share: Share
    #: The newest query's weights, as ``attended.weights``, or None without queries.
    weights: mx.array | None
    #: Once it is chosen: ``[batch, heads or 1, 1]``, the row to go.
    gone: mx.array | None = None

    def goes_with(self, other: Turn) -> bool:
        """Whether one choice may be made for both."""
        return (
            self.policy is other.policy
            and self.tokens == other.tokens
            and self.budget == other.budget
            and self.shapes == other.shapes
            and self.attended == other.attended
            and _shape(self.weights) == _shape(other.weights)
        )


def _shape(array: mx.array | None) -> tuple[int, ...] | None:
    return None if array is None else array.shape


class _Waiting(threading.local):
    """The turns without a choice, of all caches of a thread. A cache that is dropped, or does
    otherwise, drops its turn."""

    def __init__(self) -> None:
        self.turns = weakref.WeakSet[Turn]()


_waiting = _Waiting()


def leave(turn: Turn) -> Turn:
    """Let this turn be chosen for together with those that go with it."""
    _waiting.turns.add(turn)
    return turn


def possible(policy: Policy) -> bool:
    """Whether the policy's hooks may be asked for all layers at once: they must be pure, and
    need no more than the newest query's weights."""
    refused = _ALL in policy._replays and policy._replays[_ALL] is None
    return policy.replayable and policy.n_queries <= 1 and not refused


def choose(turn: Turn) -> bool:
    """Have the row to go chosen for this turn and all that go with it, and room made for the next
    token; False where the hooks want to know what a turn hasn't."""
    if turn.gone is None and possible(turn.policy):
        _waiting.turns.discard(turn)
        together = [turn, *(each for each in _waiting.turns if turn.goes_with(each))]
        _choose(turn.policy, sorted(together, key=lambda each: each.share.place))
        _waiting.turns.difference_update(together)
    return turn.gone is not None


def _choose(policy: Policy, turns: list[Turn]) -> None:
    replay = policy._replays.get(_ALL)
    if replay is None:
        replay = policy._replays[_ALL] = mx.compile(partial(_ask_for_all, policy))
    first, layers = turns[0], len(turns)
    tokens = first.tokens if len(first.tokens) == 1 else first.tokens * layers
    last = tuple([seen - 1 for seen in tokens])
    weights = [turn.weights for turn in turns if turn.weights is not None]
    try:
        gone, scores, positions = replay(
            *_held(turns),
            mx.concatenate(weights) if weights else None,
            storage.column(last, 3),
            storage.column(last, 2),
            first.budget,
            layers,
            first.shapes,
            first.attended,
        )
    except Exception:  # asked by itself, a layer shows what is wrong, if anything is
        policy._replays[_ALL] = None
        return
    for place, (turn, its) in enumerate(zip(turns, mx.split(gone, layers), strict=True)):
        turn.gone, turn.share = its, Share(positions, scores, layers, place)


def _held(turns: list[Turn]) -> tuple[mx.array, mx.array | None]:
    """All layers' positions and scores, the whole that they share if it is the same."""
    first, shares = turns[0].share, [turn.share for turn in turns]
    if first.layers == len(turns) and all(
        share.all_positions is first.all_positions and share.place == place
        for place, share in enumerate(shares)
    ):
        return first.all_positions, first.all_scores
    scores = [share.scores for share in shares if share.scores is not None]
    positions = mx.concatenate([share.positions for share in shares])
    return positions, mx.concatenate(scores) if scores else None


def _ask_for_all(
    policy: Policy,
    positions: mx.array,
    scores: mx.array | None,
    weights: mx.array | None,
    newest: mx.array,
    query_positions: mx.array,
    budget: int,
    layers: int,
    shapes: tuple[tuple[int, ...], ...],
    attended: tuple[Any, ...] | None,
) -> tuple[mx.array, mx.array | None, mx.array]:
    """What ``ask`` gives; scores only if they are to be remembered."""
    if scores is None:
        scores = mx.zeros(policy.score_shape(positions.shape))
    keys, values = (elsewhere(layers * batch, *rest) for batch, *rest in shapes)
    seen = None
    if attended is not None:
        (batch, *rest), softcap, *there = attended
        sinks, its_keys, bias = (elsewhere() if each else None for each in there)
        queries, scale = elsewhere(layers * batch, *rest), elsewhere()
        seen = Attended(queries, scale, sinks, softcap, its_keys, bias, weights)
    rows = _OfAllLayers(
        keys=keys,
        values=values,
        positions=positions,
        scores=unscored(scores, positions, newest),
        query_positions=query_positions,
        newest=newest,
        n_new=1,
        attended=seen,
        budget=budget,
        layer=-1,
        scope=policy.scope,
        padded=False,
    )
    gone, scores, positions = ask(policy, rows, 1, stale=False)
    # Evaluated along with it: a graph that nobody evaluates would grow with every token.
    gone = mx.depends([gone], [scores, positions])[0]
    return gone, scores if policy.every_step else None, positions


class _OfAllLayers(Rows):
    """The rows of all layers, so that none of them is meant."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name == "layer":
            raise TypeError(_NOT_HERE)
        return super().__getattribute__(name)


class _Elsewhere:
    """What is known to each layer by itself alone, but for the shape: keys, values, queries.
    Whatever else is done with it fails, and then the hooks are asked layer by layer."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.ndim = shape, len(shape)

    def __getattr__(self, name: str) -> NoReturn:
        raise TypeError(_NOT_HERE)

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError(_NOT_HERE)

    __bool__ = __eq__
    __hash__ = None  # type: ignore[assignment]


elsewhere: Any = _Elsewhere  # in the place of an array
