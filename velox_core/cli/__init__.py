"""The command ``velox``.

One file a command. What a command needs of MLX it imports when it runs, so that ``--help`` and
``velox policies`` are quick and work where MLX doesn't.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from ..errors import VeloxError
from .bench import bench
from .chat import chat
from .check import check
from .doctor import doctor
from .eval import evaluate
from .generate import generate
from .new import new
from .policies import policies
from .report import report
from .serve import serve


class OneLineErrors(click.Group):
    """A group of commands in which whatever the user can mend comes out as one line on stderr,
    with exit code 2, and never as a traceback. Ctrl-C gives 130, as a shell has it."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line, and exit.

        Args:
            args: as ``click.Command.main`` has them; by default the process's own.
            kwargs: likewise.
        """
        kwargs |= {"prog_name": "velox", "standalone_mode": False}
        try:
            code = super().main(*args, **kwargs)  # a number where a command chose its exit code
        except click.Abort:
            sys.exit(130)
        except click.ClickException as error:
            fail(error.format_message())
        except VeloxError as error:
            fail(str(error))
        except BrokenPipeError:  # `velox … | head`; Python would complain once more at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


def fail(message: str) -> None:
    """Say what is wrong in one line, and exit with code 2."""
    click.echo(f"velox: {' '.join(message.split())}", err=True)
    sys.exit(2)


def velox_version() -> str:
    """The installed core's version."""
    try:
        return version("velox-kv")
    except PackageNotFoundError:
        return "(not installed: run from its source)"


@click.group(
    cls=OneLineErrors,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(velox_version(), prog_name="velox")
@click.pass_context
def main(context: click.Context) -> None:
    """KV-cache eviction policies for MLX."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (generate, chat, serve, policies, check, evaluate, bench, report, new, doctor):
    main.add_command(command)
