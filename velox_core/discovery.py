"""Which policies are installed, from the metadata of their distributions alone.

Nothing is imported here: a plugin that is broken, slow or half installed harms nobody who doesn't
ask for it, and listing policies needs no MLX.

The environment variable ``VELOX_DISABLE_PLUGINS`` leaves plugins out: policy names, distribution
names or ``distribution:policy``, separated by commas; ``all`` (or ``1``) leaves out every one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from urllib.parse import unquote

import attrs

#: The entry-point group in which distributions declare policies.
GROUP = "velox.policies"
#: The entry-point group in which distributions declare protectors.
PROTECTORS = "velox.protectors"
#: The environment variable that leaves plugins out.
DISABLE = "VELOX_DISABLE_PLUGINS"


@attrs.frozen(kw_only=True)
class InstalledPolicy:
    """A policy as the metadata of its distribution has it.

    Args:
        name: the entry point's name; ``load_policy`` takes it.
        distribution: the distribution that declares it.
        version: the distribution's version.
        target: ``"module:attribute"``.
        origin: the folder that the distribution lies in, or ``"editable: …"`` with its source.
        status: ``"ok"``, ``"disabled"``, or the fault that the metadata alone shows. Default
            ``"ok"``.
    """

    name: str
    distribution: str
    version: str
    target: str
    origin: str
    status: str = "ok"

    @property
    def full_name(self) -> str:
        """``distribution:name``, which is never ambiguous."""
        return f"{self.distribution}:{self.name}"

    def __str__(self) -> str:
        return f"policy {self.name!r} ({self.distribution} {self.version})"


class InstalledProtector(InstalledPolicy):
    """A protector, likewise; ``load_protector`` takes its name."""

    def __str__(self) -> str:
        return f"protector {self.name!r} ({self.distribution} {self.version})"


def installed_policies(group: str = GROUP) -> list[InstalledPolicy]:
    """Every policy that a distribution declares, sorted by name. Imports none of them.

    Args:
        group: the entry-point group. Default that of policies; ``"velox.protectors"`` for
            protectors.
    """
    policies = scan(group)
    claims: dict[str, list[str]] = {}
    for policy in policies:
        if policy.status == "ok":
            claims.setdefault(policy.name, []).append(policy.distribution)
    return [
        attrs.evolve(policy, status=f"claimed by {' and '.join(claims[policy.name])}")
        if policy.status == "ok" and len(claims[policy.name]) > 1
        else policy
        for policy in policies
    ]


def origin_of(policy: object, group: str = GROUP) -> InstalledPolicy | None:
    """The entry point that a policy (or its class) came from; ``None`` if it came from none.

    Goes by the class's identity, whatever module it was defined in, and imports nothing: a class
    that exists has been imported.
    """
    cls = policy if isinstance(policy, type) else type(policy)
    for entry in scan(group):
        module, _, attr = entry.target.partition(":")
        found: object = sys.modules.get(module)
        with contextlib.suppress(Exception, SystemExit):  # a module's __getattr__ may do anything
            for part in attr.split("."):
                found = getattr(found, part, None)
        if found is cls:
            return entry
    return None


def scan(group: str = GROUP) -> list[InstalledPolicy]:
    """All of the group, each with the faults of its own: two that claim one name aren't one yet."""
    words = map(str.strip, os.environ.get(DISABLE, "").split(","))
    disabled = {normal(word) for word in words if word}
    found: dict[tuple[str, str], InstalledPolicy] = {}
    if group == PROTECTORS:
        pin = _pin()
        found[pin.name, pin.distribution] = pin
    seen: set[str] = set()
    for dist in distributions():
        try:
            # Private, but in every CPython since 3.10, and free where `name` parses METADATA.
            key = normal(getattr(dist, "_normalized_name", None) or dist.name)
            # A distribution seen twice (an editable install and its source on the path) counts
            # once: the first is the one that imports. With "~" begins what pip left behind.
            if key in seen or key.startswith("~"):
                continue
            seen.add(key)
            for policy in _declared(dist, key, group):
                names = (policy.name, policy.distribution, policy.full_name)
                if disabled and not disabled.isdisjoint({"all", "1", *map(normal, names)}):
                    policy = attrs.evolve(policy, status="disabled")
                found.setdefault((policy.name, policy.distribution), policy)
        except Exception:  # whatever one distribution's metadata holds, the others are listed
            continue
    return [found[key] for key in sorted(found)]


def normal(name: str) -> str:
    """A distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def one_line(error: BaseException) -> str:
    """An exception's type and message in one line, without a full stop at its end."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(" .:")


def _pin() -> InstalledPolicy:
    """The core's own protector, which is there however velox_core was installed."""
    from . import __version__

    return InstalledProtector(
        name="pin",
        distribution="velox-kv",
        version=__version__,
        target="velox_core.protectors:Pin",
        origin=os.path.dirname(os.path.dirname(__file__)),
    )


def _declared(dist: Distribution, key: str, group: str) -> Iterator[InstalledPolicy]:
    # Files are read once, and not by importlib.metadata's own parsers: with a hundred policies
    # installed those would take most of the time.
    text = dist.read_text("entry_points.txt")
    if not text or group not in text:
        return  # nearly always; and no other file of it is read
    kind = InstalledProtector if group == PROTECTORS else InstalledPolicy
    name, version, fault = key, "?", ""
    entries = [(key, "")]
    try:
        entries = list(_entries(text, group))
        metadata = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
        said = dict(re.findall(r"^(Name|Version): *(.*?) *$", metadata.partition("\n\n")[0], re.M))
        if len(said) == 2:
            name, version = said["Name"], said["Version"]
        else:
            fault = "half installed: METADATA is missing"
    except Exception as error:
        fault = f"unreadable metadata: {one_line(error)}"
    folder = str(dist.locate_file(""))
    for policy, value in entries:
        # Blanks around the colon are allowed; extras behind are, and nobody uses them any more.
        target = re.sub(r"\s*\[.*\]$", "", re.sub(r"\s*:\s*", ":", value))
        yield kind(
            name=policy,
            distribution=name,
            version=version,
            target=target,
            origin=_editable(dist) or folder,
            status=fault or _target_fault(target, folder),
        )


def _entries(text: str, group: str) -> Iterator[tuple[str, str]]:
    """Names and targets of a group's entry points, of the text of ``entry_points.txt``."""
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif section == group and line and not line.startswith("#"):
            name, value = line.split("=", 1)
            yield name.strip(), value.strip()


def _editable(dist: Distribution) -> str:
    """Where an editable distribution's source is; nothing for another (PEP 610)."""
    with contextlib.suppress(ValueError, KeyError, AttributeError):  # the folder says enough
        direct = dist.read_text("direct_url.json")
        if direct and json.loads(direct).get("dir_info", {}).get("editable"):
            return f"editable: {unquote(json.loads(direct)['url'].removeprefix('file://'))}"
    return ""


def _target_fault(target: str, folder: str) -> str:
    """What is wrong with a target, as far as can be told without importing; ``"ok"`` if nothing.

    Args:
        target: ``module:attribute``.
        folder: the one that its distribution's metadata lies in.
    """
    if not re.fullmatch(r"[\w.]+:[\w.]+", target):
        return f"malformed target {target!r}: it must be module:attribute"
    module = target.partition(":")[0]
    top = module.partition(".")[0]  # to look for a submodule would import its parents
    if top in sys.modules:
        return "ok"
    # Where it nearly always is: beside the metadata, in a folder that is on the path. To ask the
    # import system takes a look into every folder that is on it.
    beside = os.path.join(folder, top)
    if os.path.isfile(os.path.join(beside, "__init__.py")) or os.path.isfile(f"{beside}.py"):
        return "ok"
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return f"stale: module {top!r} not found"
    if spec.origin is None and module == top:  # a namespace: what an uninstall may leave behind
        return f"stale: folder {top!r} holds no code"
    return "ok"
