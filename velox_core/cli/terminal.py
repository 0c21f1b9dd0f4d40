"""What comes from the user's terminal: lines, and Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click


def lines() -> Iterator[str]:
    """What the user says, line by line."""
    if not sys.stdin.isatty():
        for line in sys.stdin.buffer:
            try:
                yield line.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise click.UsageError(f"standard input isn't UTF-8 text: {error}") from error
        return
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401 (input() then has a history)
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo(err=True)
            return


@contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, once; the second time it interrupts as ever.

    An interrupt in the midst of a step would leave the layers' caches at different tokens.
    """
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
