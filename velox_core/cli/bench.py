"""``velox bench``: how fast each cache is."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from .loading import load_model
from .measuring import (
    Numbers,
    Unit,
    budget_option,
    measured,
    number_option,
    open_results,
    output_options,
    policies_option,
)
from .options import model_option
from .output import console, table

MEASURES = ("speed", "context", "batch", "hooks", "import")


class Measures(click.ParamType[tuple[str, ...]]):
    """Some of ``MEASURES``, with commas between."""

    name = "measures"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[str, ...]:
        one = click.Choice(MEASURES)
        return tuple(one(piece.strip(), param, context) for piece in str(value).split(","))


@click.command()
@model_option
@policies_option
@budget_option(512)
@click.option(
    "--measures",
    type=Measures(),
    default=",".join(MEASURES),
    show_default=True,
    help="What to measure.",
)
@number_option("--prompt", 4096, "Tokens of the prompt that 'speed' reads.")
@click.option(
    "--contexts",
    type=Numbers(),
    default="1024,4096,8192",
    show_default=True,
    help="Rows of the full caches of 'context'.",
)
@number_option("--long", 4096, "Rows of each full cache of 'batch'.")
@click.option(
    "--batches",
    type=Numbers(),
    default="1,4",
    show_default=True,
    help="How many such caches; the others get as many sequences as fit in the same rows.",
)
@number_option("--block", 512, "Tokens of a prompt that are read at once.")
@number_option("--rounds", 15, "How often each cache is timed, in turn with the others.")
@number_option("--steps", 16, "Tokens that each decodes in a round.")
@output_options
def bench(
    model: str,
    policies: str,
    budget: int,
    measures: tuple[str, ...],
    prompt: int,
    contexts: tuple[int, ...],
    long: int,
    batches: tuple[int, ...],
    block: int,
    rounds: int,
    steps: int,
    out: Path,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Time each policy's cache beside mlx-lm's, in the same rounds.

    speed: reading a prompt, decoding with equally many rows, memory. context: decoding beside a
    full cache that grows. batch: decoding as many sequences as fit in the same memory. hooks: what
    calling a policy's hooks costs. import: what importing velox and listing policies costs.

    Tokens are made up. Leave the machine alone meanwhile.
    """
    from ..evaluation.bench import units
    from ..evaluation.bench.plan import Plan
    from ..evaluation.plots import DISPLAYS
    from ..evaluation.plots.figure import save
    from ..evaluation.policies import code_of, parse_policies

    specs = parse_policies(policies)
    code = [code_of(spec.load(budget)) for spec in specs]
    plan = Plan(policies=specs, budget=budget, rounds=rounds, steps=steps, block=block)
    results, plot = open_results(out, plot, "bench")
    network = functools.cache(lambda: load_model(model)[0])  # only if there is something to time

    def time(unit: Any, told: Callable[[int], None]) -> dict[str, Any]:
        return {"cases": unit.measure(network(), partial(told, 1))}

    timings = [
        Unit(
            what=unit.settings["measure"],
            cost=unit.work,
            key={"kind": "bench", "model": model, "code": code, **unit.settings},
            measure=partial(time, unit),
        )
        for unit in units(measures, plan, prompt, contexts, long, batches)
    ]
    records = measured(results, timings)
    display = DISPLAYS["bench"]
    if as_json:
        click.echo(json.dumps(records, indent=2, ensure_ascii=False))
    else:
        for record in records:
            times = "1 round" if record["rounds"] == 1 else f"{record['rounds']} rounds"
            click.echo(f"\n{record['measure']}, {times}, {record['device']}")
            console().print(table(*display.table([record])))
    save(display.plot(records), plot)
    click.echo(f"Results: {results.path}. Plot: {plot}.", err=True)
