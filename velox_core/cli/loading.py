"""What a command is given, loaded: the model, and the policy's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


def parse_options(options: tuple[str, ...], budget: int | None) -> dict[str, Any]:
    """``--option`` and ``--budget`` as ``load_policy`` takes them."""
    from ..evaluation.policies import option_value

    parsed: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise click.UsageError(f"--option {option!r} must be key=value")
        if key == "protect":  # load_policy's own, and nothing that fits on a command line
            raise click.UsageError("'protect' can't be given as an --option")
        parsed[key] = option_value(value)
    if budget is not None:
        if "budget" in parsed:
            raise click.UsageError("give the budget once: --budget or --option budget=…")
        parsed["budget"] = budget
    return parsed


def load_model(name: str) -> tuple[Any, Any]:
    """The model and its tokenizer, or a one-line error."""
    import mlx_lm

    found = find_model(name)
    try:
        loaded: Any = mlx_lm.load(found)
    except Exception as error:  # a broken folder, an unknown architecture, a hub out of reach
        raise click.ClickException(
            f"can't load the model {name!r}: {type(error).__name__}: {error}"
        ) from error
    model, tokenizer = loaded
    return model, tokenizer


def find_model(name: str) -> str:
    """The model's folder, or its name on the hub; an error if it can only be a missing folder."""
    path = Path(name).expanduser()
    if path.exists():
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise click.ClickException(f"there is no model folder {name}")
    return name
