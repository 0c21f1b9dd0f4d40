"""What all tests share: markers, hypothesis's settings, a policy that uses all there is, and tiny
models in folders."""

import signal
from typing import ClassVar

import attrs
import mlx.core as mx
import numpy as np
import pytest
import tiny_folder
from hypothesis import HealthCheck, settings

from velox_core import Policy, Rows, hookimpl

settings.register_profile(
    "velox",
    deadline=None,  # the machine may be busy
    max_examples=25,
    derandomize=True,  # CI says the same of the same code, always
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("velox")


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs have it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "wheels: builds wheels and installs them (some minutes)")
    config.addinivalue_line("markers", "smollm2: runs SmolLM2-135M (a minute)")


@attrs.frozen(eq=False, kw_only=True)
class Remembering(Policy):
    """Half of the last score, and what the last eight queries attend to: a policy with a memory
    of everything that a policy may have one of."""

    hook_version: ClassVar[int] = 1
    n_queries: ClassVar[int] = 8
    every_step: ClassVar[bool] = True

    @hookimpl
    def score(self, rows: Rows) -> mx.array:
        return rows.scores * 0.5 + rows.pool(rows.attention(last=8)).sum(axis=2)


def in_order(cache):
    """What a cache holds, its rows in the order of time. Reading it settles the cache."""
    keys, values, positions, scores, *window = cache.state[:6]
    if positions is None:
        return [np.zeros(0)] * 6
    order = mx.argsort(positions, axis=-1)
    by_time = [mx.take_along_axis(positions, order, axis=-1)]
    for rows in (keys, values, scores):
        if rows is None:
            by_time.append(order)
        else:
            index = order.reshape(*order.shape, *[1] * (rows.ndim - 3))
            by_time.append(mx.take_along_axis(rows, index, axis=2))
    parts = (*by_time, *window)
    return [np.zeros(0) if part is None or not part.size else np.array(part) for part in parts]


@pytest.fixture(scope="session")
def remembering():
    """The class of a policy that uses scores, every step and a window of queries."""
    return Remembering


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny random Llama as mlx-lm loads it, with a token for each ASCII character."""
    return tiny_folder.write(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """The same with a chat template, in which ``~`` ends a turn."""
    made = tmp_path_factory.mktemp("chat")
    return tiny_folder.write(made, template=tiny_folder.TEMPLATE)
