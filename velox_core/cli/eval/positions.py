"""``velox eval positions``: far beyond the context that a model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from ..loading import load_model
from ..measuring import (
    Unit,
    block_option,
    budget_option,
    measured,
    number_option,
    open_results,
    output_options,
    policies_option,
    show,
    text_option,
    tokens_option,
)
from ..options import model_option

if TYPE_CHECKING:
    from ...policy import Policy


@click.command()
@model_option
@text_option
@policies_option
@budget_option(512)
@tokens_option(65536)
@number_option("--stretch", 4096, "Tokens that are scored together.", minimum=2)
@block_option
@output_options
def positions(
    model: str,
    text: Path,
    policies: str,
    budget: int,
    tokens: int,
    stretch: int,
    block: int,
    out: Path,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Read a long text without a break, with each policy and each way of numbering rows.

    Beside each stretch stands its perplexity when the model starts afresh one stretch before it
    (with absolute positions): what it would be if no position were high.

    A policy that names its positions (tova:positions=compressed) is read with those alone, and
    afresh without them and max_age.
    """
    from ...evaluation.policies import parse_policies, settings_of, unplaced
    from ...evaluation.positions import SCHEMES, Reading, check_length
    from ...evaluation.text import digest, first_tokens, read_text

    specs = parse_policies(policies)
    asked: dict[tuple[str, str], Policy] = {}  # each reading once
    for spec in specs:
        named = "positions" in spec.options
        for scheme in [spec.options["positions"]] if named else SCHEMES:
            placed = attrs.evolve(spec, options={"positions": scheme, **spec.options})
            asked[spec.text, str(scheme)] = placed.load(budget)
        (fresh,) = parse_policies(unplaced(spec.text)) if named else [spec]
        asked[fresh.text, "afresh"] = fresh.load(budget)
    results, plot = open_results(out, plot, "positions")
    written = read_text(text)

    network, tokenizer = load_model(model)
    sequence = first_tokens(tokenizer, written, tokens)
    check_length(sequence, stretch)
    settings = {
        "kind": "positions",
        "model": model,
        "text": text.name,
        "digest": digest(sequence),
        "tokens": len(sequence),
        "block": block,
        "stretch": stretch,
        "budget": budget,
    }
    units = []
    for (shown, way), policy in asked.items():
        start = "afresh" if way == "afresh" else "running"
        key = {**settings, "policy": shown, **settings_of(policy), "start": start}
        reading = Reading(network, sequence, policy, block, stretch, start == "afresh")
        what = shown if "positions=" in shown else f"{shown}, {way}"
        units.append(Unit(what, reading.cost, key, reading.measure))
    show(measured(results, units), results, plot, as_json)
