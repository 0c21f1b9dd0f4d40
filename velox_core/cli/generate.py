"""``velox generate``: text from a model whose cache keeps a fixed size."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from .holding import describe_cache, held, megabytes
from .loading import load_model, parse_options
from .options import model_option, policy_options, sampling_options
from .output import console, table
from .pinning import before_message, protectors


@click.command()
@model_option
@policy_options
@click.option("--prompt", "-p", help="The prompt.")
@click.option("--prompt-file", "-f", help="A UTF-8 file with the prompt, or - for standard input.")
@click.argument("stdin", required=False, metavar="[-]")
@click.option("--max-tokens", "-m", type=click.IntRange(1), default=256, show_default=True)
@sampling_options
@click.option("--system", help="A system prompt, which comes before the prompt.")
@click.option("--pin-system", is_flag=True, help="Never evict what comes before the prompt.")
@click.option("--raw", is_flag=True, help="Give the prompt as it is, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead.")
def generate(
    model: str,
    name: str,
    budget: int | None,
    options: tuple[str, ...],
    prompt: str | None,
    prompt_file: str | None,
    stdin: str | None,
    max_tokens: int,
    temp: float,
    seed: int | None,
    system: str | None,
    pin_system: bool,
    protect: tuple[str, ...],
    raw: bool,
    prefill_step_size: int,
    as_json: bool,
) -> None:
    """Generate text, with the model's KV cache kept at a fixed size.

    The text goes to standard output, a table of what the cache held to standard error.
    A lone - reads the prompt from standard input.
    """
    from ..registry import load_policy

    # What can be checked before a model is loaded is checked before.
    text = read_prompt(prompt, prompt_file, stdin)
    if raw and (system is not None or pin_system):
        raise click.UsageError(
            "--system and --pin-system need the chat template, and --raw has none"
        )
    given, extras = parse_options(options, budget), protectors(protect)
    policy = load_policy(name, protect=extras, **given)

    import mlx.core as mx
    import mlx_lm
    from mlx_lm.sample_utils import make_sampler

    from ..model import make_cache
    from ..outgrown import outgrown
    from ..protectors import Pin

    network, tokenizer = load_model(model)
    tokens = encode(tokenizer, text, raw, system)
    pinned = 0
    if pin_system:
        if not tokenizer.has_chat_template:
            raise click.UsageError("--pin-system needs a chat template, and this model has none")
        pinned = before_message(partial(encode, tokenizer, raw=False, system=system), text)
        policy = load_policy(name, protect=[*extras, Pin(range(pinned))], **given)
    cache = make_cache(network, policy)
    if seed is not None:
        mx.random.seed(seed)
    mx.reset_peak_memory()
    written, last = "", None
    with progress(len(tokens)) as advance:
        for last in mlx_lm.stream_generate(
            network,
            tokenizer,
            tokens,
            max_tokens=max_tokens,
            sampler=make_sampler(temp=temp),
            prompt_cache=cache,
            prefill_step_size=prefill_step_size,
            prompt_progress_callback=advance,
        ):
            written += last.text
            if not as_json:
                click.echo(last.text, nl=False)  # which flushes
    assert last is not None  # mlx-lm's last response comes even where the first token ends it
    result = {
        "text": written,
        "model": model,
        "policy": name,
        "options": policy.options(),
        "prompt_tokens": last.prompt_tokens,
        "pinned_tokens": pinned,
        "generation_tokens": last.generation_tokens,
        "finish_reason": last.finish_reason,
        **held(cache),
        "prompt_tps": last.prompt_tps,
        "generation_tps": last.generation_tps,
        "peak_memory": mx.get_peak_memory(),
    }
    if as_json:
        click.echo(json.dumps(result))
    else:
        click.echo()
        console(stderr=True).print(table(("", name), describe(result)))
        warning = outgrown(network, policy, result["tokens_seen"])
        if warning:
            click.echo(warning, err=True)


def read_prompt(prompt: str | None, file: str | None, stdin: str | None) -> str:
    """The prompt, from whichever of the three places was named.

    The line end at the end of a file isn't part of it: a small model answers quite differently.
    """
    if stdin not in (None, "-"):
        raise click.UsageError(f"give the prompt as --prompt {shlex.quote(stdin)}")
    if [prompt, file, stdin].count(None) != 2:
        raise click.UsageError("give one prompt: --prompt TEXT, --prompt-file FILE, or -")
    if prompt is None:
        piped = stdin == "-" or file == "-"
        where = "standard input" if piped else str(file)
        try:
            data = sys.stdin.buffer.read() if piped else Path(where).read_bytes()
            prompt = data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise click.UsageError(f"the prompt in {where} isn't UTF-8 text: {error}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise click.UsageError(f"can't read the prompt from {where}: {reason}") from error
    if not prompt.strip():
        raise click.UsageError("the prompt is empty")
    return prompt


def encode(tokenizer: Any, text: str, raw: bool, system: str | None = None) -> list[int]:
    """The prompt's tokens, as a user's message in the chat template where there is one."""
    if raw or not tokenizer.has_chat_template:
        if system is not None:
            raise click.UsageError("--system needs a chat template, and this model has none")
        tokens = list(tokenizer.encode(text))
    else:
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        try:
            tokens = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        except Exception as error:  # templates are programs that come with the model
            raise click.ClickException(
                f"the model's chat template fails: {error}; --raw goes without it"
            ) from error
    if not tokens:
        raise click.UsageError("the prompt has no tokens")
    return tokens


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while the prompt is read, if that is a terminal; gone before the text."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    terminal = console(stderr=True)
    if not terminal.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task("prompt", total=total)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done)
            if done == total:
                bar.stop()

        yield advance


def describe(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of the table."""
    return [
        *describe_cache(result),
        *[("pinned", f"{pinned:,} tokens") for pinned in [result["pinned_tokens"]] if pinned],
        ("prompt", f"{result['prompt_tokens']:,} tokens, {result['prompt_tps']:.1f} tokens/s"),
        (
            "generation",
            f"{result['generation_tokens']:,} tokens, {result['generation_tps']:.1f} tokens/s",
        ),
        ("peak memory", megabytes(result["peak_memory"])),
    ]
