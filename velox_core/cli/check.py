"""``velox check``: the conformance suite on an installed policy."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap

import attrs
import click

from .loading import parse_options
from .options import option_values
from .output import console, table


@click.command()
@click.argument("name")
@option_values
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the made-up texts.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
@click.pass_context
def check(
    context: click.Context, name: str, options: tuple[str, ...], seed: int, as_json: bool
) -> None:
    """Check that the installed policy NAME does what velox expects of one.

    Its hooks see small made-up keys, values and queries, so no model is needed. The budget is the
    suite's own. The exit code is 1 if a check fails.
    """
    from ..registry import load_policy

    given = parse_options(options, None)
    # A plugin that prints doesn't spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        policy = load_policy(name, **given)
        from ..testing import check_policy

        results = check_policy(policy if given else name, seed=seed)
    failed = [result for result in results if not result.ok]
    if as_json:
        click.echo(json.dumps([attrs.asdict(result) for result in results], indent=2))
    else:
        rows = [[result.name, result.outcome, result.got] for result in results]
        console().print(table(("check", "outcome", "what came"), rows, status="outcome"))
        for result in failed:
            if result.outcome == "failed":
                click.echo(f"\n{result.name}\n  expected: {result.expected}\n  got: {result.got}")
                click.echo("  to repeat it:\n" + textwrap.indent(result.repeat, " " * 4))
    if failed:
        context.exit(1)
