"""The evicting cache with quantised rows: mlx-lm's ``kv_bits`` and a budget together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from .batch import Batch
from .cache import VeloxCache
from .errors import VeloxError


class QuantizedVeloxCache(VeloxCache):
    """A ``VeloxCache`` whose keys and values are each a tuple of three arrays: packed numbers,
    scales and biases. Made by ``VeloxCache.to_quantized``. For one sequence, no batches."""

    group_size: int
    bits: int

    @classmethod
    def of(cls, cache: VeloxCache, group_size: int, bits: int) -> QuantizedVeloxCache:
        """``cache`` as it stands, with its rows quantised."""
        quantized = cls.__new__(cls)
        quantized.__dict__.update(cache.__dict__, group_size=group_size, bits=bits)
        if cache.keys is not None:
            quantized.keys = quantized._stored(cache.keys)
            quantized.values = quantized._stored(cache.values)
        return quantized

    def _stored(self, rows: mx.array) -> Any:
        if rows.shape[-1] % self.group_size:
            raise VeloxError(
                f"kv_bits: heads of {rows.shape[-1]} numbers can't be cut into groups of "
                f"{self.group_size}; set kv_group_size to a divisor that MLX has (32, 64, 128)."
            )
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))

    def _readable(self, rows: Any) -> mx.array:
        packed, scales, biases = rows
        return mx.dequantize(packed, scales, biases, self.group_size, self.bits)

    @property
    def kv_heads(self) -> int:
        return int(self.keys[0].shape[1])

    @property
    def head_dim(self) -> int:
        return int(self.keys[1].shape[3]) * self.group_size

    @property
    def value_dim(self) -> int:
        return int(self.values[1].shape[3]) * self.group_size

    @property
    def to_quantized(self) -> Any:
        # mlx-lm quantises whatever has this, after every step.
        raise AttributeError("to_quantized: this cache is quantised")

    @property
    def state(self) -> list[Any]:
        return [*super().state, self.group_size, self.bits]

    @state.setter
    def state(self, state: list[Any]) -> None:
        *rest, self.group_size, self.bits = state
        VeloxCache.state.fset(self, rest)  # type: ignore[attr-defined]
        if self.keys is not None:  # a file gives lists back
            self.keys, self.values = tuple(self.keys), tuple(self.values)

    @classmethod
    def merge(cls, caches: Sequence[Batch]) -> Batch:
        raise VeloxError("Quantised caches can't be batched, in mlx-lm as here.")


mlx_cache.QuantizedVeloxCache = QuantizedVeloxCache
