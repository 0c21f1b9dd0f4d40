"""How the commands write their tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

#: The colour of each state that a table may show; anything else is a fault.
COLOURS = {
    "ok": "green",
    "passed": "green",
    "disabled": "yellow",
    "skipped": "yellow",
    "warning": "yellow",
}


def console(stderr: bool = False) -> Console:
    """A console on stdout (or stderr). Into a pipe it writes lines as long as they come."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = 1000
    return made


def table(
    headings: Iterable[str], rows: Iterable[Iterable[str]], status: str | None = None
) -> Table:
    """A table of plain text; the column headed ``status`` is coloured."""
    headings = list(headings)
    made = Table()
    for heading in headings:
        made.add_column(heading, overflow="fold")
    for row in rows:
        made.add_row(
            *(
                # Text, and not a string: brackets in it aren't rich's markup.
                Text(cell, COLOURS.get(cell, "red") if heading == status else "")
                for heading, cell in zip(headings, row, strict=True)
            )
        )
    return made
