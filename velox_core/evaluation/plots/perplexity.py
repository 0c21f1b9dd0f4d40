"""Perplexity against budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .display import Display, Record, newest
from .figure import INK, figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(records: list[Record]) -> tuple[list[str], list[list[str]]]:
    """A row a policy, a column a budget; in brackets what it is above the full cache's, which has
    no budget and stands in all columns."""
    found = newest(records, "policy", "budget")
    full = found.get(("full", None))
    budgets = sorted({budget for _, budget in found if budget is not None}) or [None]

    def cell(policy: str, budget: int | None) -> str:
        record = found.get((policy, budget))
        if record is None:
            return "" if policy != "full" or full is None else f"{full['perplexity']:.2f}"
        more = f" ({record['perplexity'] - full['perplexity']:+.2f})" if full else ""
        return f"{record['perplexity']:.2f}" + (more if record is not full else "")

    policies = dict.fromkeys(policy for policy, _ in found)
    headings = [f"{budget:,} rows" if budget else "perplexity" for budget in budgets]
    rows = [[policy, *(cell(policy, budget) for budget in budgets)] for policy in policies]
    return ["cache", *headings], rows


@styled
def plot(records: list[Record]) -> Figure:
    """A line a policy; the full cache as a horizontal one."""
    from matplotlib.ticker import MaxNLocator

    made, ((axes,),) = figure()
    found = newest(records, "policy", "budget")
    budgets = sorted({budget for _, budget in found if budget is not None})
    for policy in dict.fromkeys(policy for policy, budget in found if budget is not None):
        mine = [(b, found[policy, b]["perplexity"]) for b in budgets if (policy, b) in found]
        axes.plot(*zip(*mine, strict=True), marker="o", markersize=4, label=policy)
    for (policy, budget), record in found.items():
        if budget is None:
            axes.axhline(record["perplexity"], color=INK, linestyle="--", label=policy)
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.set_yscale("log")  # one cache may be far off, and the others close together
    axes.yaxis.set_major_locator(MaxNLocator(8))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set(xlabel="budget: rows that a layer keeps", ylabel="perplexity, lower is better")
    axes.legend()
    return made


DISPLAY = Display(
    title="Perplexity",
    about="How well the model foretells a text with each cache: the lower, the better. 'full' is "
    "the model's own cache, 'rotating' mlx-lm's RotatingKVCache, which keeps the first 4 rows and "
    "the newest; 'truncated' reads the last tokens afresh before each block.",
    settings=("model", "text", "digest", "tokens", "block", "first_scored"),
    table=table,
    plot=plot,
)
