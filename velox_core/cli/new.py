"""``velox new``: a package with a policy, complete and small, to start from."""

from __future__ import annotations

import builtins
import json
import keyword
import re
import shutil
import string
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import click

from ..discovery import normal

#: Names of ours; a policy is named as its distribution without "velox-".
OURS = {"velox", "kv", "core", "tova", "h2o", "morphkv", "streaming"}
#: Packages that a policy needs, or would hide: a package of such a name would break it.
MODULES = {"attr", "attrs", "mlx", "mlx_lm", "pluggy", "pytest", "tests", "velox_core"}
#: Names that the template's files import, and Python's own: no policy's class may take them.
CLASSES = {*dir(builtins), "Check", "Policy", "Rows"}
TEMPLATE = Path(__file__).parent / "template"
LONGEST = 40  # characters; longer names would break lines


@attrs.frozen
class Names:
    """What a package and its parts are called.

    Args:
        name: the distribution, and its folder.
        package: the import package.
        policy: the policy, as ``load_policy`` takes it.
        cls: the policy's class.
    """

    name: str
    package: str
    policy: str
    cls: str

    @classmethod
    def of(cls, name: str) -> Names:
        """The names that follow from a distribution's name.

        Raises:
            click.UsageError: it can't be one, or is one of ours or of Python's.
        """
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
            raise click.UsageError(
                f"{name!r} can't be a distribution's name: it must consist of letters, digits "
                "and -, and begin and end with a letter or digit"
            )
        name = normal(name)
        package = name.replace("-", "_")
        policy = name.removeprefix("velox-")
        if policy in OURS:
            raise click.UsageError(f"{name!r} is a name of velox's own: choose another")
        if not package.isidentifier() or keyword.iskeyword(package):
            raise click.UsageError(
                f"{name!r} gives no importable package ({package}): choose another"
            )
        if package in sys.stdlib_module_names | MODULES:
            raise click.UsageError(f"a package {package!r} would hide another one: choose another")
        if len(name) > LONGEST:
            raise click.UsageError(f"{name!r} is longer than {LONGEST} characters: choose another")
        words = policy if policy.replace("-", "_").isidentifier() else name
        camel = "".join(word.capitalize() for word in words.split("-"))
        if camel in CLASSES:
            camel += "Policy"
        return cls(name, package, policy, camel)


@click.command()
@click.argument("name")
@click.option("--author", metavar="NAME", help='Who writes it: "Ann Other", or with "<address>".')
def new(name: str, author: str | None) -> None:
    """Write a package with an eviction policy into the new folder NAME.

    It is complete: a rule that works, tests that run velox's conformance suite, a README, a
    licence and a CI workflow. The policy is named NAME, without a leading "velox-".
    """
    names = Names.of(name)
    target = Path(names.name)
    write(target, {**attrs.asdict(names), **facts(names, author)})
    install = f"{Path(sys.executable).name} -m pip install -e '.[dev]'"
    click.echo(
        f"{target}/ has a package with the policy {names.policy!r}. Next:\n\n"
        f"  cd {target}\n"
        f"  {install}\n"
        f"  pytest\n"
        f"  velox check {names.policy}\n\n"
        f"The rule is in {names.package}/__init__.py: make it yours, and its test with it."
    )


def facts(names: Names, author: str | None) -> dict[str, str]:
    """What else the files say."""
    from .. import HOOK_VERSION, __version__

    major, minor = __version__.split(".")[:2]
    holder, authors = f"the authors of {names.name}", ""
    if author is not None:
        found = re.fullmatch(r"([^<>]*[^<>\s])(?:\s*<([^<>@\s]+@[^<>@\s]+)>)?", author.strip())
        if not found or not author.isprintable():
            raise click.UsageError(f"--author {author!r} must be a name, or 'Name <address>'")
        holder, address = found.groups()
        entry = f"name = {toml(holder)}" + (f", email = {toml(address)}" if address else "")
        authors = f"authors = [{{ {entry} }}]\n"
    return {
        "authors": authors,
        "holder": holder,
        "year": time.strftime("%Y"),
        "versions": f">={major}.{minor},<{major}.{int(minor) + 1}",
        "hook_version": str(HOOK_VERSION),
    }


def toml(text: str) -> str:
    """A printable text as a TOML string."""
    return json.dumps(text, ensure_ascii=False)


def write(target: Path, words: dict[str, str]) -> None:
    """Write the folder, all of it or nothing, and never over anything.

    Raises:
        click.ClickException: there is something of that name, or it can't be written.
    """
    if target.exists() or target.is_symlink():
        raise click.ClickException(f"{target} exists already, and nothing is ever overwritten")
    beside = None
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.absolute().parent))
        made = beside / target.name
        for path, text in rendered(TEMPLATE, words):
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_text(text, encoding="utf-8")
        made.rename(target)
    except OSError as error:
        raise click.ClickException(f"can't write {target}: {error.strerror or error}") from error
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)


def rendered(folder: Path, words: dict[str, str]) -> Iterator[tuple[Path, str]]:
    """The template's files, with the words filled in."""
    for entry in sorted(folder.iterdir()):
        name = re.sub(r"^dot_", ".", entry.name).replace("__package__", words["package"])
        if entry.is_dir():
            for path, text in rendered(entry, words):
                yield name / path, text
        elif name.endswith(".tmpl"):
            text = string.Template(entry.read_text(encoding="utf-8")).substitute(words)
            yield Path(name.removesuffix(".tmpl")), text
