"""MorphKV for velox."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import mlx.core as mx

from velox_core import Policy, Rows, at_least, hookimpl, one_of

__all__ = ["MorphKV"]

PARTS = 4  # that the window is counted in, at most
_PARTS = mx.array(list(range(PARTS)))


@attrs.frozen(eq=False, kw_only=True)
class MorphKV(Policy):
    """Keep the rows that the last few queries attend to most, together.

    The newest ``window`` tokens always stay. What their queries attended to is remembered with
    each row and fused into one score, and when a row must go, the older row with the lowest does.
    Several queries don't err all at once as one may, and old ones don't count, so the choice
    follows the text where it turns.

    Paper: Ghadia, Kumar, Jain, Nair, Das, "Dialogue Without Limits: Constant-Sized KV Caches for
    Extended Responses in LLMs", arXiv 2503.00979. Official code: github.com/ghadiaravi13/MorphKV.

    Args:
        budget: rows a layer keeps, or one number a layer. Default 512.
        window: how many of the latest queries score, and of the newest rows stay. Default 32. It
            is counted in at most 4 parts, the oldest of which leaves whole, so a few more or fewer
            score: with 32 it is 25 to 32, with 33 it is 28 to 36. Up to 4 it is exact.
        fusion: ``"sum"`` (default), ``"max"`` or ``"mean"`` over the window's queries.
        n_sink: first tokens that always stay. Default 4.
        scope: ``"head"`` (default, the paper's), a choice a KV head over its group of query heads,
            or ``"layer"``, one choice for all. The group's mean is taken first, then fused.
        queries: ``"model"`` (default) or ``"keys"``, the incoming key in the query's place.
        positions: ``"absolute"`` (default), ``"contiguous"`` or ``"compressed"``.

    Deviations from the paper and the official code:
        - ``n_sink`` is 4 by default; the paper has none (``n_sink=0``).
        - A group of query heads counts by its mean, as TOVA's does. The official code takes the
          group's maximum (Mistral, Qwen2, Phi-3) or adds up its logits before the softmax (Llama);
          it too fuses over the window after that.
        - The weights are the model's own, over all rows, as in the paper, and count as they came,
          in parts, as above. The official code keeps the window's queries (with Llama the logits)
          and takes their softmax anew for each eviction; it leaves the window's rows out.
        - The newest query is one of the window's, and its row one of the ``budget``. The official
          code scores with the queries before it, and keeps its row on top.
        - A prompt fed in blocks is cut after each block; the official code keeps the prompt whole
          until the first token is generated. Its ``evict_after`` is ``slack`` here.
        - ``fusion="mean"``, which ranks as the sum does, ``scope="layer"`` and ``queries="keys"``
          are ours.

    With ``window=1`` it keeps TOVA's rows.
    """

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 1
    every_step: ClassVar[bool] = True
    pure: ClassVar[bool] = True

    window: int = attrs.field(default=32, validator=at_least(1))
    fusion: Literal["sum", "max", "mean"] = attrs.field(
        default="sum", validator=one_of("sum", "max", "mean")
    )
    scope: Literal["layer", "head"] = attrs.field(default="head", validator=one_of("layer", "head"))

    @property
    def part(self) -> int:
        """Queries that a part of the window has."""
        return -(-self.window // PARTS)

    @property
    def score_parts(self) -> int:  # type: ignore[override]
        return -(-self.window // self.part)

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        """Each part's fused weights: of those that it had, and of the newest block's queries."""
        n, queries = self.score_parts, rows.query_positions
        latest = rows.newest // self.part
        turns = latest - (latest - _PARTS[:n]) % n  # of each part, [batch, 1, parts]
        came = (queries >= 0).sum(axis=-1)[:, None, None] if rows.padded else rows.n_new
        goes_on = turns * self.part <= rows.newest - came  # else it begins anew

        last = min(rows.n_new, self.part * n)
        weights = rows.pool(rows.attention(last).swapaxes(2, 3))
        if last == 1 and not rows.padded:  # a decode step: few operations, as each is launched
            turn = mx.where(turns == latest, mx.where(goes_on, 1, -1), 0)[:, None]
            older, fused = mx.where(turn < 0, 0, rows.scores), mx.where(turn == 0, 0, weights)
        else:
            older = mx.where(goes_on[:, None], rows.scores, 0)
            theirs = queries[:, None, -last:, None] // self.part == turns[:, None]
            if self.fusion == "max":
                fused = mx.where(theirs[:, :, None], weights[..., None], 0).max(axis=3)
            else:
                fused = weights @ theirs.astype(mx.float32)
        return mx.maximum(older, fused) if self.fusion == "max" else older + fused

    def fuse(self, parts: mx.array) -> mx.array:
        if self.fusion == "max":
            return parts.max(axis=-1)
        return parts.sum(axis=-1) / (self.window if self.fusion == "mean" else 1)

    @hookimpl
    def protect(self, rows: Rows) -> mx.array:
        """The sinks and the window's rows stay."""
        return (rows.positions > rows.newest - self.window) | (rows.positions < self.n_sink)

    def reserved(self, budget: int) -> dict[str, int]:
        return {"n_sink": self.n_sink, f"the others of window={self.window}": self.window - 1}
