"""``velox eval``: what a policy costs, measured. One file a subcommand."""

from __future__ import annotations

import click

from .passkey import passkey
from .perplexity import perplexity
from .positions import positions
from .retention import retention


@click.group("eval", invoke_without_command=True)
@click.pass_context
def evaluate(context: click.Context) -> None:
    """Measure what each policy loses beside the full cache.

    Results are appended to a file as they come, so a run that was stopped goes on where it was.
    `velox report` makes a page of them.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (perplexity, passkey, retention, positions):
    evaluate.add_command(command)
