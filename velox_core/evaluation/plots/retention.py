"""Which tokens survive: maps, and how long each kind of token stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..survival import CLASSES, held_share, summaries
from .display import Display, Record, newest
from .figure import figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(records: list[Record]) -> tuple[list[str], list[list[str]]]:
    """A row a policy and layer."""
    rows = []
    for record in newest(records, "policy").values():
        for found in summaries(record):
            lives = [
                f"{found.lives[name]:,.0f}" if name in found.lives else ""
                for name in CLASSES.values()
            ]
            lives[0] += " (to the end)" if found.first_stays else ""
            rows.append([found.policy, str(found.layer), f"{found.recent:.0%}", *lives])
    return ["policy", "layer", "recent", *CLASSES.values()], rows


@styled
def plot(records: list[Record]) -> Figure:
    """Small maps, a row a policy, a column a layer: dark where a token is held after a step; a
    grey says how many of a layer's heads hold it, where each chooses for itself."""
    found = list(newest(records, "policy").values())
    layers = found[0]["layers"]
    size = (1.2 + 2.1 * len(layers), 0.6 + 2.1 * len(found))
    made, grid = figure(len(found), len(layers), size, sharex=True, sharey=True)
    for row, record in zip(grid, found, strict=True):
        for i, axes in enumerate(row):
            # Steps go down, as rows of an attention matrix do.
            axes.imshow(held_share(record, i), cmap="Greys", vmin=0, vmax=1, aspect="auto")
            axes.grid(visible=False)
        row[0].set_ylabel(record["policy"])
    for axes, layer in zip(grid[0], layers, strict=True):
        axes.set_title(f"layer {layer}")
    made.supxlabel("token", fontsize="medium")
    made.supylabel("tokens read", fontsize="medium")
    return made


DISPLAY = Display(
    title="Retention",
    about="Which tokens a layer holds as it reads on, one token a step or a block. 'recent' is the "
    "share of the rows held that a plain window would hold too: the mean over the steps from twice "
    "the budget on. The other columns say for how many steps a token of a kind is held: the mean "
    "over its tokens and the heads that choose. Tokens that are never evicted count up to the end "
    "of the text; the last ones, as many as the budget, are left out.",
    settings=("model", "text", "digest", "tokens", "block", "sinks", "budgets", "layers"),
    table=table,
    plot=plot,
)
