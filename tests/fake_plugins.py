"""Fake policy distributions: a dist-info folder and a module, written where a test wants them."""

import importlib.metadata
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from velox_core import discovery
from velox_core.description import forget_found

# A policy that is right; tests spoil it.
GOOD = """
    import attrs
    import mlx.core as mx
    from velox_core import Policy, hookimpl

    @attrs.frozen(eq=False, kw_only=True)
    class Fake(Policy):
        hook_version = 1
        window: int = 8
        n_queries = 0

        @hookimpl
        def score(self, rows):
            return rows.positions.astype(mx.float32)
"""


def spoil(old: str, new: str) -> str:
    """The good policy with one piece of it replaced, which must be there."""
    assert old in GOOD
    return GOOD.replace(old, new)


def install(
    folder: Path,
    distribution: str,
    policy: str | None = None,
    *,
    code: str | None = GOOD,
    module: str | None = None,
    target: str | None = None,
    version: str = "1.0",
    entry_points: str | None = None,
    metadata: bool = True,
) -> Path:
    """Write a distribution into the folder, as pip would leave it there.

    Args:
        folder: the folder, which must be on the path to be seen.
        distribution: its name.
        policy: the policy that it declares; ``None`` for none.
        code: what its module holds; ``None`` for no module.
        module: the module's name; the distribution's by default.
        target: what the entry point names; the class ``Fake`` in the module by default.
        version: its version.
        entry_points: the whole of ``entry_points.txt``, in place of the one for ``policy``.
        metadata: whether it has the file METADATA.

    Returns:
        Its dist-info folder.
    """
    stem = distribution.replace("-", "_")
    module = module or stem
    info = folder / f"{stem}-{version}.dist-info"
    info.mkdir(parents=True)
    if metadata:
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
    if entry_points is None and policy is not None:
        entry_points = f"[velox.policies]\n{policy} = {target or f'{module}:Fake'}\n"
    if entry_points is not None:
        (info / "entry_points.txt").write_text(entry_points)
    if code is not None:
        (folder / f"{module}.py").write_text(textwrap.dedent(code))
    return info


@pytest.fixture
def see(monkeypatch):
    """Makes folders the only ones in which policies are found, and forgets their modules after."""
    monkeypatch.delenv("VELOX_DISABLE_PLUGINS", raising=False)
    seen = []

    def only(*folders):
        seen.extend(map(str, folders))
        for folder in reversed(folders):
            monkeypatch.syspath_prepend(folder)
        found = partial(importlib.metadata.distributions, path=[str(folder) for folder in folders])
        monkeypatch.setattr(discovery, "distributions", found)

    yield only
    forget_found()  # a policy of the same name may come from another folder next
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(tuple(seen)):
            del sys.modules[name]


@pytest.fixture
def site(tmp_path, see):
    """An empty folder in which policies are found, and no other."""
    see(tmp_path)
    return tmp_path
