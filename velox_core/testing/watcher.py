"""Observers of what a policy's hooks give."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import cast

import attrs
import mlx.core as mx

from ..hooks import hookimpl
from ..rows import Rows, lowest
from .failure import CheckFailed


def number(array: mx.array) -> int:
    """An array of one whole number or truth value, as Python's number."""
    return int(cast(int, array.item()))


class WrongIndex(CheckFailed):
    """An index of no row, at which nothing can go on."""


@attrs.frozen(eq=False)
class Scoring:
    """One call of ``score``."""

    rows: Rows
    scores: mx.array


@attrs.frozen(eq=False)
class Evicting:
    """One call of ``evict``."""

    rows: Rows
    scores: mx.array
    protected: mx.array
    count: int
    gone: mx.array


class Guard:
    """Stops at indices that would make MLX write beyond an array."""

    @hookimpl(wrapper=True)
    def evict(
        self, rows: Rows, scores: mx.array, protected: mx.array, count: int
    ) -> Generator[None, mx.array, mx.array]:
        gone = yield
        n = rows.positions.shape[-1]
        if isinstance(gone, mx.array) and gone.size:
            least, most = number(gone.min()), number(gone.max())
            if least < 0 or most >= n:
                raise WrongIndex(
                    f"`evict` gives indices of the {n} rows, 0 to {n - 1}",
                    f"the index {least if least < 0 else most}",
                )
        return gone


@attrs.define(eq=False)
class Calm:
    """Puts something harmless in place of what ``protect`` gives, and ``evict`` unless told not to:
    beside it another hook is judged by itself."""

    evict_too: bool = True
    claims: int = 1  # implementations of `protect`, each of which must give something

    @hookimpl(wrapper=True)
    def protect(self, rows: Rows) -> Generator[None, list[mx.array], list[mx.array]]:
        with suppress(Exception):
            yield
        return [mx.zeros(rows.positions.shape, mx.bool_)] * self.claims

    @hookimpl(wrapper=True, tryfirst=True)
    def evict(
        self, rows: Rows, scores: mx.array, protected: mx.array, count: int
    ) -> Generator[None, mx.array, mx.array]:
        if not self.evict_too:
            return (yield)
        with suppress(Exception):
            yield
        return lowest(mx.where(mx.isnan(scores), -mx.inf, scores), rows.positions, count)


@attrs.define(eq=False)
class Watcher:
    """Keeps every call."""

    scorings: list[Scoring] = attrs.field(factory=list)
    evictions: list[Evicting] = attrs.field(factory=list)

    @hookimpl(wrapper=True)
    def score(self, rows: Rows) -> Generator[None, mx.array, mx.array]:
        scores = yield
        if isinstance(scores, mx.array) and scores.shape == rows.scores.shape:
            self.scorings.append(Scoring(rows, scores))
        return scores

    @hookimpl(wrapper=True)
    def evict(
        self, rows: Rows, scores: mx.array, protected: mx.array, count: int
    ) -> Generator[None, mx.array, mx.array]:
        gone = yield
        if isinstance(gone, mx.array) and gone.shape == (*rows.positions.shape[:2], count):
            self.evictions.append(Evicting(rows, scores, protected, count, gone))
        return gone
