"""One page of all results: self-contained HTML, which asks no host for anything."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from ..errors import VeloxError
from .plots import DISPLAYS
from .plots.figure import inline_svg, need_matplotlib

TEMPLATE = Path(__file__).with_name("report.html.jinja")


@attrs.frozen
class Part:
    """A table and a plot of results that belong together.

    Args:
        settings: what they have in common, by name.
        headings: the table's.
        rows: likewise.
        svg: the plot, an SVG element.
    """

    settings: dict[str, str]
    headings: list[str]
    rows: list[list[str]]
    svg: str


def page(records: Iterable[dict[str, Any]]) -> str:
    """The HTML of a report, with a section a kind, in the order of ``DISPLAYS``.

    Args:
        records: of any kinds; where two are of the same run, the later one counts.

    Raises:
        VeloxError: there is no record, or matplotlib or jinja2 isn't installed.
    """
    need_matplotlib()
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError as error:
        raise VeloxError(
            f"reports need {error.name}, which isn't installed: pip install 'velox-kv[eval]'"
        ) from error
    from .. import __version__

    records = list(records)
    if not records:
        raise VeloxError("there are no results to report: measure some with `velox eval` first")
    sections = [
        (kind, display, [_part(kind, n, *group) for n, group in enumerate(groups, 1)])
        for kind, display in DISPLAYS.items()
        if (groups := display.groups(each for each in records if each["kind"] == kind))
    ]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        sections=sections,
        count=len(records),
        models=sorted({record["model"] for record in records}),
        versions=sorted({record["velox"] for record in records}),
        version=__version__,
    )


def _part(kind: str, n: int, settings: dict[str, Any], records: list[dict[str, Any]]) -> Part:
    display = DISPLAYS[kind]
    headings, rows = display.table(records)
    svg = inline_svg(display.plot(records), f"{kind}{n}")
    shown = {name: _shown(value) for name, value in settings.items() if value is not None}
    return Part({name.replace("_", " "): text for name, text in shown.items()}, headings, rows, svg)


def _shown(value: Any) -> str:
    """A setting for people: thousands apart, and a list of equals as one of them."""
    if isinstance(value, list):
        if len(value) > 1 and all(each == value[0] for each in value):
            return f"{_shown(value[0])} each"
        return ", ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
