"""Arrays of rows: how a block is appended, one row overwritten, and the kept rows gathered.

Row arrays are ``[batch, heads, capacity, …]``; a cache uses the first rows of the capacity.
"""

from __future__ import annotations

import mlx.core as mx

STEP = 256  # rows that an array grows by, as in mlx-lm's KVCache


def write(array: mx.array | None, block: mx.array, start: int, limit: int) -> mx.array:
    """``array`` with ``block`` at rows ``start`` and on, grown where needed; to ``limit`` rows at
    the most, unless the block itself reaches beyond."""
    n = block.shape[2]
    end = start + n
    if array is None or end > array.shape[2]:
        capacity = start + (STEP + n - 1) // STEP * STEP
        capacity = max(end, min(capacity, limit))
        kept = [] if array is None else [array[:, :, :start]]
        shape = (*block.shape[:2], capacity - start, *block.shape[3:])
        array = mx.concatenate([*kept, mx.zeros(shape, block.dtype)], axis=2)
    array[:, :, start:end] = block
    return array


def put(array: mx.array, row: mx.array, slot: mx.array) -> mx.array:
    """``array`` with one row overwritten, in place where MLX can.

    Args:
        row: ``[batch, heads, 1, …]``
        slot: ``[batch, heads or 1, 1]``, the row's index.
    """
    if slot.size == 1:
        return mx.slice_update(array, row, slot.reshape(1), axes=(2,))
    slot = slot.reshape(*slot.shape, *[1] * (row.ndim - 3))
    return mx.put_along_axis(array, mx.broadcast_to(slot, row.shape), row, axis=2)


def take(array: mx.array, keep: mx.array) -> mx.array:
    """The rows ``keep``, ``[batch, heads or 1, kept]``, in that order."""
    if array.ndim == 3:
        return mx.take_along_axis(array, keep, axis=2)
    batch, heads, capacity = array.shape[:3]
    first = mx.arange(batch * heads).reshape(batch, heads, 1) * capacity
    # Whole rows at a time: take_along_axis would gather number by number.
    return mx.take(array.reshape(-1, array.shape[3]), keep + first, axis=0)


def pad_left(array: mx.array, size: int, axis: int, fill: int) -> mx.array:
    """``array`` with ``fill`` put before it, so that ``axis`` has ``size``."""
    missing = size - array.shape[axis]
    if not missing:
        return array
    widths = [(missing, 0) if i == axis else (0, 0) for i in range(array.ndim)]
    return mx.pad(array, widths, constant_values=fill)
