"""Where in a prompt the key is found: heat maps by depth and length."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from ..passkey import rates
from .display import Display, Record, newest
from .figure import figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 4  # panels beside each other


def panels(records: list[Record]) -> dict[tuple[str, int | None], list[Record]]:
    """The newest records of each policy and budget, the full cache's first."""
    found = newest(records, "policy", "budget", "length", "depth", "trial")
    made: dict[tuple[str, int | None], list[Record]] = {}
    for (policy, budget, *_), record in found.items():
        made.setdefault((policy, budget), []).append(record)
    return dict(sorted(made.items(), key=lambda item: item[0][1] or 0))


def table(records: list[Record]) -> tuple[list[str], list[list[str]]]:
    """A row a policy and budget, a column a length: the share found, and the mean probability."""
    lengths = sorted({record["length"] for record in records})
    rows = []
    for (policy, budget), mine in panels(records).items():
        cells = [[each for each in mine if each["length"] == length] for length in lengths]
        shown = ["{:.0%} ({:.2f})".format(*rates(cell)) if cell else "" for cell in [*cells, mine]]
        rows.append([policy, "" if budget is None else f"{budget:,}", *shown])
    return ["cache", "rows", *(f"{length:,} tokens" for length in lengths), "all"], rows


@styled
def plot(records: list[Record]) -> Figure:
    """A panel a policy and budget: the share of keys found, by length and depth."""
    lengths = sorted({record["length"] for record in records})
    depths = sorted({record["depth"] for record in records})
    found = panels(records)
    across = min(ACROSS, len(found))
    down = ceil(len(found) / across)
    size = (0.8 + across * max(1.8, 0.5 * len(lengths)), 0.5 + down * (0.8 + 0.3 * len(depths)))
    made, grid = figure(down, across, size, sharex=True, sharey=True)
    for axes, ((policy, budget), mine) in zip(grid.flat, found.items(), strict=False):
        title = policy.replace(":", "\n") + ("" if budget is None else f"\n{budget:,} rows")
        axes.set_title(title, fontsize="small")
        axes.tick_params(labelbottom=True, labelsize="small")
        shares = [
            [
                rates(cell)[0] if cell else float("nan")
                for length in lengths
                for cell in [[e for e in mine if (e["length"], e["depth"]) == (length, depth)]]
            ]
            for depth in depths
        ]
        axes.pcolormesh(shares, vmin=0, vmax=1, cmap="viridis", edgecolors="white", lw=0.5)
        for y, row in enumerate(shares):
            for x, share in enumerate(row):
                if share == share:  # else it wasn't measured
                    colour = "black" if share > 0.6 else "white"
                    axes.text(
                        x + 0.5, y + 0.5, f"{share:.0%}", size="x-small", color=colour,
                        ha="center", va="center",
                    )  # fmt: skip
        axes.grid(visible=False)
    for axes in list(grid.flat)[len(found) :]:
        axes.set_axis_off()
    first = grid[0, 0]
    first.set_xticks([x + 0.5 for x in range(len(lengths))], [f"{each:,}" for each in lengths])
    first.set_yticks([y + 0.5 for y in range(len(depths))], [f"{each} %" for each in depths])
    first.invert_yaxis()
    made.supxlabel("length of the prompt, tokens", fontsize="medium")
    made.supylabel("depth of the key", fontsize="medium")
    return made


DISPLAY = Display(
    title="Pass key",
    about="A number is said once, at some depth of a long prompt, and asked for at its end. The "
    "table has the share of prompts in which greedy decoding gives it, and in brackets the "
    "probability of its tokens (their geometric mean, averaged over the prompts).",
    settings=("model", "filler", "digest", "block"),
    table=table,
    plot=plot,
)
