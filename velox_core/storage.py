"""Arrays of rows: how a block is appended, one row overwritten, and the kept rows gathered.

Row arrays are ``[batch, heads, capacity, …]``; a cache uses the first rows of the capacity. Where
it holds quantised rows, a tuple of three such arrays stands in one's place.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

STEP = 256  # rows that an array grows by, as in mlx-lm's KVCache

Rows = Any  # an mx.array, or a tuple of them


def arrays(*rows: Rows) -> list[mx.array]:
    """All arrays in these, tuples opened and ``None`` left out."""
    return [
        array
        for each in rows
        if each is not None
        for array in (each if isinstance(each, tuple) else (each,))
    ]


def write(rows: Rows, block: Rows, start: int, limit: int) -> Rows:
    """``rows`` with ``block`` at row ``start`` and on, grown where needed; to ``limit`` rows at
    the most, unless the block itself reaches beyond."""
    if isinstance(block, tuple):
        pairs = zip(rows or (None,) * len(block), block, strict=True)
        return tuple(write(array, part, start, limit) for array, part in pairs)
    n = block.shape[2]
    end = start + n
    if rows is None or end > rows.shape[2]:
        capacity = start + (STEP + n - 1) // STEP * STEP
        capacity = max(end, min(capacity, limit))
        kept = [] if rows is None else [rows[:, :, :start]]
        shape = (*block.shape[:2], capacity - start, *block.shape[3:])
        rows = mx.concatenate([*kept, mx.zeros(shape, block.dtype)], axis=2)
    rows[:, :, start:end] = block
    return rows


def like(per_row: mx.array, rows: mx.array) -> mx.array:
    """An index or a mask, ``[batch, heads or 1, rows or 1]``, with as many axes as ``rows``."""
    return per_row.reshape(*per_row.shape, *[1] * (rows.ndim - 3))


def put(rows: Rows, row: Rows, slot: mx.array) -> Rows:
    """``rows`` with one row overwritten, in place where MLX can.

    Args:
        row: ``[batch, heads, 1, …]``
        slot: ``[batch, heads or 1, 1]``, the row's index.
    """
    if isinstance(row, tuple):
        return tuple(put(array, part, slot) for array, part in zip(rows, row, strict=True))
    if slot.size == 1:
        return mx.slice_update(rows, row, slot.reshape(1), axes=(2,))
    return mx.put_along_axis(rows, mx.broadcast_to(like(slot, row), row.shape), row, axis=2)


def tie(keys: Rows, values: Rows, beside: list[Any]) -> tuple[Rows, Rows]:
    """Keys and values with which ``beside`` is evaluated, needed or not: a graph that nobody
    evaluates would grow with every token."""
    tied = mx.depends(arrays(keys, values), arrays(*beside))
    half = len(tied) // 2  # one array each, or three where they are quantised
    return (tied[0], tied[1]) if half == 1 else (tuple(tied[:half]), tuple(tied[half:]))


def _put_both(
    rows: tuple[Rows, Rows], row: tuple[Rows, Rows], slot: mx.array, beside: list[Any]
) -> tuple[Rows, Rows]:
    keys, values = (put(*pair, slot) for pair in zip(rows, row, strict=True))
    return tie(keys, values, beside) if beside else (keys, values)


#: ``put`` for keys and values, ``beside`` tied to them. It is the same work at each decode step,
#: so it is recorded once: Python's time is dear there.
put_both = mx.compile(_put_both)


# What is the same in all layers of a step is made once for all of them, of numbers and not by an
# operation: that would be bound to the thread which comes first.


@lru_cache(maxsize=16)
def numbers(rows: int) -> mx.array:
    """The rows' indices, ``[rows]`` uint32."""
    return mx.array(list(range(rows)), dtype=mx.uint32)


@lru_cache(maxsize=16)
def column(positions: tuple[int, ...], axes: int) -> mx.array:
    """One position a sequence, ``[sequences, 1]`` or ``[sequences, 1, 1]`` int32."""
    return mx.array([[x] if axes == 2 else [[x]] for x in positions], dtype=mx.int32)


def take(rows: Rows, keep: mx.array) -> Rows:
    """The rows ``keep``, ``[batch, heads or 1, kept]``, in that order."""
    if isinstance(rows, tuple):
        return tuple(take(array, keep) for array in rows)
    if rows.ndim == 3:
        return mx.take_along_axis(rows, keep, axis=2)
    batch, heads, capacity = rows.shape[:3]
    start = mx.arange(batch * heads).reshape(batch, heads, 1) * capacity
    # Whole rows at a time: take_along_axis would gather number by number.
    return mx.take(rows.reshape(-1, rows.shape[3]), keep + start, axis=0)


def first(rows: Rows, n: int) -> Rows:
    """The first ``n`` rows, as arrays of their own: ``x += 1`` doesn't change what is held."""
    if rows is None:
        return None
    if isinstance(rows, tuple):
        return tuple(first(array, n) for array in rows)
    return rows[...] if n == rows.shape[2] else rows[:, :, :n]


def select(rows: Rows, sequences: mx.array) -> Rows:
    """The rows of these sequences."""
    if isinstance(rows, tuple):
        return tuple(array[sequences] for array in rows)
    return rows[sequences]


def pad_left(array: mx.array, size: int, axis: int, fill: int) -> mx.array:
    """``array`` with ``fill`` put before it, so that ``axis`` has ``size``."""
    missing = size - array.shape[axis]
    if not missing:
        return array
    widths = [(missing, 0) if i == axis else (0, 0) for i in range(array.ndim)]
    return mx.pad(array, widths, constant_values=fill)
