"""``velox chat``: a conversation of any length in a cache of a fixed size."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .generate import progress
from .holding import describe_cache, held
from .loading import load_model, parse_options
from .options import model_option, policy_options, sampling_options
from .output import console, table
from .pinning import before_message, protectors
from .terminal import ctrl_c, lines

if TYPE_CHECKING:
    from ..policy import Policy

HELP = """\
/reset   forget the conversation and begin anew
/stats   what the cache holds
/quit    end the conversation, as Ctrl-D does
/help    this
Ctrl-C ends a reply."""


@click.command()
@model_option
@policy_options
@click.option("--system", help="A system prompt.")
@click.option("--pin-system", is_flag=True, help="Never evict what comes before the first message.")
@click.option("--max-tokens", "-m", type=click.IntRange(1), default=512, show_default=True)
@sampling_options
def chat(
    model: str,
    name: str,
    budget: int | None,
    options: tuple[str, ...],
    system: str | None,
    pin_system: bool,
    protect: tuple[str, ...],
    max_tokens: int,
    temp: float,
    seed: int | None,
    prefill_step_size: int,
) -> None:
    """Talk with a model, for as long as you like, in constant memory.

    Each line is a message; /help lists the commands. Replies go to standard output, all else to
    standard error. Lines may come through a pipe.
    """
    from ..registry import load_policy

    given, extras = parse_options(options, budget), protectors(protect)
    policy = load_policy(name, protect=extras, **given)

    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    from ..outgrown import outgrown
    from ..protectors import Pin

    network, tokenizer = load_model(model)
    if not tokenizer.has_chat_template and (system is not None or pin_system):
        raise click.UsageError(
            "--system and --pin-system need a chat template, and this model has none"
        )
    talk = Conversation(network, tokenizer, policy, system)
    if pin_system:
        pinned = Pin(range(before_message(talk.opening, "Hello")))
        talk.policy = load_policy(name, protect=[*extras, pinned], **given)
        talk.reset()
    if seed is not None:
        mx.random.seed(seed)
    sampler = make_sampler(temp=temp)
    if sys.stdin.isatty():
        click.echo(HELP, err=True)
    warned = False
    for line in lines():
        command = re.fullmatch(r"\s*(/\w+)\s*", line)
        if command and command[1] == "/quit":
            break
        if command:
            obey(command[1], talk, name)
        elif line.strip():
            with ctrl_c() as stopped:
                for text in talk.say(
                    line,
                    max_tokens=max_tokens,
                    sampler=sampler,
                    prefill_step_size=prefill_step_size,
                ):
                    click.echo(text, nl=False)
                    if stopped():
                        break
            click.echo()
            warning = None if warned else outgrown(network, talk.policy, talk.tokens_seen)
            if warning:
                click.echo(warning, err=True)
                warned = True


class Conversation:
    """One cache from the first turn to the last, to which each turn adds only its own tokens."""

    def __init__(self, model: Any, tokenizer: Any, policy: Policy, system: str | None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.policy = policy
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Forget all that was said."""
        from ..model import make_cache

        self.cache = make_cache(self.model, self.policy)
        self.turns = 0
        self._last: int | None = None  # the newest token in the cache

    @property
    def tokens_seen(self) -> int:
        """Tokens of the conversation so far. (Asking for bytes as well would settle the cache.)"""
        from ..model import velox_caches

        return max(layer.tokens_seen for layer in velox_caches(self.cache))

    def say(self, text: str, **kwargs: Any) -> Iterator[str]:
        """Say something, and give the reply in pieces as it comes.

        Args:
            kwargs: what ``mlx_lm.stream_generate`` takes. After each piece the caller may stop.
        """
        import mlx_lm

        tokens = self._tokens(text)
        self.turns += 1
        with progress(len(tokens)) as advance:
            for response in mlx_lm.stream_generate(
                self.model,
                self.tokenizer,
                tokens,
                prompt_cache=self.cache,
                prompt_progress_callback=advance,
                **kwargs,
            ):
                # mlx-lm has fed each token that it gives, also one that ends the reply.
                self._last = response.token
                yield response.text

    def opening(self, text: str) -> list[int]:
        """The tokens of a first turn, in the chat template."""
        messages = [{"role": "user", "content": text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return self._encode(self._render(messages))

    def _tokens(self, text: str) -> list[int]:
        """What the cache lacks for the model to answer."""
        if not self.tokenizer.has_chat_template:
            return list(self.tokenizer.encode(text, add_special_tokens=not self.turns))
        if not self.turns:
            return self.opening(text)
        tokens = self._encode(self._later_turn(text))
        # The template closes the reply before; the model has mostly done so itself.
        return tokens[1:] if tokens[:1] == [self._last] else tokens

    def _encode(self, rendered: str) -> list[int]:
        return list(self.tokenizer.encode(rendered, add_special_tokens=False))

    def _later_turn(self, text: str) -> str:
        """What the template puts after a reply: its close, the message, and the reply's opening.

        Taken from a made-up conversation, for the real one isn't kept: and where a template shows
        older turns otherwise than newer ones, what was really said stays as it was.
        """
        reply = "velox-reply"
        while reply in text:
            reply += "-velox"
        roles, said = ("user", "assistant", "user"), ("Hello", reply, text)
        rendered = self._render(
            [{"role": role, "content": each} for role, each in zip(roles, said, strict=True)]
        )
        return rendered.rpartition(reply)[2]

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates are programs that come with the model
            raise click.ClickException(f"the model's chat template fails: {error}") from error
        return str(rendered)


def obey(command: str, talk: Conversation, policy: str) -> None:
    """Do what a line beginning with / asks for."""
    if command == "/reset":
        talk.reset()
        click.echo("The conversation begins anew.", err=True)
    elif command == "/stats":
        rows = [("turns", f"{talk.turns:,}"), *describe_cache(held(talk.cache))]
        console(stderr=True).print(table(("", policy), rows))
    elif command == "/help":
        click.echo(HELP, err=True)
    else:
        click.echo(f"There is no command {command}; /help lists them.", err=True)
