"""``velox policies``: what is installed."""

from __future__ import annotations

import json
import sys

import attrs
import click

from ..discovery import GROUP, PROTECTORS, installed_policies
from .output import console, table


@click.command()
@click.option("--protectors", is_flag=True, help="List protectors, which run beside a policy.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def policies(protectors: bool, as_json: bool) -> None:
    """List the installed policies. Nothing of them is imported; see `velox doctor` for that."""
    found = installed_policies(PROTECTORS if protectors else GROUP)
    if as_json:
        click.echo(json.dumps([attrs.asdict(policy) for policy in found], indent=2))
    elif found:
        headings = ("name", "distribution", "version", "origin", "status")
        rows = [[str(getattr(policy, heading)) for heading in headings] for policy in found]
        console().print(table(headings, rows, status="status"))
    else:
        click.echo(
            f"No policy is installed. To get one: {sys.executable} -m pip install velox-tova"
        )
