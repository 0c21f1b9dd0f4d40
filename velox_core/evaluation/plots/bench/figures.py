"""A plot for each measure of ``velox bench``."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from ..display import Record
from ..figure import INK
from .tables import FULL, hook_shares


def speed(record: Record, axes: Any) -> None:
    cases = record["cases"][::-1]
    bars(axes, [case["cache"] for case in cases], [1 / median(case["seconds"]) for case in cases])
    axes.set(xlabel=f"decode, tokens/s, with {record['budget']:,} rows each")


def context(record: Record, axes: Any) -> None:
    """The full cache over its rows; the others, which have no more with time, as level lines."""
    full = [case for case in record["cases"] if case["cache"] == FULL and case["rows"] > 1]
    lengths = [case["rows"] for case in full]
    speeds = [1 / median(case["seconds"]) for case in full]
    axes.plot(lengths, speeds, marker="o", markersize=4, color=INK, label=FULL)
    for case in record["cases"]:
        speed = 1 / median(case["seconds"])
        if case["cache"] != FULL:
            axes.plot(lengths, [speed] * len(lengths), label=case["cache"])
        elif case["rows"] == 1:
            axes.axhline(speed, color=INK, linestyle=":", label="one row: the model's own work")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="tokens so far", ylabel="decode, tokens/s")
    legend_beside(axes)


def batch(record: Record, axes: Any) -> None:
    cases = record["cases"][::-1]
    labels = [f"{case['cache']}, {case['batch']:,} of {case['rows']:,} rows" for case in cases]
    bars(axes, labels, [case["batch"] / median(case["seconds"]) for case in cases])
    axes.set(xlabel="decode, tokens/s over all sequences")


def hooks(record: Record, axes: Any) -> None:
    cases = record["cases"][::-1]
    names = [case["cache"] for case in cases]
    shares = [hook_shares(case) for case in cases]
    bars(axes, names, [100 * whole for whole, _ in shares], label="hook calls")
    axes.barh(names, [100 * pluggy for _, pluggy in shares], label="of it pluggy")
    axes.set(xlabel="share of a decode step, per cent")
    legend_beside(axes)


def imports(record: Record, axes: Any) -> None:
    (case,) = record["cases"]
    parts = {"entry_points()": "entry_points", "installed_policies()": "policies"}
    parts |= {"velox_core's own import": "own"}
    bars(axes, list(parts), [1e3 * median(case[name]) for name in parts.values()])
    axes.set(xlabel="ms")


def bars(axes: Any, labels: list[str], values: list[float], **kwargs: Any) -> None:
    axes.barh(labels, values, **kwargs)
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)


def legend_beside(axes: Any) -> None:
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


FIGURES: dict[str, Callable[[Record, Any], None]] = {
    "speed": speed,
    "context": context,
    "batch": batch,
    "hooks": hooks,
    "import": imports,
}
