"""``velox report``: a page of results."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..evaluation.results import Results


@click.command()
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="RESULTS.jsonl…",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="Where to write the page.",
)
def report(files: tuple[Path, ...], out: Path) -> None:
    """Make a page of what `velox eval` and `velox bench` measured: tables and plots.

    It is a single HTML file, which needs nothing beside it and no network.
    """
    from ..evaluation.report import page

    if not out.parent.is_dir():
        raise click.UsageError(f"no folder {out.parent} for the page: make it, or name another")
    html = page(record for file in files for record in Results(file).records())
    partial = out.with_name(f".{os.getpid()}{out.name}")
    try:
        partial.write_text(html, encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        raise click.ClickException(f"can't write {out}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    click.echo(out)
