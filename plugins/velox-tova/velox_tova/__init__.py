"""TOVA, token omission via attention, for velox."""

from __future__ import annotations

from typing import ClassVar

import attrs
import mlx.core as mx

from velox_core import Policy, Rows, hookimpl

__all__ = ["TOVA"]


@attrs.frozen(eq=False, kw_only=True)
class TOVA(Policy):
    """Keep the rows that the newest query attends to most.

    When a row must go, it is the one with the lowest attention weight of the last query, as the
    mean over the layer's query heads: one choice a layer. Nothing is remembered from one step to
    the next, so a row's rank may rise and fall freely.

    Paper: Oren, Hassid, Yarden, Adi, Schwartz, "Transformers are Multi-State RNNs",
    arXiv 2401.06104. Official code: github.com/schwartz-lab-NLP/TOVA.

    Args:
        budget: rows a layer keeps, or one number a layer. Default 512.
        n_sink: first tokens that always stay. Default 4.
        scope: ``"layer"`` (default, the paper's) or ``"head"``, a choice a KV head over its group
            of query heads.
        queries: ``"model"`` (default) or ``"keys"``, the incoming key in the query's place.
        positions: ``"absolute"`` (default, the official code's), ``"contiguous"`` or
            ``"compressed"``, which the paper has for texts beyond the trained context.

    Deviations from the paper and the official code:
        - ``n_sink`` is 4 by default; the paper has none (``n_sink=0``).
        - The newest row can't go (the official code could drop it, were its weight the lowest).
        - A prompt fed in blocks is cut after each block, by that block's last query; the official
          code reads the prompt in one piece and cuts it once.
        - ``scope="head"`` and ``queries="keys"`` are ours.
    """

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 1
    pure: ClassVar[bool] = True

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        return rows.pool(rows.received(last=1))
