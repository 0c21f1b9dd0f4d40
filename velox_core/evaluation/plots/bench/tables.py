"""A table for each measure of ``velox bench``."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from ...bench.rounds import speed_ratio
from ..display import Record

Table = tuple[list[str], list[list[str]]]
FULL = "KVCache"


def speed(record: Record) -> Table:
    full, rotating = record["cases"][:2]
    rows = [
        [
            case["cache"],
            f"{record['prompt'] / median(case['prompt_seconds']):,.0f}",
            times(speed_ratio(case["prompt_seconds"], full["prompt_seconds"])),
            f"{1 / median(case['seconds']):,.1f}",
            times(speed_ratio(case["seconds"], full["seconds"])),
            times(speed_ratio(case["seconds"], rotating["seconds"])),
            megabytes(case["peak_bytes"]),
            megabytes(case["bytes"]),
        ]
        for case in record["cases"]
    ]
    beside = f"beside {FULL}"
    headings = ["cache", "prompt, tokens/s", beside, "decode, tokens/s", beside]
    return [*headings, "beside RotatingKVCache", "prompt's peak", "cache"], rows


def context(record: Record) -> Table:
    full = [case for case in record["cases"] if case["cache"] == FULL and case["rows"] > 1]
    rows = [
        [
            "none (one row)" if case["rows"] == 1 else case["cache"],
            f"{case['rows']:,}",
            f"{1e3 * median(case['seconds']):.2f}",
            f"{1 / median(case['seconds']):,.1f}",
            *(times(speed_ratio(case["seconds"], each["seconds"])) for each in full),
        ]
        for case in record["cases"]
    ]
    beside = [f"beside {FULL}, {case['rows']:,}" for case in full]
    return ["cache", "rows", "ms a step", "tokens/s", *beside], rows


def batch(record: Record) -> Table:
    full = record["cases"][0]
    rows = [
        [
            case["cache"],
            f"{case['batch']:,}",
            f"{case['rows']:,}",
            f"{1e3 * median(case['seconds']):.1f}",
            f"{case['batch'] / median(case['seconds']):,.1f}",
            times(throughput_ratio(case, full)),
        ]
        for case in record["cases"]
    ]
    return ["cache", "sequences", "rows each", "ms a step", "tokens/s", f"beside {FULL}"], rows


def hooks(record: Record) -> Table:
    rows = []
    for case in record["cases"]:
        called, direct = median(case["hook_seconds"]), median(case["direct_seconds"])
        whole, pluggy = hook_shares(case)
        step = f"{1e3 * median(case['seconds']):.2f}"
        spent = [f"{1e3 * called:.3f}", f"{whole:.2%}", f"{1e3 * (called - direct):.3f}"]
        rows.append([case["cache"], step, str(case["calls"]), *spent, f"{pluggy:.2%}"])
    headings = ["policy", "ms a step", "hook calls", "in hooks, ms", "share"]
    return [*headings, "of it pluggy, ms", "share"], rows


def imports(record: Record) -> Table:
    (case,) = record["cases"]
    beyond = median(case["policies"]) - median(case["entry_points"])
    parts = {
        "import velox_core, with all that it needs": median(case["import"]),
        "velox_core's own part": median(case["own"]),
        "installed_policies()": median(case["policies"]),
        f"entry_points() of {case['distributions']} distributions": median(case["entry_points"]),
        "listing policies, beyond that": beyond,
    }
    return ["what", "ms"], [[what, f"{1e3 * spent:.1f}"] for what, spent in parts.items()]


def throughput_ratio(case: Record, reference: Record) -> float:
    """How many times the reference's tokens a second, over all sequences."""
    more = case["batch"] / reference["batch"]
    return float(more * speed_ratio(case["seconds"], reference["seconds"]))


def hook_shares(case: Record) -> tuple[float, float]:
    """The shares of a step that hook calls take, and pluggy of them: medians of the rounds'."""
    rounds = zip(case["seconds"], case["hook_seconds"], case["direct_seconds"], strict=True)
    shares = [(called / step, (called - direct) / step) for step, called, direct in rounds]
    return median(whole for whole, _ in shares), median(pluggy for _, pluggy in shares)


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def megabytes(n: int) -> str:
    return f"{n / 1e6:,.1f} MB"


TABLES: dict[str, Callable[[Record], Table]] = {
    "speed": speed,
    "context": context,
    "batch": batch,
    "hooks": hooks,
    "import": imports,
}
