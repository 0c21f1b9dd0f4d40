"""``velox eval perplexity``: how well a model foretells a text with each cache."""

from __future__ import annotations

from pathlib import Path

import click

from ..loading import load_model
from ..measuring import (
    Unit,
    block_option,
    budgets_option,
    measured,
    open_results,
    output_options,
    policies_option,
    show,
    text_option,
)
from ..options import model_option


@click.command()
@model_option
@text_option
@policies_option
@budgets_option("128,256,512,1024")
@click.option("--tokens", type=click.IntRange(2), help="Tokens to read [default: the whole text].")
@block_option
@click.option(
    "--first-scored",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="The first token that counts, from 0; earlier ones are read and not scored.",
)
@output_options
def perplexity(
    model: str,
    text: Path,
    policies: str,
    budgets: tuple[int, ...],
    tokens: int | None,
    block: int,
    first_scored: int,
    out: Path,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Read a text with each policy at each budget; show the perplexity that each has.

    Beside them stand the full cache, mlx-lm's RotatingKVCache with as many rows, and "truncated":
    nothing is evicted, and before each block the last tokens, as many as the budget, are read
    afresh.
    """
    from ...evaluation.perplexity import readings
    from ...evaluation.policies import parse_policies
    from ...evaluation.text import digest, first_tokens, read_text

    specs = parse_policies(policies)
    for spec in specs:
        for budget in budgets:
            spec.load(budget)
    results, plot = open_results(out, plot, "perplexity")
    written = read_text(text)

    network, tokenizer = load_model(model)
    sequence = first_tokens(tokenizer, written, tokens)
    if first_scored >= len(sequence):
        raise click.UsageError(
            f"--first-scored {first_scored} leaves nothing to score: the text has "
            f"{len(sequence):,} tokens"
        )
    opening = int(sequence[0] == tokenizer.bos_token_id)
    settings = {
        "kind": "perplexity",
        "model": model,
        "text": text.name,
        "digest": digest(sequence),
        "tokens": len(sequence),
        "block": block,
        "first_scored": first_scored,
    }
    found = readings(network, sequence, specs, budgets, block, first_scored, opening)
    units = [
        Unit(
            str(reading.contender),
            reading.cost,
            {**settings, **reading.contender.settings},
            reading.measure,
        )
        for reading in found
    ]
    show(measured(results, units), results, plot, as_json)
