"""How fast each cache is: a table and a plot for each measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..display import Display, Record, newest
from ..figure import figure, styled
from .figures import FIGURES
from .tables import TABLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(records: list[Record]) -> tuple[list[str], list[list[str]]]:
    """The newest record's: what was timed in different runs doesn't compare."""
    return TABLES[records[-1]["measure"]](records[-1])


@styled
def plot(records: list[Record]) -> Figure:
    """One below the other, the newest record of each measure, and of each number of sequences."""
    shown = list(newest(records, "measure", "sequences").values())
    heights = [0.9 + 0.3 * max(len(record["cases"]), 5) for record in shown]
    made, grid = figure(len(shown), 1, (7.0, sum(heights)), height_ratios=heights)
    for record, axes in zip(shown, grid[:, 0], strict=True):
        FIGURES[record["measure"]](record, axes)
    return made


DISPLAY = Display(
    title="Speed",
    about="Caches timed in turn, in the same rounds: medians of the times, and, 'beside' another "
    "cache, of the rounds' ratios: how many times as fast. 'speed' has all caches decode with "
    "equally many rows; 'context' has a full cache grow, and one of a single row, whose speed no "
    "eviction can surpass; 'batch' decodes as many sequences as fit in the same rows.",
    settings=("model", "measure", "device", "budget", "prompt", "contexts", "long", "sequences"),
    table=table,
    plot=plot,
)
