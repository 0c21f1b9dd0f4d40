"""A hundred thousand decode steps: the memory stays flat, and a step takes as long as ever.

    python benchmarks/soak.py [--policy NAME] [--steps N] …

The model is a tiny Llama with random weights, so that most of what is measured is the cache. The
exit status is 1 where memory or time grew.
"""

from __future__ import annotations

import gc
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import click
import mlx.core as mx
from mlx_lm.models import llama
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import velox_core

PARTS = 10
#: How much more the last part may have than the first: bytes of MLX's arrays, bytes of the whole
#: process (Python's own allocator breathes), and the share of a step's time.
MORE_ACTIVE, MORE_RESIDENT, MORE_TIME = 64 << 10, 16 << 20, 0.25
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
}


@attrs.frozen
class Part:
    """A tenth of the steps."""

    steps: int
    milliseconds: float  # of a step, at its quicker ones: the machine may be busy with more
    active: int  # bytes of MLX's arrays at its end
    resident: int  # bytes of the process at its end


def soak(policy: velox_core.Policy, steps: int, console: Console) -> list[Part]:
    """Decode greedily, and measure each tenth."""
    mx.random.seed(0)
    mx.disable_compile()  # on a CPU it calls the C++ compiler, for functions as small as these
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    mx.eval(model.parameters())
    cache = velox_core.make_cache(model, policy)
    token = decode(model, mx.ones((1, cache[0].budget + 64), mx.int32), cache)  # evicts already
    for _ in range(64):
        token = decode(model, token, cache)
    parts, columns = [], (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task("decoding", total=steps)
        for part in range(PARTS):
            times = []
            for step in range(part * steps // PARTS, (part + 1) * steps // PARTS):
                start = time.perf_counter()
                token = decode(model, token, cache)
                times.append(time.perf_counter() - start)
                if step % 256 == 0:  # as mlx-lm does
                    mx.clear_cache()
                    progress.update(task, completed=step)
            gc.collect()
            mx.clear_cache()
            quick = statistics.quantiles(times, n=10)[0] * 1000
            parts.append(Part(len(times), quick, mx.get_active_memory(), resident()))
            progress.update(task, completed=(part + 1) * steps // PARTS)
    for layer in cache:
        assert layer.offset == layer.budget + 64 + 64 + steps
        assert layer.size() == layer.budget
    return parts


def decode(model: Any, token: mx.array, cache: list[Any]) -> mx.array:
    token = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
    mx.eval(token)
    return token


def resident() -> int:
    """Bytes of the process in memory: now on Linux, at most so far elsewhere."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def table(parts: list[Part], title: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD)
    for column in ("steps", "ms a step", "MLX, KiB", "process, MiB"):
        table.add_column(column, justify="right")
    total = 0
    for part in parts:
        total += part.steps
        table.add_row(
            f"{total:,}",
            f"{part.milliseconds:.3f}",
            f"{part.active / 2**10:,.1f}",
            f"{part.resident / 2**20:,.1f}",
        )
    return table


def grown(first: Part, last: Part) -> list[str]:
    """What grew from the first part to the last."""
    found = []
    if last.active > first.active + MORE_ACTIVE:
        found.append(f"MLX's arrays by {(last.active - first.active) / 2**10:,.1f} KiB")
    if last.resident > first.resident + MORE_RESIDENT:
        found.append(f"the process by {(last.resident - first.resident) / 2**20:,.1f} MiB")
    if last.milliseconds > first.milliseconds * (1 + MORE_TIME):
        found.append(f"a step's time by {last.milliseconds / first.milliseconds - 1:.0%}")
    return found


@click.command(help=__doc__.splitlines()[0])
@click.option("--policy", default="tova", show_default=True, help="Name of an installed policy.")
@click.option("--steps", default=100_000, show_default=True, type=click.IntRange(20 * PARTS))
@click.option("--budget", default=128, show_default=True, help="Rows a layer keeps.")
def main(policy: str, steps: int, budget: int) -> None:
    console = Console()
    try:
        chosen = velox_core.load_policy(policy, budget=budget)
        parts = soak(chosen, steps, console)
    except velox_core.VeloxError as error:
        raise click.ClickException(str(error)) from error
    console.print(table(parts, f"{policy}, {budget} rows a layer, {mx.default_device()}"))
    found = grown(parts[0], parts[-1])
    if found:
        sys.exit(f"From the first tenth to the last grew {', '.join(found)}.")
    console.print("Flat: neither memory nor time grew from the first tenth to the last.")


if __name__ == "__main__":
    main()
