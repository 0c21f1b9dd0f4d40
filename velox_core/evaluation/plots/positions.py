"""Perplexity along a long text, by the way in which rows are numbered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .display import Display, Record, newest
from .figure import INK, figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _named(records: list[Record]) -> dict[str, dict[str, Record]]:
    """The newest readings by policy, each by its scheme or ``"afresh"``."""
    found: dict[str, dict[str, Record]] = {}
    flat = [{**record, "scheme": record["options"]["positions"]} for record in records]
    for (policy, start, scheme), record in newest(flat, "policy", "start", "scheme").items():
        name = start if start == "afresh" else scheme
        found.setdefault(policy, {})[name] = record
    return found


def table(records: list[Record]) -> tuple[list[str], list[list[str]]]:
    """A row a stretch and policy; in brackets what a scheme is above starting afresh. Then, a row
    a policy, bytes held and time a token in the last stretch beside the second one's."""
    rows = []
    names = ("afresh", "absolute", "contiguous", "compressed")
    for policy, readings in _named(records).items():
        any_one = next(iter(readings.values()))
        stretch, afresh = any_one["stretch"], readings.get("afresh")
        for number in range(len(any_one["perplexity"])):
            cells = []
            base: float | None = afresh["perplexity"][number] if afresh else None
            for name in names:
                value = readings[name]["perplexity"][number] if name in readings else None
                cells.append(_cell(value, None if name == "afresh" else base))
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
    """A panel a policy: a line a scheme, and a dashed one for starting afresh."""
    found = _named(records)
    made, panels = figure(1, len(found))
    for axes, (policy, readings) in zip(panels[0], found.items(), strict=True):
        for name, record in sorted(readings.items()):
            numbers = [n for n, value in enumerate(record["perplexity"]) if value is not None]
            ends = [(n + 1) * record["stretch"] for n in numbers]
            values = [record["perplexity"][n] for n in numbers]
            style = {"color": INK, "linestyle": "--"} if name == "afresh" else {"marker": "."}
            axes.plot(ends, values, label=name, **style)
        axes.set(title=policy, xlabel="tokens read", ylabel="perplexity of the stretch")
        axes.legend()
    return made


DISPLAY = Display(
    title="Positions",
    about="Perplexity along a text far longer than the model was trained on, by the way in which "
    "rows are numbered. 'afresh' starts anew one stretch before each, so that no position is high.",
    settings=("model", "text", "digest", "tokens", "block", "stretch", "budget"),
    table=table,
    plot=plot,
)
