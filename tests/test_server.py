"""The server, as OpenAI's own client sees it over loopback."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import fake_plugins
import huggingface_hub
import mlx_lm
import openai
import pytest
import tiny_folder
from click.testing import CliRunner
from fake_plugins import install, spoil
from mlx_lm.models.cache import KVCache

import velox_core
from velox_core import VeloxCache, VeloxError, load_policy
from velox_core.cli import main
from velox_core.cli.serve import parse
from velox_core.server import Server, flags

see, site = fake_plugins.see, fake_plugins.site  # fixtures

BUDGET = 32
LONG = "Tell me about the sea, and the ships on it, and the men aboard. " * 4
WAIT = 60  # seconds that anything may take


@contextmanager
def serving(folder, *args, policy="tova", **options):
    """A server in a thread of this process."""
    given = ("--model", folder, "--policy", policy, "--port", "0", "--log-level", "ERROR")
    policy = load_policy(policy, **{"budget": BUDGET} | options)
    with Server(parse(flags(), (*given, *args)), policy) as server:
        server.wait_for_model()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(WAIT)
    assert not server.generator.generation_available()


def client(server):
    if isinstance(server, openai.OpenAI):
        return server
    port = server if isinstance(server, int) else server.server_address[1]
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key="none",
        timeout=WAIT,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),  # no proxy for loopback
    )


def ask(server, *messages, model="default_model", max_tokens=16, **more):
    """The reply, and what the client was told of tokens."""
    roles = ("user", "assistant")
    talk = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    if max_tokens is not None:
        more["max_tokens"] = max_tokens
    done = client(server).chat.completions.create(model=model, messages=talk, **more)
    return done.choices[0].message.content, done.usage


def stream(server, *messages, max_tokens=16, **more):
    """The pieces of the reply."""
    roles = ("user", "assistant")
    talk = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    chunks = client(server).chat.completions.create(
        model="default_model", messages=talk, max_tokens=max_tokens, stream=True, **more
    )
    return [text for chunk in chunks if (text := chunk.choices[0].delta.content)]


class Seen(list):
    """For each block that a cache took in: sequences, new rows, and the rows that were kept."""

    def batches(self):
        return max(batch for batch, _, _ in self)

    def rows(self):
        return max(kept for _, _, kept in self)


@pytest.fixture
def seen(monkeypatch):
    seen = Seen()
    update = VeloxCache.update_and_fetch

    def spy(self, keys, values):
        rows = update(self, keys, values)
        held = rows[0][0] if isinstance(rows[0], tuple) else rows[0]  # quantised, or not
        seen.append((keys.shape[0], keys.shape[2], held.shape[2] - keys.shape[2]))
        return rows

    monkeypatch.setattr(VeloxCache, "update_and_fetch", spy)

    def unbounded(self, keys, values):
        raise AssertionError("a cache that isn't bounded")

    monkeypatch.setattr(KVCache, "update_and_fetch", unbounded)
    return seen


# Talking


def test_a_reply_is_that_of_generate(chat_folder):
    """The same tokens as mlx-lm gives with the policy, streamed or not."""
    with serving(chat_folder) as server:
        whole, usage = ask(server, "Hello")
        pieces = stream(server, "Hello")
    model, tokenizer = mlx_lm.load(chat_folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True
    )
    cache = velox_core.make_cache(model, load_policy("tova", budget=BUDGET))
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=16, prompt_cache=cache)
    assert whole == text
    assert "".join(pieces) == text
    assert len(pieces) > 10  # as they come
    assert usage.prompt_tokens == len(prompt)
    assert usage.completion_tokens == 16


def test_text_completions(folder, seen):
    with serving(folder) as server:
        done = client(server).completions.create(model="default_model", prompt=LONG, max_tokens=8)
    assert len(done.choices[0].text) == 8
    assert seen.rows() == BUDGET


def talk(server, name, texts, start=lambda: None):
    """A conversation of three long turns; all of them but the first go on from a cache."""
    said, connected = [], client(server)
    for i in range(3):
        said.append(f"{name}, {i}: {LONG}")
        start()
        reply = stream(connected, *said, max_tokens=60, logit_bias={ord("~"): -100})  # to the last
        said.append("".join(reply))
        assert len(said[-1]) == 60
    texts[name] = said


def in_pairs(generator):
    """Has requests wait for one another, two by two."""
    next_request, taken, arrived = generator._next_request, [], threading.Event()

    def wait(timeout=None):
        arrived.set()
        if len(taken) % 2 == 0 and generator.requests.qsize() < 2:
            time.sleep(0.002)
            return None
        request = next_request(timeout)
        taken.extend([request] * (request is not None))
        return request

    generator._next_request = wait
    assert arrived.wait(WAIT)  # a call of the old one could take a request uncounted


def test_long_conversations_at_once(chat_folder, seen):
    texts, alone = {}, {}
    with serving(chat_folder) as server:
        in_pairs(server.generator)
        both = threading.Barrier(2)
        threads = [
            threading.Thread(target=talk, args=(server, name, texts, lambda: both.wait(WAIT)))
            for name in ("Ann", "Bo")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT)
        assert seen.batches() == 2  # together
        assert seen.rows() == BUDGET
        assert sum(map(len, texts["Ann"])) > 30 * BUDGET
        prompts = server.generator.prompt_cache
        row = 2 * 2 * 2 * 16 * 4  # two layers of keys and values, two heads of 16 float32
        assert prompts.nbytes < len(prompts) * (BUDGET + 1) * row * 1.1
    del seen[:]
    for name in ("Ann", "Bo"):
        with serving(chat_folder) as server:
            talk(server, name, alone)
    assert seen.batches() == 1
    assert texts == alone  # neither heard the other


def test_a_prompt_goes_on_from_an_earlier_one(chat_folder, seen):
    with serving(chat_folder) as server:
        first, usage = ask(server, LONG)
        assert usage.prompt_tokens_details.cached_tokens == 0
        del seen[:]
        _, usage = ask(server, LONG, first, "Go on.")
        assert usage.prompt_tokens_details.cached_tokens > len(LONG)
        assert sum(new for _, new, _ in seen) < 2 * (len("^user\nGo on.~\n^assistant\n") + 30)


def test_a_prompt_that_is_in_the_cache_to_its_last_token(folder):
    """mlx-lm's own server never answers again after that."""
    with serving(folder) as server:
        complete = client(server).completions.create
        told = complete(model="default_model", prompt=LONG, max_tokens=8).choices[0].text
        for end in (0, 1):
            again = complete(model="default_model", prompt=LONG + told[: 8 - end], max_tokens=4)
            assert len(again.choices[0].text) == 4


def test_a_client_that_goes_away(chat_folder, seen):
    with serving(chat_folder) as server:
        chunks = client(server).chat.completions.create(
            model="default_model",
            messages=[{"role": "user", "content": LONG}],
            max_tokens=10**6,
            logit_bias={ord("~"): -100},
            stream=True,
        )
        for _ in range(3):
            next(chunks)
        chunks.close()
        until = time.monotonic() + WAIT
        before = -1
        while before != len(seen) and time.monotonic() < until:
            before = len(seen)
            time.sleep(0.5)
        assert before == len(seen)  # it isn't written any more
        assert ask(server, "Hello")[0]
        assert seen.batches() == 1


# Requests that are refused


def post(server, body, path="/v1/chat/completions"):
    """Status and error of a request that no client of OpenAI's would send."""
    url = f"http://127.0.0.1:{server.server_address[1]}{path}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data=body), timeout=WAIT) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@contextmanager
def refused(kind, reason):
    """The request in this block is refused for that reason."""
    with pytest.raises(kind) as raised:
        yield
    assert reason in str(raised.value.body)  # what mlx-lm's server says in its own format


def test_bad_requests(folder):
    with serving(folder) as server:
        assert post(server, b"{")[0] == 400
        assert post(server, b"[1]") == (400, '{"error": "Request should be a JSON dictionary"}')
        assert post(server, b"{}") == (400, '{"error": "Request did not contain messages"}')
        assert post(server, b"{}", "/v1/nonesuch")[0] == 404
        with refused(openai.BadRequestError, "temperature must be at least 0"):
            ask(server, "Hello", temperature=-1)
        with refused(openai.BadRequestError, "stop must be a text, or a list of texts"):
            ask(server, "Hello", stop=[5])
        with refused(openai.BadRequestError, "stop must be a text, or a list of texts"):
            ask(server, "Hello", stop=[""])
        with refused(openai.NotFoundError, "The prompt has no tokens"):
            client(server).completions.create(model="default_model", prompt="")
        with refused(openai.NotFoundError, "no/such"):
            ask(server, "Hello", model="/no/such/model")
        assert len(ask(server, "Hello", stop="\x00\x01")[0]) == 16  # and all is well


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("mamba", {}, "The model mamba has no cache to bound"),
        ("afm7", {}, "The model afm7 can't be bounded: its reuse layers"),
        ("llama", {"num_hidden_layers": 3}, "budget has 2 numbers and the model has 3 layers"),
    ],
)
def test_models_that_cannot_be_bounded(folder, tmp_path, architecture, changes, reason):
    """The request that names one is refused; the default model goes on."""
    other = tiny_folder.write(tmp_path, architecture, **changes)
    with serving(folder, policy="morphkv", budget=[BUDGET, BUDGET], window=4) as server:
        before = ask(server, LONG)[0]
        with refused(openai.NotFoundError, reason):
            ask(server, "Hello", model=other)
        assert server.provider.model is None
        assert ask(server, LONG)[0] == before


def test_switching_models(folder, tmp_path, seen):
    other = tiny_folder.write(tmp_path, "qwen3")
    with serving(folder) as server:
        texts = [ask(server, LONG, model=name)[0] for name in ("default_model", other) * 2]
        assert texts[0] == texts[2] != texts[1] == texts[3]
        assert seen.rows() == BUDGET


def test_a_policy_that_fails(folder, site):
    """Its error is the answer, and only to the requests that meet it."""
    score = "return rows.positions.astype(mx.float32)"
    code = spoil(score, f"assert rows.n_new < 64, 'I never saw so much'\n            {score}")
    install(site, "velox-a", "ay", code=code)
    with serving(folder, policy="ay", budget=BUDGET) as server:
        for _ in range(2):
            assert len(ask(server, "Hello")[0]) == 16
            with refused(openai.InternalServerError, "AssertionError: I never saw"):
                ask(server, LONG)
            with refused(openai.APIError, "AssertionError: I never saw"):
                stream(server, LONG)


# mlx-lm's flags


def test_speculative_decoding(chat_folder, seen):
    """With a seed mlx-lm serves one by one, and reads the prompt as it does with a draft."""
    with serving(chat_folder) as server:
        plain = ask(server, LONG, seed=0, max_tokens=40)[0]
    del seen[:]
    args = ("--draft-model", chat_folder, "--num-draft-tokens", "3")
    with serving(chat_folder, *args) as server:
        reply = ask(server, LONG, max_tokens=40)[0]
        assert ask(server, LONG, max_tokens=40)[0] == reply
        assert ask(server, LONG, reply, "Go on.")[0]
        for model in (server.provider.model, server.provider.draft_model):
            assert {layer.lookback for layer in model.make_cache()} == {4}
    assert reply == plain


def test_kv_bits(chat_folder, tmp_path, seen):
    args = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    wide = tiny_folder.write(tmp_path, head_dim=32)
    with serving(wide, *args) as server:
        assert len(ask(server, LONG)[0]) == 16
        assert len(ask(server, LONG, "x", "Go on.")[0]) == 16
        layers = server.generator.prompt_cache._lru._lrus["assistant"]
        held = server.generator.prompt_cache._trie.get(*layers[-1]).prompt_cache
        assert {type(layer).__name__ for layer in held} == {"QuantizedVeloxCache"}
        assert held[0].size() == BUDGET
    error = "heads of 16 numbers can't be cut into groups of 32"
    with pytest.raises(VeloxError, match=error), serving(chat_folder, *args):
        pass


def test_models(folder, tmp_path, monkeypatch):
    def listed():
        return [model.id for model in client(server).models.list()]

    with serving(folder) as server:
        for cache in (tmp_path / "none", tmp_path):  # no such folder, and one with no models
            for module in (huggingface_hub.constants, huggingface_hub.utils._cache_manager):
                monkeypatch.setattr(module, "HF_HUB_CACHE", str(cache))
            assert listed() == [str(Path(folder).resolve())]
        assert not (tmp_path / "none").exists()


# The command


def velox(*args):
    return CliRunner().invoke(main, ("serve", *args))


def test_help():
    """The flags of velox and of mlx-lm."""
    text = velox("--help").stdout
    for flag in ("--policy", "--budget", "--option", "--prompt-cache-bytes", "--draft-model"):
        assert flag in text
    assert velox("-h").stdout == text
    assert velox("--help").exit_code == 0
    assert "serve" in CliRunner().invoke(main, ["--help"]).stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "the following arguments are required: --policy"),
        (("--policy", "tofa"), "no policy 'tofa' is installed"),
        (("--policy", "tova", "--budget", "0"), "budget=0 isn't allowed"),
        (("--policy", "tova", "--budget", "x"), "argument --budget: invalid int value: 'x'"),
        (("--policy", "tova", "--option", "x"), "--option 'x' must be key=value"),
        (("--policy", "tova", "-o", "bugdet=3"), "has no option 'bugdet'"),
        (("--policy", "tova", "--protect", "pun"), "no protector 'pun' is installed"),
        (("--policy", "tova", "--temp", "hot"), "argument --temp: invalid float value: 'hot'"),
        (("--policy", "tova", "--nonesuch", "3"), "unrecognized arguments: --nonesuch 3"),
        (("--policy", "tova", "--model", "/no/such"), "there is no model folder /no/such"),
        (("--policy", "tova", "--port", "99999"), "--port 99999 isn't a port"),
        (("--policy", "tova", "--host", "no such"), "can't listen on no such, port 8080: "),
    ],
)
def test_bad_input(args, said):
    result = velox(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("velox: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_default_model_that_is_no_good(tmp_path):
    """Said before anything is served; and no thread is left behind."""
    threads = threading.active_count()
    args = ("--policy", "tova", "--port", "0", "--model")
    result = velox(*args, str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"velox: can't load the model '{tmp_path}': FileNotFoundError")
    result = velox(*args, tiny_folder.write(tmp_path, "mamba"))
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("velox: The model mamba has no cache to bound")
    assert threading.active_count() == threads


def test_a_port_that_is_taken(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = velox("--policy", "tova", "--model", folder, "--port", port)
    assert result.exit_code == 2
    assert result.stderr == (
        f"velox: can't listen on 127.0.0.1, port {port}: Address already in use\n"
    )


@contextmanager
def process(folder, *args, tmp_path):
    """`velox serve` as a process, in which no hub cache folder exists; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "velox_core.cli", "serve", "--model", folder, *args]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HOME": str(tmp_path / "none"), "HF_HUB_OFFLINE": "1"}
    with open(tmp_path / "log", "w+") as log:
        server = subprocess.Popen([*command, "--port", str(port)], stderr=log, env=env)
        try:
            until = time.monotonic() + 2 * WAIT
            while server.poll() is None and time.monotonic() < until:
                log.seek(0)
                if "Serving at" in log.read():
                    break
                time.sleep(0.1)
            assert server.poll() is None, Path(log.name).read_text()
            yield port
            server.send_signal(signal.SIGINT)
            assert server.wait(WAIT) == 0, Path(log.name).read_text()
            assert "Traceback" not in Path(log.name).read_text()
        finally:
            server.kill()
            server.wait()
    assert not (tmp_path / "none").exists()


def test_as_a_process(chat_folder, tmp_path):
    args = ("--policy", "tova", "--budget", "32", "-o", "scope=head", "--max-tokens", "9")
    args += ("--protect", 'pin:{"tokens": [9]}')
    with process(chat_folder, *args, tmp_path=tmp_path) as port:
        (model,) = client(port).models.list()
        assert model.id == str(Path(chat_folder).resolve())
        # The name in the list is one to ask by, and mlx-lm's own flags arrive.
        assert len(ask(port, LONG, model=model.id, max_tokens=None)[0]) == 9
    assert "scope='head'" in (tmp_path / "log").read_text()


@pytest.mark.smollm2
def test_smollm2(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    import smollm2

    folder = str(smollm2.ensure())
    filler = "The sky was grey, and the day went by as such days do. " * 12
    question = f"{filler} Now answer: what is the capital of France?"
    with process(folder, "--policy", "tova", "--budget", "96", tmp_path=tmp_path) as port:
        reply = "".join(stream(port, question, max_tokens=12))
        assert "Paris" in reply
        again, usage = ask(port, question, reply, "And of Italy?", max_tokens=12)
        assert "Rome" in again
        assert usage.prompt_tokens_details.cached_tokens > 100
