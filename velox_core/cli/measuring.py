"""What the commands that measure have in common: options, a bar, and how results are shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click

from ..evaluation.results import Results
from .output import console, table


class Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between, each of at least ``minimum`` and at most ``maximum``."""

    name = "numbers"

    def __init__(self, minimum: int = 1, maximum: int | None = None) -> None:
        self.minimum, self.maximum = minimum, maximum

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        one = click.IntRange(self.minimum, self.maximum)
        numbers = [one(piece.strip(), param, context) for piece in str(value).split(",")]
        return tuple(dict.fromkeys(numbers))


policies_option = click.option(
    "--policies",
    default="all",
    show_default=True,
    metavar="NAMES",
    help="Policies with commas between, each with options if you like: "
    "tova,morphkv:window=8,scope=layer. Or all that are installed.",
)
text_option = click.option(
    "--text",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A UTF-8 file.",
)


def budgets_option(default: str) -> Callable[[Any], Any]:
    """``--budgets``."""
    return click.option(
        "--budgets",
        type=Numbers(),
        default=default,
        show_default=True,
        help="Rows that each layer keeps.",
    )


def number_option(flag: str, default: int, text: str, minimum: int = 1) -> Callable[[Any], Any]:
    """An option for a whole number of at least ``minimum``."""
    kind = click.IntRange(minimum)
    return click.option(flag, type=kind, default=default, show_default=True, help=text)


def budget_option(default: int) -> Callable[[Any], Any]:
    """``--budget``."""
    return number_option("--budget", default, "Rows that each layer keeps.")


def tokens_option(default: int) -> Callable[[Any], Any]:
    """``--tokens``."""
    return number_option("--tokens", default, "Tokens to read.", minimum=2)


block_option = number_option("--block", 64, "Tokens fed at a time.")


def output_options(command: Any) -> Any:
    """``--out``, ``--plot`` and ``--json``."""
    file = click.Path(dir_okay=False, path_type=Path)
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
        click.option(
            "--plot",
            type=file,
            help="Where to draw: .svg, .png or .pdf  [default: an .svg beside the results]",
        ),
        click.option(
            "--out",
            type=file,
            default=Path("velox-results.jsonl"),
            show_default=True,
            help="The file of results, to which new ones are added and whose own aren't repeated.",
        ),
    ):
        command = option(command)
    return command


def open_results(out: Path, plot: Path | None, kind: str) -> tuple[Results, Path]:
    """The file of results, and the plot's path: whatever is wrong with them shows here, before
    anything is measured."""
    from ..evaluation.plots.figure import check_plot

    return Results(out), check_plot(plot or out.with_suffix(f".{kind}.svg"))


@contextmanager
def bar(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar with the time left, on stderr if that is a terminal. What it gives takes what is being
    done, and how much more of it was. Where Ctrl-C ends it, it says how to go on."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    terminal = console(stderr=True)
    with Progress(
        *columns, console=terminal, transient=True, disable=not terminal.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)
        try:
            yield lambda what, done: progress.update(task, advance=done, description=what)
        except KeyboardInterrupt:
            progress.stop()
            click.echo("Stopped. The same command goes on where it was.", err=True)
            raise


@attrs.frozen
class Unit:
    """One record to be.

    Args:
        what: what the bar calls it.
        cost: of all that the bar counts, how much it is.
        key: what the record is found again by.
        measure: gives the rest of the record; it takes what is told of each step forward.
    """

    what: str
    cost: int
    key: dict[str, Any]
    measure: Callable[[Callable[[int], None]], dict[str, Any]]


def measured(results: Results, units: list[Unit]) -> list[dict[str, Any]]:
    """The units' records, after those that weren't there have been measured. Where there is no
    terminal for a bar, each is reported as it is done."""
    missing = [unit for unit in units if results.find(**unit.key) is None]
    if len(missing) < len(units):
        there = f"{len(units) - len(missing)} of {len(units)} results"
        click.echo(f"{there} are in {results.path} already.", err=True)
    with bar(sum(unit.cost for unit in missing)) as advance:
        for number, unit in enumerate(missing, 1):
            results.append({**unit.key, **unit.measure(partial(advance, unit.what))})
            if not sys.stderr.isatty():
                click.echo(f"{number} of {len(missing)}: {unit.what}", err=True)
    return [record for unit in units if (record := results.find(**unit.key))]


def show(records: list[dict[str, Any]], results: Results, plot: Path, as_json: bool) -> None:
    """Print the records as a table, or as JSON, and draw them. They are of one kind."""
    from ..evaluation.plots import DISPLAYS
    from ..evaluation.plots.figure import save

    display = DISPLAYS[records[0]["kind"]]
    if as_json:
        click.echo(json.dumps(records, indent=2, ensure_ascii=False))
    else:
        console().print(table(*display.table(records)))
    save(display.plot(records), plot)
    click.echo(f"Results: {results.path}. Plot: {plot}.", err=True)
