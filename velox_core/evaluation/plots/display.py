"""What is known of how a kind of results is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]


@attrs.frozen(kw_only=True)
class Display:
    """How a kind's records are shown.

    Args:
        title: the kind's name for people.
        about: what was measured, in a sentence or two.
        settings: the fields in which all records of one table and one plot agree.
        table: gives such records' headings and rows, all text.
        plot: gives their picture.
    """

    title: str
    about: str
    settings: tuple[str, ...]
    table: Callable[[list[Record]], tuple[list[str], list[list[str]]]]
    plot: Callable[[list[Record]], Figure]

    def groups(self, records: Iterable[Record]) -> list[tuple[Record, list[Record]]]:
        """The records that belong together, in the order of their first, with their settings."""
        groups: dict[str, tuple[Record, list[Record]]] = {}
        for record in records:
            settings = {name: record.get(name) for name in self.settings}
            groups.setdefault(json.dumps(settings), (settings, []))[1].append(record)
        return list(groups.values())


def newest(records: Iterable[Record], *fields: str) -> dict[tuple[Any, ...], Record]:
    """The newest record with each combination of values of the fields, in the order in which the
    combinations came."""
    return {tuple(record.get(name) for name in fields): record for record in records}
