"""mlx-lm's OpenAI-compatible server, with a policy applied to every model that it loads.

All of it is mlx-lm's: batching, streaming, reuse of prompts. What is ours is at the seams where a
model comes in, and where one request's failure would end the server for all.
"""

from __future__ import annotations

import argparse
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, NoReturn
from weakref import WeakSet

import mlx.core as mx
from mlx_lm import server as mlx_server
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache

from .discovery import one_line
from .model import apply
from .outgrown import outgrown
from .policy import Policy


def flags() -> argparse.ArgumentParser:
    """The parser of all flags that mlx-lm's server has, whichever version it is."""

    class Made(Exception):
        """Carries the parser out of mlx-lm's ``main``, which makes it and parses at once."""

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *_: object) -> NoReturn:  # type: ignore[override]
            raise Made(self)

    mlx_server.argparse = SimpleNamespace(ArgumentParser=Parser)
    try:
        mlx_server.main()
    except Made as made:
        parser: argparse.ArgumentParser = made.args[0]
    finally:
        mlx_server.argparse = argparse
    parser.__class__ = argparse.ArgumentParser
    return parser


class Provider(mlx_server.ModelProvider):  # type: ignore[misc]
    """Loads models, and applies the policy to each.

    Args:
        args: what ``flags().parse_args()`` gives.
        policy: from ``load_policy``.
    """

    def __init__(self, args: argparse.Namespace, policy: Policy) -> None:
        self.policy = policy
        #: What was wrong with the default model, once ``tried`` is set.
        self.failure: Exception | None = None
        self.tried = threading.Event()
        super().__init__(args)

    def load_default(self) -> None:
        try:
            super().load_default()
        except Exception as error:  # else the thread would die, and say it to nobody
            self.failure = error
        self.tried.set()

    def _load(self, *which: Any) -> None:
        try:
            super()._load(*which)
            # A draft's tokens are taken back when they are wrong, which must be exact.
            speculative = self.draft_model is not None
            lookback = self.cli_args.num_draft_tokens + 1 if speculative else 0
            for model in (self.model, self.draft_model):
                if model is not None:
                    apply(model, self.policy, lookback=lookback)
                    _try_out(model, self.cli_args)
        except BaseException:
            self.reset()  # a model without a policy mustn't serve the next request
            raise


def _try_out(model: Any, args: argparse.Namespace) -> None:
    """Feed two tokens: what a model or a flag asks too much of is seen only then."""
    cache = make_prompt_cache(model)
    model(mx.array([[0, 1]]), cache=cache)
    mx.eval([layer.state for layer in cache])
    for layer in cache:
        if args.kv_bits is not None and hasattr(layer, "to_quantized"):
            layer.to_quantized(group_size=args.kv_group_size, bits=args.kv_bits)


class PromptCache(LRUPromptCache):  # type: ignore[misc]
    """Caches of earlier prompts, given out only where a request can go on from them."""

    #: Whether a cache must be trimmable to be of use, as it must for speculative decoding.
    speculative: Callable[[], bool] = staticmethod(lambda: False)

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if cache is not None and not rest:
            # A request needs a token to go on with; mlx-lm's thread dies of one that has none.
            cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
            rest = rest + tokens[-1:]
        if cache is not None and self.speculative() and not can_trim_prompt_cache(cache):
            return None, tokens
        return cache, rest


class Generator(mlx_server.ResponseGenerator):  # type: ignore[misc]
    """The thread that generates. An error in it is the answer to the requests that it meets, and
    the thread goes on with the next ones."""

    def __init__(self, provider: Provider, prompt_cache: PromptCache) -> None:
        self._waiting: WeakSet[Queue[Any]] = WeakSet()
        prompt_cache.speculative = lambda: provider.draft_model is not None
        super().__init__(provider, prompt_cache)

    def _run_generate(self) -> None:
        while not self._stop:
            try:
                self._generate()
            except Exception as error:
                logging.exception("The requests at work have failed")
                for waiting in list(self._waiting):
                    waiting.put(RuntimeError(one_line(error)))  # without the frames of the other
        mx.clear_streams()  # else MLX aborts the process when it ends

    def _next_request(self, timeout: float | None = None) -> Any:
        request = super()._next_request(timeout)
        if request is not None:
            self._waiting.add(request[0])
        return request

    def _tokenize(self, *args: Any) -> Any:
        tokenized = super()._tokenize(*args)
        if not tokenized[0]:
            raise ValueError("The prompt has no tokens.")
        provider = self.model_provider
        warning = outgrown(provider.model, provider.policy, len(tokenized[0]))
        if warning:
            logging.warning(warning)
        return tokenized


class Handler(mlx_server.APIHandler):  # type: ignore[misc]
    """Answers requests."""

    def handle_models_request(self) -> None:
        """List the models; mlx-lm's own fails where the hub's cache folder doesn't exist."""
        from huggingface_hub.constants import HF_HUB_CACHE

        if Path(HF_HUB_CACHE).is_dir():
            super().handle_models_request()
            return
        served = self.response_generator.cli_args.model
        names = [str(Path(served).resolve())] if served and Path(served).exists() else []
        models = [{"id": name, "object": "model", "created": self.created} for name in names]
        self._answer(200, {"object": "list", "data": models})

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """Answer with a completion, or with why there is none after it has begun."""
        if not all(isinstance(word, str) and word for word in stop_words):
            self._answer(400, {"error": "stop must be a text, or a list of texts"})
            return
        try:
            super().handle_completion(request, stop_words)
        except ConnectionError:
            raise
        except Exception as error:
            logging.error(one_line(error))
            if self.stream:
                data = json.dumps({"error": {"message": str(error)}})
                self.wfile.write(f"data: {data}\n\n".encode())
            else:
                self._headers_buffer: list[bytes] = []  # nothing of it has been sent
                self._answer(500, {"error": str(error)})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


class Server(ThreadingHTTPServer):
    """Listens, and begins to load the default model, from the moment it is made; ``run`` answers.

    Args:
        args: what ``flags().parse_args()`` gives.
        policy: from ``load_policy``.

    Raises:
        OSError: the address is taken, or can't be had.
    """

    daemon_threads = True
    generator: Generator | None = None

    def __init__(self, args: argparse.Namespace, policy: Policy) -> None:
        found = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        self.address_family, _, _, _, address = found[0]
        super().__init__(address, self._handler)  # type: ignore[arg-type]
        mlx_server.maybe_set_recommended_wired_limit()
        self.policy = policy
        self.provider = Provider(args, policy)
        self.generator = Generator(self.provider, PromptCache(args.prompt_cache_size))

    def _handler(self, *args: Any) -> Handler:
        return Handler(self.generator, *args)

    def wait_for_model(self) -> None:
        """Until the default model, if there is one, has been loaded.

        Raises:
            Exception: what was wrong with it.
        """
        self.provider.tried.wait()
        if self.provider.failure is not None:
            raise self.provider.failure

    def run(self) -> None:
        """Serve until interrupted."""
        try:
            assert self.generator is not None
            if mx.distributed.init().rank() == 0:
                logging.info("Serving at %s, port %s: %r", *self.server_address[:2], self.policy)
                self.serve_forever()
            else:
                self.generator.join()
        except KeyboardInterrupt:
            logging.info("Interrupted")

    def server_close(self) -> None:
        super().server_close()
        if self.generator is not None:  # else the address is why
            self.generator.stop_and_join()

    def handle_error(self, *args: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, ConnectionError):
            logging.info("A client went away")
        else:
            logging.exception("A request failed")
