"""Perplexity along a long text, by the way in which rows are numbered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies import unplaced
from .display import Display, Record
from .figure import COLOURS, INK, figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("afresh", "absolute", "contiguous", "compressed")


def _named(records: list[Record]) -> dict[str, dict[str, Record]]:
    """The newest readings by policy, each by its scheme or ``"afresh"``, and its max_age if any."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        options = record["options"]
        name = "afresh" if record["start"] == "afresh" else options["positions"]
        if options.get("max_age") is not None:
            name += f", max_age={options['max_age']}"
        found.setdefault(unplaced(record["policy"]), {})[name] = record
    return found


def _columns(found: dict[str, dict[str, Record]]) -> list[str]:
    """The names of what there is, the usual ones first."""
    names = dict.fromkeys(name for readings in found.values() for name in readings)
    return [name for name in COLUMNS if name in names] + [n for n in names if n not in COLUMNS]


def table(records: list[Record]) -> tuple[list[str], list[list[str]]]:
    """A row a stretch and policy; in brackets what a scheme is above starting afresh. Then, a row
    a policy, bytes held and time a token in the last stretch beside the second one's."""
    rows, found = [], _named(records)
    names = _columns(found)
    for policy, readings in found.items():
        any_one = next(iter(readings.values()))
        stretch = any_one["stretch"]
        afresh = next((readings[name] for name in readings if name.startswith("afresh")), None)
        for number in range(len(any_one["perplexity"])):
            cells = []
            base: float | None = afresh["perplexity"][number] if afresh else None
            for name in names:
                value = readings[name]["perplexity"][number] if name in readings else None
                cells.append(_cell(value, None if name.startswith("afresh") else base))
            rows.append([policy, f"{number * stretch:,}", *cells])
        for title, field in (("bytes, last : second", "bytes"), ("time, last : second", "seconds")):
            cells = [
                f"{readings[name][field][-1] / readings[name][field][1]:.2f}"
                if name in readings
                else ""
                for name in names
            ]
            rows.append([policy, title, *cells])
    return ["policy", "from token", *names], rows


def _cell(value: float | None, base: float | None) -> str:
    """A perplexity, and in brackets what it is above another."""
    if value is None:
        return ""
    return f"{value:.2f}" if base is None else f"{value:.2f} ({value - base:+.2f})"


@styled
def plot(records: list[Record]) -> Figure:
    """A panel a policy: a line a scheme, and a dashed one for starting afresh. What breaks down
    leaves a panel upwards, so that the others can be told apart."""
    found = _named(records)
    names = _columns(found)
    across = min(len(found), 2)
    down = -(-len(found) // across)
    size = (7.0 if across == 1 else 9.0, 3.2 * down + 0.4)
    made, grid = figure(down, across, size, sharex=True, sharey=True)
    drawn, lowest, highest = {}, [], []
    for axes, (policy, readings) in zip(grid.flat, found.items(), strict=False):
        for name, record in readings.items():
            numbers = [n for n, value in enumerate(record["perplexity"]) if value is not None]
            ends = [(n + 1) * record["stretch"] for n in numbers]
            values = [record["perplexity"][n] for n in numbers]
            afresh = name.startswith("afresh")
            colour = INK if afresh else COLOURS[(names.index(name) - 1) % len(COLOURS)]
            style = {"linestyle": "--", "zorder": 3} if afresh else {"marker": "."}
            (drawn[name],) = axes.plot(ends, values, color=colour, **style)
            lowest.append(min(values))
            highest += values if afresh else []
        axes.set(title=policy)
    if highest:
        grid.flat[0].set_ylim(0.9 * min(lowest), 1.2 * max(highest))
    for axes in grid.flat[len(found) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("tokens read")
    for axes in grid[:, 0]:
        axes.set_ylabel("perplexity of a stretch")
    shown = [name for name in names if name in drawn]
    made.legend([drawn[name] for name in shown], shown, loc="outside lower center", ncols=3)
    return made


DISPLAY = Display(
    title="Positions",
    about="Perplexity along a text far longer than the model was trained on, by the way in which "
    "rows are numbered. 'afresh' starts anew one stretch before each, so that no position is high.",
    settings=("model", "text", "digest", "tokens", "block", "stretch", "budget"),
    table=table,
    plot=plot,
)
