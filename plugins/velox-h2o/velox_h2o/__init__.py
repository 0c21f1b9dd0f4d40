"""H2O, the heavy-hitter oracle, for velox."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import attrs
import mlx.core as mx

from velox_core import Policy, PolicyConfigError, Rows, hookimpl, one_of

__all__ = ["H2O"]


def _share_or_rows(policy: H2O, attribute: attrs.Attribute[Any], value: object) -> None:
    rows = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not rows and not (isinstance(value, float) and 0 <= value <= 1):
        raise PolicyConfigError(
            f"H2O: recent={value!r} isn't allowed; it must be a share of the budget "
            "(a number with a point, 0.0 to 1.0) or rows (a whole number of at least 0)."
        )


@attrs.frozen(eq=False, kw_only=True)
class H2O(Policy):
    """Keep the rows that got the most attention so far, and the most recent ones.

    A row's score is the attention that it got from every query since it came in, summed and never
    divided by their number: the heavy hitters. Young rows have had few queries, so the recent part
    of the budget is theirs whatever their score. Of the others, the one with the lowest sum goes;
    each KV head chooses for itself.

    Paper: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
    Language Models", arXiv 2306.14048. Official code: github.com/FMInference/H2O.

    Args:
        budget: rows a layer keeps, or one number a layer. Default 512.
        recent: how much of the budget is for the newest rows: a share as a float (default 0.5), or
            rows as an int.
        n_sink: first tokens that always stay, on top of the recent ones. Default 4.
        scope: ``"head"`` (default, the paper's), a choice a KV head over the mean of its group of
            query heads, or ``"layer"``, one choice over the mean of all.
        queries: ``"model"`` (default) or ``"keys"``, the incoming key in the query's place.
        positions: ``"absolute"`` (default), ``"contiguous"`` or ``"compressed"``.

    Deviations from the paper and the official code:
        - ``n_sink`` is 4 by default; the paper has none (``n_sink=0``), and its heavy hitters
          include the first tokens in most heads anyway.
        - The official code knows no groups: each query head has its own KV head there. The mean
          over a group and ``scope="layer"`` are ours, and so is ``queries="keys"``.
        - Sums are of each sequence; the official code adds up a batch's (and takes one sequence).
        - The official code sums and rounds in the model's type; here sums are float32.
        - A prompt fed in blocks is cut after each block, by all its queries; the official code
          reads the prompt in one piece and cuts it once.
        - Positions stay the tokens' own, as in the official code's main variant; its variant for
          endless streams numbers rows by their place in the cache: ``positions="contiguous"``.
    """

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 1
    every_step: ClassVar[bool] = True
    pure: ClassVar[bool] = True

    recent: float | int = attrs.field(default=0.5, validator=_share_or_rows)
    scope: Literal["layer", "head"] = attrs.field(default="head", validator=one_of("layer", "head"))

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        return rows.scores + rows.pool(rows.received(rows.n_new))

    @hookimpl
    def protect(self, rows: Rows) -> mx.array:
        """The sinks and the recent rows stay."""
        newest = rows.positions > rows.newest - self.recent_rows(rows.budget)
        return newest | (rows.positions < self.n_sink)

    def recent_rows(self, budget: int) -> int:
        """How many of the newest rows always stay."""
        return int(self.recent * budget) if isinstance(self.recent, float) else self.recent

    def reserved(self, budget: int) -> dict[str, int]:
        others = max(self.recent_rows(budget) - 1, 0)
        return {"n_sink": self.n_sink, f"the others of recent={self.recent}": others}
