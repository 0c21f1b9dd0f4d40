"""MorphKV for velox."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import mlx.core as mx

from velox_core import Policy, Rows, at_least, hookimpl, one_of

__all__ = ["MorphKV"]


@attrs.frozen(eq=False, kw_only=True)
class MorphKV(Policy):
    """Keep the rows that the last few queries attend to most, together.

    The newest ``window`` tokens always stay. Their queries are kept too, and when a row must go,
    each attends anew to all rows that are held; the weights that a row gets are fused into one
    score, and the older row with the lowest goes. Several queries don't err all at once as one
    may, and old ones don't count, so the choice follows the text where it turns.

    Paper: Ghadia, Kumar, Jain, Nair, Das, "Dialogue Without Limits: Constant-Sized KV Caches for
    Extended Responses in LLMs", arXiv 2503.00979. Official code: github.com/ghadiaravi13/MorphKV.

    Args:
        budget: rows a layer keeps, or one number a layer. Default 512.
        window: how many of the latest queries score, and of the newest rows stay. Default 32.
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
        - The weights are the model's own, over all rows, as in the paper. The official code's
          softmax leaves the window's rows out.
        - The newest query is one of the window's, and its row one of the ``budget``. The official
          code scores with the queries before it, and keeps its row on top.
        - A prompt fed in blocks is cut after each block; the official code keeps the prompt whole
          until the first token is generated.
        - ``fusion="mean"`` (which ranks as the sum does), ``scope="layer"`` and
          ``queries="keys"`` are ours.

    With ``window=1`` it keeps TOVA's rows.
    """

    hook_version: ClassVar[int] = 1
    pure: ClassVar[bool] = True

    window: int = attrs.field(default=32, validator=at_least(1))
    fusion: Literal["sum", "max", "mean"] = attrs.field(
        default="sum", validator=one_of("sum", "max", "mean")
    )
    scope: Literal["layer", "head"] = attrs.field(default="head", validator=one_of("layer", "head"))

    @property
    def n_queries(self) -> int:  # type: ignore[override]
        return self.window

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        weights = rows.pool(rows.attention(last=self.window))
        fuse = {"sum": mx.sum, "max": mx.max, "mean": mx.mean}[self.fusion]
        return fuse(weights, axis=2)

    @hookimpl
    def protect(self, rows: Rows) -> mx.array:
        """The sinks and the window's rows stay."""
        return (rows.positions > rows.newest - self.window) | (rows.positions < self.n_sink)

    def reserved(self, budget: int) -> dict[str, int]:
        return {"n_sink": self.n_sink, f"the others of window={self.window}": self.window - 1}
