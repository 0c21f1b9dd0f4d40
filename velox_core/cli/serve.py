"""``velox serve``: mlx-lm's server, with bounded caches."""

from __future__ import annotations

import argparse
import logging
from typing import NoReturn

import click

from .loading import find_model, parse_options
from .pinning import protectors


@click.command(
    add_help_option=False,  # mlx-lm's flags belong in it, so its own parser writes it
    context_settings={"ignore_unknown_options": True},
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def serve(args: tuple[str, ...]) -> None:
    """Serve models to OpenAI's clients, with bounded caches.

    This is mlx-lm's own server: the options are --policy, --budget and --option as for
    `velox generate`, and all that mlx_lm.server has; `velox serve --help` lists them.
    """
    from .. import server
    from ..errors import VeloxError
    from ..registry import load_policy

    given = parse(server.flags(), args)
    options = parse_options(tuple(given.option), given.budget)
    policy = load_policy(given.policy, protect=protectors(given.protect), **options)
    if not 0 <= given.port < 2**16:  # the system would take it modulo that
        raise click.UsageError(f"--port {given.port} isn't a port: 0 to 65535 are")
    if given.model is not None:
        given.model = find_model(given.model)
    logging.basicConfig(level=given.log_level, format="%(asctime)s - %(levelname)s - %(message)s")
    try:
        listening = server.Server(given, policy)
    except OSError as error:
        raise click.ClickException(
            f"can't listen on {given.host}, port {given.port}: {error.strerror}"
        ) from error
    with listening:
        try:
            listening.wait_for_model()
        except VeloxError:
            raise
        except Exception as error:  # as for `velox generate`
            raise click.ClickException(
                f"can't load the model {given.model!r}: {type(error).__name__}: {error}"
            ) from error
        listening.run()


def parse(parser: argparse.ArgumentParser, args: tuple[str, ...]) -> argparse.Namespace:
    """The options, velox's own and mlx-lm's."""
    parser.prog = "velox serve"
    parser.description = "mlx-lm's OpenAI-compatible server, with bounded caches."
    own = parser.add_argument_group("velox")
    own.add_argument("--policy", required=True, help="The eviction policy; see `velox policies`")
    own.add_argument(
        "--budget", type=int, help="Rows that each layer keeps (default: the policy's)"
    )
    own.add_argument(
        "--option",
        "-o",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Any option of the policy; repeatable. Values are JSON, or else taken as text",
    )
    own.add_argument(
        "--protect",
        action="append",
        default=[],
        metavar="NAME:{…}",
        help="A protector beside the policy, with options in JSON, if any; see `velox policies "
        "--protectors`",
    )

    def error(message: str) -> NoReturn:
        raise click.UsageError(message)

    parser.error = error  # type: ignore[method-assign]
    return parser.parse_args(args)
