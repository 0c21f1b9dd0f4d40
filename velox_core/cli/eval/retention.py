"""``velox eval retention``: which tokens survive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..loading import load_model
from ..measuring import (
    Numbers,
    Unit,
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


class Layers(Numbers):
    """Layers with commas between, or ``all``."""

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[int, ...]:
        return () if value == "all" else super().convert(value, param, context)


@click.command()
@model_option
@text_option
@policies_option
@budget_option(256)
@tokens_option(1024)
@click.option(
    "--layers",
    type=Layers(minimum=0),
    help="Layers to watch, with commas between, from 0; or all "
    "[default: the first, the middle and the last]",
)
@number_option("--block", 1, "Tokens a step.")
@number_option(
    "--sinks",
    0,
    "First tokens that always stay: by default none, to see which a policy would keep.",
    minimum=0,
)
@output_options
def retention(
    model: str,
    text: Path,
    policies: str,
    budget: int,
    tokens: int,
    layers: tuple[int, ...] | None,
    block: int,
    sinks: int,
    out: Path,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Watch which tokens of a text each policy keeps, and for how long.

    The table says how much of what is kept is recent, and how long tokens of each kind stay; the
    plot shows for each token at which steps it was there.
    """
    from ...evaluation.policies import PolicySpec, code_of, parse_policies
    from ...evaluation.retention import layers_to_watch
    from ...evaluation.retention import retention as watch
    from ...evaluation.survival import classify
    from ...evaluation.text import digest, first_tokens, read_text
    from ...registry import load_policy

    specs = parse_policies(policies)
    options = {spec.text: {"budget": budget, "n_sink": sinks, **spec.options} for spec in specs}
    loaded = {spec.text: load_policy(spec.name, **options[spec.text]) for spec in specs}
    results, plot = open_results(out, plot, "retention")
    written = read_text(text)

    network, tokenizer = load_model(model)
    sequence = first_tokens(tokenizer, written, tokens)
    there = layers_to_watch(network, loaded[specs[0].text], layers or None)
    if layers is None:
        there = sorted({there[0], there[len(there) // 2], there[-1]})
    settings = {
        "kind": "retention",
        "model": model,
        "text": text.name,
        "digest": digest(sequence),
        "tokens": tokens,
        "block": block,
        "sinks": sinks,
        "layers": there,
    }
    classes = classify(tokenizer.decode([token]) for token in sequence)

    def unit(spec: PolicySpec) -> Unit:
        name = spec.text
        policy = loaded[name]
        key = {**settings, "policy": name, "options": policy.options(), "code": code_of(policy)}

        def watched(said: Callable[[int], None]) -> dict[str, Any]:
            found = watch(network, sequence, spec.name, options[name], there, block, said)
            return {"classes": classes, **found}

        return Unit(name, tokens, key, watched)

    show(measured(results, [unit(spec) for spec in specs]), results, plot, as_json)
