"""`velox chat`: the model hears what it would of the whole conversation, in a bounded cache."""

import json
import os
import signal
import subprocess
import sys
import threading

import mlx_lm
import pytest
import tiny_folder
from click.testing import CliRunner
from mlx_lm import sample_utils
from mlx_lm.models.cache import KVCache

from velox_core import VeloxCache, load_policy
from velox_core.cli import main
from velox_core.cli.chat import HELP, Conversation
from velox_core.cli.loading import load_model

WIDE = "4096"
SAID = ["Hello.", "And now?", "  A line with blanks  ", "velox-reply, she said", "Bye"]


def chat(folder, *args, say, budget="32", code=0):
    """The replies and what came on stderr, for lines through a pipe."""
    given = ("chat", "--model", folder, "--policy", "tova", "--budget", budget, "-m", "12")
    text = "".join(line + "\n" for line in say)
    result = CliRunner().invoke(main, (*given, *args), input=text)
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def reference(folder, say, system=None):
    """What mlx-lm makes of the conversation, reading all of it anew each turn."""
    model, tokenizer = mlx_lm.load(folder)
    messages = [{"role": "system", "content": system}] if system else []
    text = ""
    for line in say:
        messages.append({"role": "user", "content": line})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        reply = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
        messages.append({"role": "assistant", "content": reply})
        text += reply + "\n"
    return text


@pytest.fixture
def fed(monkeypatch):
    """How many tokens the first layer's cache takes in at once, and the rows that it kept."""
    fed = []
    update = VeloxCache.update_and_fetch

    def spy(self, keys, values):
        rows = update(self, keys, values)
        if self.layer == 0:
            fed.append((keys.shape[2], rows[0].shape[2] - keys.shape[2]))
        return rows

    monkeypatch.setattr(VeloxCache, "update_and_fetch", spy)
    return fed


def with_template(folder, path, template, eos="~"):
    """The model of the folder with another chat template."""
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        (path / file).symlink_to(os.path.join(folder, file))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": eos}))
    return str(path)


# What the model hears


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_turn_by_turn_as_from_the_beginning(chat_folder, system):
    """Replies that end by themselves and ones that are cut off."""
    args = () if system is None else ("--system", system)
    replies, _ = chat(chat_folder, *args, say=SAID, budget=WIDE)
    assert replies == reference(chat_folder, SAID, system)


def test_both_ends_of_a_reply_were_met(chat_folder):
    """The test above is worth little unless one reply ended by itself and one didn't."""
    model, tokenizer = load_model(chat_folder)
    talk = Conversation(model, tokenizer, load_policy("tova"), None)
    ends = set()
    for line in SAID:
        list(talk.say(line, max_tokens=12))
        ends.add(talk._last in tokenizer.eos_token_ids)
    assert ends == {True, False}


def test_only_what_is_new_is_read(chat_folder, fed):
    chat(chat_folder, say=SAID, budget=WIDE)
    blocks = [n for n, _ in fed if n > 1]
    assert len(blocks) == len(SAID)
    for turn, (n, line) in enumerate(zip(blocks, SAID, strict=True)):
        # The last token is fed on its own; before it all comes the close of the reply before.
        close = n - len(f"^user\n{line}~\n^assistant\n") + 1
        assert close in ((1, 2) if turn else (0,))


def test_a_long_conversation_is_bounded(chat_folder, fed):
    model, tokenizer = load_model(chat_folder)
    talk = Conversation(model, tokenizer, load_policy("tova", budget=32), None)
    lengths, sizes = [], set()
    for turn in range(60):
        list(talk.say(f"This is turn {turn} of a conversation without an end.", max_tokens=12))
        lengths.append(talk.cache[0].offset)
        if turn > 2:
            sizes.add(sum(layer.nbytes for layer in talk.cache))
    assert max(rows for _, rows in fed) == 32
    assert lengths[-1] == sum(n for n, _ in fed) > 3600
    assert len(sizes) == 1  # not a byte more
    assert {layer.offset for layer in talk.cache} == {lengths[-1]}
    assert all(layer.tokens_kept == 32 for layer in talk.cache)
    assert not any(type(layer) is KVCache for layer in talk.cache)


@pytest.mark.parametrize(
    "template",
    [
        # Takes thoughts out of all replies but the last, as Qwen 3's does.
        "{% for m in messages %}^{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('t')[-1] }}{% else %}{{ m.content }}{% endif %}~\n{% endfor %}"
        "{% if add_generation_prompt %}^assistant\n{% endif %}",
        # Insists on turns, and puts a date and a beginning before all.
        "Today.{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns!') }}{% endif %}^{{ m.role }}\n{{ m.content | trim }}~\n"
        "{% endfor %}{% if add_generation_prompt %}^assistant\n{% endif %}",
    ],
)
def test_templates_that_show_a_conversation_otherwise(chat_folder, tmp_path, template):
    """What was said stays as it was said; each later turn adds the same as in a plain template."""
    folder = with_template(chat_folder, tmp_path, template)
    model, tokenizer = load_model(folder)
    talk = Conversation(model, tokenizer, load_policy("tova"), None)
    first = talk._tokens("One")
    assert tokenizer.decode(first).endswith("^user\nOne~\n^assistant\n")
    list(talk.say("One", max_tokens=3))
    for last, close in ((ord("~"), "\n"), (ord("x"), "~\n")):
        talk._last = last
        later = tokenizer.decode(talk._tokens("Two velox-reply"))
        assert later == f"{close}^user\nTwo velox-reply~\n^assistant\n"


def test_without_a_template(folder):
    """Each line as it is, after all that went before."""
    replies, _ = chat(folder, say=["Hello", "Bye"], budget=WIDE)
    model, tokenizer = mlx_lm.load(folder)
    first = mlx_lm.generate(model, tokenizer, "Hello", max_tokens=12)
    second = mlx_lm.generate(model, tokenizer, f"Hello{first}Bye", max_tokens=12)
    assert replies == f"{first}\n{second}\n"
    for args in (("--system", "Hm."), ("--pin-system",)):
        _, said = chat(folder, *args, say=["Hello"], code=2)
        assert "--system and --pin-system need a chat template" in said


def test_what_is_pinned_stays(chat_folder, monkeypatch):
    """The system prompt and the first message's opening, through a long conversation."""
    talks = []
    reset = Conversation.reset
    monkeypatch.setattr(Conversation, "reset", lambda self: talks.append(self) or reset(self))
    say = [f"This is turn {turn} of it all." for turn in range(12)]
    system = "Be brief, and kind."
    chat(chat_folder, "--system", system, say=say, budget="64")
    n = len(f"^system\n{system}~\n^user\n")
    first = set(range(n))
    assert not first <= set(talks[-1].cache[0].positions.flatten().tolist())
    args = ("--system", system, "--pin-system", "--protect", 'pin:{"tokens": [50]}')
    chat(chat_folder, *args, say=[*say, "/reset", *say], budget="64")
    for layer in talks[-1].cache:
        assert first | {50} <= set(layer.positions.flatten().tolist())
        assert layer.size() == 64


# What the user sees


def test_commands(chat_folder):
    once, _ = chat(chat_folder, say=["Hello."])
    text, said = chat(
        chat_folder, say=["Hello.", "/stats", "/help", "", " /reset ", "Hello.", "/stats", "/rest"]
    )
    assert text == once * 2  # nothing else goes there, and all was forgotten
    assert HELP in said
    assert "The conversation begins anew." in said
    assert "There is no command /rest; /help lists them." in said
    stats = [line.split("│") for line in said.splitlines() if "turns" in line or "rows" in line]
    assert [cells[2].strip() for cells in stats] == ["1", "32 a layer", "1", "32 a layer"]
    spoken, _ = chat(chat_folder, say=["/usr/bin is where it lies", "/ what?"])
    assert spoken.count("\n") >= 2  # to the model
    assert chat(chat_folder, say=["Hello.", "/quit", "Hello."])[0] == once


def test_sampling(chat_folder):
    args = ("--temp", "2", "--seed")
    assert chat(chat_folder, *args, "1", say=SAID) == chat(chat_folder, *args, "1", say=SAID)
    assert chat(chat_folder, *args, "1", say=SAID) != chat(chat_folder, *args, "2", say=SAID)


def interrupted(folder, *args, at, times=1, **kwargs):
    """A chat in which Ctrl-C comes while the token of that number is sampled."""
    made = sample_utils.make_sampler

    def make(*args, **kwargs):
        sampler, count = made(*args, **kwargs), iter(range(10**6))

        def sample(logprobs):
            if next(count) == at:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return sampler(logprobs)

        return sample

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_utils, "make_sampler", make)
        return chat(folder, *args, **kwargs)


def test_ctrl_c_ends_the_reply(chat_folder):
    say = ["Hello.", "And now?"]
    whole, _ = chat(chat_folder, say=say)
    text, said = interrupted(chat_folder, say=[*say, "/stats"], at=3)
    first = text.partition("\n")[0]
    assert 0 < len(first) < 5
    assert whole.startswith(first)
    assert len(text) > len(first) + 2  # and the conversation goes on
    assert "turns" in said
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupted(chat_folder, say=say, at=3, times=2, code=130)


def test_a_reply_comes_before_the_next_line(chat_folder):
    """Through pipes, as a program would use it."""
    command = [sys.executable, "-m", "velox_core.cli", "chat", "--model", chat_folder]
    options = ["--policy", "tova", "--budget", "32", "-m", "12", "--temp", "0"]
    expected, _ = chat(chat_folder, say=["Hello.", "And now?"])
    with subprocess.Popen(
        command + options, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        timer = threading.Timer(60, process.kill)
        timer.start()
        try:
            first, _ = chat(chat_folder, say=["Hello."])
            process.stdin.write(b"Hello.\n")
            process.stdin.flush()
            assert process.stdout.read(len(first.encode())).decode() == first
            rest, errors = process.communicate(b"And now?\n", timeout=60)
        finally:
            timer.cancel()
            process.kill()
    assert first + rest.decode() == expected
    assert process.returncode == 0
    assert errors == b""


# Bad input


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--policy", "tofa"), "no policy 'tofa' is installed"),
        (("--policy", "tova", "--budget", "0"), "budget=0 isn't allowed"),
        (("--policy", "tova", "-o", "bugdet=3"), "has no option 'bugdet'"),
        (("--policy", "tova", "--protect", "pun"), "no protector 'pun' is installed"),
        (("--policy", "tova", "--temp", "-1"), "Invalid value for '--temp'"),
        (("--policy", "tova"), "there is no model folder ./no/such"),
        ((), "Missing option '--policy'"),
    ],
)
def test_bad_input(args, said):
    result = CliRunner().invoke(main, ("chat", "--model", "./no/such", *args), input="Hello\n")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr
    assert result.stderr.startswith("velox: ")
    assert result.stderr.count("\n") == 1


def test_models_and_templates_that_fail(chat_folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    _, said = chat(tiny_folder.write(other, "mamba"), say=["Hello"], code=2)
    assert said.splitlines()[-1].startswith("velox: The model mamba has no cache to bound")
    folder = with_template(chat_folder, tmp_path, "{{ raise_exception('no such role') }}")
    _, said = chat(folder, say=["Hello"], code=2)
    assert said == "velox: the model's chat template fails: no such role\n"


def test_not_utf8(chat_folder):
    args = ("chat", "--model", chat_folder, "--policy", "tova")
    result = CliRunner().invoke(main, args, input=b"caf\xe9\n")
    assert result.exit_code == 2
    assert "standard input isn't UTF-8 text" in result.stderr
