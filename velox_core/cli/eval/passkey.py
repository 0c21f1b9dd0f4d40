"""``velox eval passkey``: whether a number said once in a long prompt is still found."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import click

from ..loading import load_model
from ..measuring import (
    Numbers,
    Unit,
    block_option,
    budgets_option,
    measured,
    open_results,
    output_options,
    policies_option,
    show,
)
from ..options import model_option


@click.command()
@model_option
@policies_option
@budgets_option("256,512")
@click.option(
    "--lengths",
    type=Numbers(),
    default="1024,2048,4096",
    show_default=True,
    help="Tokens of the prompts.",
)
@click.option(
    "--depths",
    type=Numbers(0, 100),
    default="0,25,50,75,100",
    show_default=True,
    help="Where the number is said, in percent of the prompt.",
)
@click.option(
    "--trials",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Numbers for each length and depth.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A UTF-8 file to fill the prompts with [default: five short sentences, repeated].",
)
@block_option
@output_options
def passkey(
    model: str,
    policies: str,
    budgets: tuple[int, ...],
    lengths: tuple[int, ...],
    depths: tuple[int, ...],
    trials: int,
    text: Path | None,
    block: int,
    out: Path,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Hide a number at several depths of long prompts, and ask for it at the end.

    Shows in how many it is found with the full cache, and with mlx-lm's RotatingKVCache and each
    policy at each budget.
    """
    from ...evaluation.caches import Contender, contenders
    from ...evaluation.passkey import FILLER, NEEDLE, QUESTION, Prompts, recall
    from ...evaluation.policies import parse_policies
    from ...evaluation.text import digest, read_text

    specs = parse_policies(policies)
    for spec, budget in product(specs, budgets):
        spec.load(budget)
    results, plot = open_results(out, plot, "passkey")
    filler = FILLER if text is None else read_text(text)

    network, tokenizer = load_model(model)
    prompts = Prompts(partial(tokenizer.encode, verbose=False), filler)
    settings = {
        "kind": "passkey",
        "model": model,
        "filler": "sentences" if text is None else text.name,
        "digest": digest([*prompts.sentences, NEEDLE, QUESTION]),
        "block": block,
    }
    made = {
        (length, depth, trial): prompts.make(length, depth, trial)
        for length, depth, trial in product(lengths, depths, range(trials))
    }

    def unit(contender: Contender, length: int, depth: int, trial: int) -> Unit:
        prompt = made[length, depth, trial]
        key = {**settings, **contender.settings, "length": length, "depth": depth, "trial": trial}
        return Unit(
            f"{contender}, {length:,} tokens, {depth} % deep",
            prompt.cost,
            key,
            lambda said: recall(network, prompt, contender.make(), block, said),
        )

    units = [
        unit(contender, *place)
        for contender in contenders(network, specs, budgets)
        for place in made
    ]
    show(measured(results, units), results, plot, as_json)
