"""StreamingLLM for velox."""

from __future__ import annotations

from typing import ClassVar

import attrs
import mlx.core as mx

from velox_core import Policy, Rows, hookimpl

__all__ = ["StreamingLLM"]


@attrs.frozen(eq=False, kw_only=True)
class StreamingLLM(Policy):
    """Keep the first rows and the most recent ones.

    Models leave their spare attention on the first tokens, and a window without those breaks down.
    With them it holds for as long as one likes, but all that is in between is forgotten. Nothing
    is scored but age, so no queries are needed and any model will do.

    Paper: Xiao, Tian, Chen, Han, Lewis, "Efficient Streaming Language Models with Attention
    Sinks", arXiv 2309.17453. Official code: github.com/mit-han-lab/streaming-llm.

    Args:
        budget: rows a layer keeps, or one number a layer. Default 512; the official code's is
            ``start_size + recent_size``.
        n_sink: first tokens that always stay. Default 4, as in the paper; 0 is a plain window.
        scope: ``"layer"`` or ``"head"``: the rows are the same.
        queries: of no effect.
        positions: ``"absolute"`` (default), ``"contiguous"`` (the paper's) or ``"compressed"``.

    Deviations from the paper and the official code:
        - Positions stay the tokens' own by default. The official code keeps keys unrotated and
          numbers rows by their place in the cache: ``positions="contiguous"``.
        - Rows go after a block was attended to, not before it comes: the block sees all rows that
          were held, besides itself.
    """

    hook_version: ClassVar[int] = 1
    pure: ClassVar[bool] = True

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        # By age: positions themselves aren't exact in float32 above 2**24.
        return (rows.positions - rows.newest).astype(mx.float32)
