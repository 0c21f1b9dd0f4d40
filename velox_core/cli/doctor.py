"""``velox doctor``: whether the machine, MLX, mlx-lm and each plugin are as they should be."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import attrs
import click

from ..discovery import GROUP, PROTECTORS, installed_policies, one_line
from ..errors import VeloxError
from .output import console, table

FAST_BLAS = re.compile(r"lib(openblas|mkl|blis|flexiblas|atlas|nvblas)")
GET_BLAS = (
    "prompts are read some 30 times slower than they could be: "
    "apt-get install libopenblas0-pthread, then start with LD_PRELOAD=libopenblas.so.0"
)


@attrs.frozen
class Check:
    """One finding: what was looked at, what it is, its status (``"ok"``, ``"warning"``,
    ``"disabled"`` or ``"failed"``), and the mend."""

    what: str
    value: str
    status: str = "ok"
    mend: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check MLX, mlx-lm and every installed policy and protector, by really loading it.

    The exit code is 1 if anything failed; warnings leave it at 0.
    """
    # A plugin that prints on import doesn't spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        checks = [*machine(), *plugins()]
    if as_json:
        click.echo(json.dumps([attrs.asdict(check) for check in checks], indent=2))
    else:
        headings = [field.name for field in attrs.fields(Check)]
        rows = [[str(cell) for cell in attrs.astuple(check)] for check in checks]
        console().print(table(headings, rows, status="status"))
    if any(check.status == "failed" for check in checks):
        context.exit(1)


def machine() -> Iterator[Check]:
    """Python, MLX, BLAS and mlx-lm."""
    yield Check("Python", f"{platform.python_version()} ({sys.executable})")
    yield from mlx()
    yield mlx_lm()


def mlx() -> Iterator[Check]:
    """MLX's version and device, and on Linux's CPU what makes it quick."""
    try:
        import mlx.core as mx

        device = mx.default_device()
        mx.eval(mx.ones((2, 2)) @ mx.ones((2, 2)))
    except Exception as error:
        mend = "Reinstall mlx"
        if sys.platform == "linux":  # where the plain wheel has no backend
            mend = f"{sys.executable} -m pip install 'mlx[cpu]' (or 'mlx[cuda12]', 'mlx[cuda13]')"
        yield Check("MLX", one_line(error), "failed", mend)
        return
    on = {mx.cpu: "CPU", mx.gpu: "GPU"}[device.type]
    yield Check("MLX", f"{metadata.version('mlx')} on the {on}")
    if sys.platform == "linux" and device.type == mx.cpu:
        yield blas(Path("/proc/self/maps").read_text())
        yield compiler()


def blas(maps: str) -> Check:
    """Which BLAS is loaded, from a process's memory map.

    MLX's wheel brings the reference BLAS; a fast one that is preloaded takes its place.
    """
    loaded = {Path(line.split()[-1]).name for line in maps.splitlines() if line.split()}
    fast = sorted(name for name in loaded if FAST_BLAS.match(name))
    if fast:
        return Check("BLAS", ", ".join(fast))
    slow = sorted(name for name in loaded if re.match(r"lib[cf]?blas", name))
    return Check("BLAS", f"reference BLAS ({', '.join(slow) or 'none seen'})", "warning", GET_BLAS)


def compiler() -> Check:
    """The C++ compiler, without which MLX can't replay a decode step."""
    found = shutil.which("g++")
    if found:
        return Check("compiler", found)
    mend = (
        "a policy's decode steps are some 10 percent slower than they could be: apt-get install g++"
    )
    return Check("compiler", "no g++", "warning", mend)


def mlx_lm() -> Check:
    """mlx-lm's version against the range that the core's own metadata asks for."""
    from packaging.requirements import Requirement

    try:
        found = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        return Check("mlx-lm", "not installed", "failed", f"{sys.executable} -m pip install mlx-lm")
    try:
        needs = [Requirement(text) for text in metadata.requires("velox-kv") or []]
    except metadata.PackageNotFoundError:
        return Check("mlx-lm", found, "warning", "velox-kv isn't installed, so no range is known")
    for need in needs:
        if need.name == "mlx-lm" and not need.specifier.contains(found, prereleases=True):
            mend = f"{sys.executable} -m pip install '{need}'"
            return Check("mlx-lm", f"{found}, outside {need.specifier}", "failed", mend)
    ranges = ", ".join(str(need.specifier) for need in needs if need.name == "mlx-lm")
    return Check("mlx-lm", f"{found} (supported: {ranges})")


def plugins() -> Iterator[Check]:
    """Each policy, loaded with its defaults, and each protector, which may have none."""
    from ..registry import check_protector, load_policy

    policies = list(loaded(GROUP, "policy", load_policy))
    if not policies:
        mend = f"{sys.executable} -m pip install velox-tova"
        policies = [Check("policies", "none installed", "warning", mend)]
    yield from policies
    yield from loaded(PROTECTORS, "protector", check_protector)


def loaded(group: str, noun: str, load: Callable[[str], object]) -> Iterator[Check]:
    """Each plugin of an entry-point group, by loading it."""
    for plugin in installed_policies(group):
        value = f"{plugin.distribution} {plugin.version}, {plugin.origin}"
        what = f"{noun} {plugin.name}"
        if plugin.status == "disabled":
            yield Check(what, value, "disabled")
            continue
        try:
            load(plugin.full_name)
        except VeloxError as error:
            yield Check(what, value, "failed", str(error))
        else:
            claimed = plugin.status != "ok"
            mend = f"{plugin.status}: choose with {plugin.full_name}" if claimed else ""
            yield Check(what, value, "warning" if claimed else "ok", mend)
