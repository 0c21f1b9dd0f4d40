"""What each policy loses on a real text: perplexity beside the full cache.

    python tools/compare.py [--tokens N] [--budgets N]… [--text FILE] …

Every cache reads the same tokens in small blocks and is scored on all of them, so what a policy
threw away counts from the first eviction on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click
import mlx.core as mx
from demo import warn_of_slow_blas
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from smollm2 import DEFAULT, ensure
from text import tokens as text_tokens

#: The rows of the table: a title, the policy, and its options beside budget and sinks.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("MorphKV, window 32, a layer", "morphkv", {"window": 32, "scope": "layer"}),
    ("MorphKV, window 32, a head", "morphkv", {"window": 32}),
    ("MorphKV, window 8, a layer", "morphkv", {"window": 8, "scope": "layer"}),
    ("MorphKV, window 8, a head", "morphkv", {"window": 8}),
    ("TOVA, a layer", "tova", {}),
    ("H2O, a head", "h2o", {}),
    ("StreamingLLM, 4 sinks", "streaming", {"n_sink": 4}),
    ("plain window", "streaming", {"n_sink": 0}),
    ("TOVA, keys as queries", "tova", {"queries": "keys"}),
    ("H2O, keys as queries", "h2o", {"queries": "keys"}),
]


@attrs.frozen
class Result:
    """One cache's perplexity; ``budget`` is None for the full one."""

    cache: str
    budget: int | None
    sinks: int | None
    perplexity: float
    seconds: float


def compare(
    model: Any,
    tokens: list[int],
    budgets: tuple[int, ...],
    block: int,
    sinks: int,
    console: Console,
) -> list[Result]:
    """Read the tokens with each cache at each budget, the full one first."""
    from mlx_lm.models.cache import KVCache

    import velox_core
    from velox_core.evaluation.perplexity import perplexity, stream_nll

    def full() -> list[Any]:
        return [KVCache() for _ in model.layers]

    def small(name: str, options: dict[str, Any]) -> list[Any]:
        return velox_core.make_cache(model, velox_core.load_policy(name, **options))

    runs: list[tuple[str, int | None, int | None, Callable[[], list[Any]]]] = [
        ("full", None, None, full)
    ]
    for budget in budgets:
        for title, name, own in CASES:
            options = {"budget": budget, "n_sink": sinks, **own}
            runs.append((title, budget, options["n_sink"], lambda n=name, o=options: small(n, o)))  # type: ignore[misc]
    # The first call compiles kernels, which no cache should be charged with.
    mx.eval(model(mx.array([tokens[:block]]), cache=full()))
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        every = progress.add_task(f"{'all':<34}", total=len(runs) * (len(tokens) - 1))
        for title, rows, first, make in runs:
            label = title if rows is None else f"{title}, {rows}"
            task = progress.add_task(f"{label:<34}", total=len(tokens) - 1)

            def advance(count: int, task: Any = task) -> None:
                progress.advance(task, count)
                progress.advance(every, count)

            started = time.perf_counter()
            nll = stream_nll(model, tokens, make(), block, 1, advance)
            seconds = time.perf_counter() - started
            results.append(Result(title, rows, first, perplexity(nll), seconds))
            progress.remove_task(task)
            console.print(f"{label:<34} {results[-1].perplexity:8.2f}   {seconds:4.0f} s")
            mx.clear_cache()
    return results


def report(results: list[Result], tokens: int, block: int, console: Console) -> None:
    """Print the table: a row a policy, a column a budget."""
    full, *rest = results
    budgets = sorted({result.budget for result in rest if result.budget is not None})
    table = Table(
        box=SIMPLE_HEAD,
        caption=f"perplexity over {tokens:,} tokens in blocks of {block}; "
        "above the full cache's in brackets",
    )
    table.add_column("cache", no_wrap=True)
    table.add_column("sinks", justify="right")
    for budget in budgets:
        table.add_column(f"{budget} rows", justify="right", no_wrap=True)
    table.add_row("full", "", *[f"{full.perplexity:.2f}" for _ in budgets])
    for title, _, _ in CASES:
        mine = {result.budget: result for result in rest if result.cache == title}
        cells = [
            f"{mine[budget].perplexity:.2f} (+{mine[budget].perplexity - full.perplexity:.2f})"
            for budget in budgets
        ]
        table.add_row(title, str(mine[budgets[0]].sinks), *cells)
    console.print(table)


@click.command(context_settings={"show_default": True})
@click.option("--model", "model_path", help="Folder or hub id.  [default: SmolLM2-135M, offline]")
@click.option("--text", "text_path", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A UTF-8 file to read.  [default: Python's help topics]")  # fmt: skip
@click.option("--tokens", default=4096, type=click.IntRange(min=2), help="How many to read.")
@click.option("--budgets", multiple=True, default=(128, 512), type=click.IntRange(min=64),
              help="Rows to keep; may be given again.")  # fmt: skip
@click.option("--block", default=16, type=click.IntRange(min=1), help="Tokens fed at a time.")
@click.option("--sinks", default=0, type=click.IntRange(min=0, max=16),
              help="First tokens that the scoring policies always keep.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table.")
def main(
    model_path: str | None,
    text_path: Path | None,
    tokens: int,
    budgets: tuple[int, ...],
    block: int,
    sinks: int,
    as_json: bool,
) -> None:
    """Read a text with every policy; show the perplexity that each costs."""
    console = Console(stderr=as_json)
    warn_of_slow_blas(console)
    if model_path is None:
        with console.status(f"Making {DEFAULT.name} from its package, once"):
            model_path = str(ensure())
    if Path(model_path).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read on import, so before mlx_lm's
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it misses PyTorch, aloud
    import mlx_lm

    model, tokenizer = mlx_lm.load(model_path)[:2]
    text = text_path.read_text(encoding="utf-8") if text_path else None
    sequence = text_tokens(tokenizer, tokens, text)
    results = compare(model, sequence, budgets, block, sinks, console)
    if as_json:
        print(json.dumps([attrs.asdict(result) for result in results], indent=2))
    else:
        report(results, tokens, block, console)


if __name__ == "__main__":
    main()
