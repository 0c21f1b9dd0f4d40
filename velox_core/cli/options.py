"""Options that several commands have."""

from __future__ import annotations

from typing import Any

import click

model_option = click.option(
    "--model", required=True, help="A model's folder, or its name on the model hub."
)

option_values = click.option(
    "--option",
    "-o",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any option of the policy; repeatable. Values are JSON, or else taken as text.",
)


def policy_options(command: Any) -> Any:
    """``--policy``, ``--budget``, ``--option`` and ``--protect``."""
    for option in (
        click.option(
            "--protect",
            multiple=True,
            metavar="NAME[:{…}]",
            help="A protector beside the policy, with options in JSON, as "
            """'pin:{"tokens": [[0, 120]]}'; see `velox policies --protectors`.""",
        ),
        option_values,
        click.option(
            "--budget",
            type=int,
            help="Rows that each layer keeps [default: the policy's]. For one number a layer: "
            "--option budget=[…].",
        ),
        click.option(
            "--policy", "name", required=True, help="The eviction policy; see `velox policies`."
        ),
    ):
        command = option(command)
    return command


def sampling_options(command: Any) -> Any:
    """``--temp``, ``--seed`` and ``--prefill-step-size``."""
    for option in (
        click.option(
            "--prefill-step-size",
            type=click.IntRange(1),
            default=2048,
            show_default=True,
            help="Tokens of the prompt that are read at once; rows are evicted between.",
        ),
        click.option("--seed", type=int, help="Seed of the sampling."),
        click.option("--temp", type=click.FloatRange(0), default=0.0, show_default=True),
    ):
        command = option(command)
    return command
