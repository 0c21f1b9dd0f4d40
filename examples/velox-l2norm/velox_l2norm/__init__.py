"""Eviction by the L2 norm of the keys, for velox."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import mlx.core as mx
from velox_core import Policy, PolicyConfigError, Rows, hookimpl, one_of

__all__ = ["L2Norm"]


def _layers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple | range) or not all(
        type(layer) is int and layer >= 0 for layer in value
    ):
        raise PolicyConfigError(
            f"L2Norm: skip_layers={value!r} isn't allowed; it must be a list of layer numbers, "
            "each at least 0, as [0, 1]."
        )
    return tuple(sorted(set(value)))


@attrs.frozen(eq=False, kw_only=True)
class L2Norm(Policy):
    """Keep the rows whose keys are shortest.

    Paper: Devoto, Zhao, Scardapane, Minervini, "A Simple and Effective L2 Norm-Based Strategy for
    KV Cache Compression" (EMNLP 2024, arXiv 2406.11430). Official code:
    https://github.com/alessiodevoto/l2compress. Keys of low norm are those that get much attention
    later, whatever the query, so no query is needed. With k_h a row's key in KV head h::

        score(row) = -‖k_h(row)‖₂           in each KV head h for itself (scope "head")
        score(row) = -mean over h ‖k_h(row)‖₂       for all of them at once (scope "layer")
        stay: the first n_sink, the newest row, and of the others the highest scores

    RoPE turns a key and doesn't change its length, so a row's score is the same for ever.

    Where it differs from the official code:

    - A fixed ``budget`` of rows. The code keeps a share of them, ``keep_ratio``, once there are
      ``prune_after``.
    - In ``skip_layers`` the code evicts nothing, which no fixed budget allows. Here the newest rows
      stay in these layers, because norms say little there. To have them whole, as the code does,
      give a budget a layer, for instance ``budget=[100_000] * 2 + [512] * 28`` for 30 layers.
    - ``skip_layers`` is ``(0, 1)``, as in the code's README. Its function has none by default.
    - The first ``n_sink`` rows stay (4; the code has 0), and the newest row, as velox wants it.
    - ``scope="layer"`` isn't in the code, which always chooses a head.
    - Norms are computed in float32. The code takes the type of the keys. Of equal norms the older
      row goes; the code leaves that to the sort.

    Args:
        skip_layers: numbers of the layers where norms don't count and the newest rows stay.
            Default ``(0, 1)``.
        budget: rows that each layer keeps, or one number a layer. Default 512.
        n_sink: first rows that always stay. Default 4.
        scope: ``"head"`` (default), one choice a KV head, or ``"layer"``, one for all heads.
        queries: of no effect, as no query is needed.
    """

    # The version of velox's hooks that this was written for.
    hook_version: ClassVar[int] = 1
    pure: ClassVar[bool] = True

    skip_layers: tuple[int, ...] = attrs.field(default=(0, 1), converter=_layers)
    scope: Literal["layer", "head"] = attrs.field(default="head", validator=one_of("layer", "head"))

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        """Minus the key's norm, or in skipped layers the position: the lowest ones go."""
        if rows.layer in self.skip_layers:
            return rows.positions.astype(mx.float32)
        # In float32: squares of large float16 numbers overflow.
        norms = mx.linalg.norm(rows.keys.astype(mx.float32), axis=-1)
        if rows.scope == "layer":
            norms = norms.mean(axis=1, keepdims=True)
        return -norms
