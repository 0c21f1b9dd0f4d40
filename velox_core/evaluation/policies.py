"""Policies as a command line names them: ``all``, or ``tova,morphkv:window=8,scope=layer``."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import attrs

from ..discovery import installed_policies
from ..errors import PolicyConfigError, UnknownPolicyError
from ..policy import Policy
from ..registry import load_policy
from .text import digest


@attrs.frozen
class PolicySpec:
    """A policy that was asked for.

    Args:
        text: as it was asked for, and as tables show it: ``"morphkv:window=8"``.
        name: as ``load_policy`` takes it.
        options: likewise. Default none.
    """

    text: str
    name: str
    options: dict[str, Any] = attrs.field(factory=dict)

    def load(self, budget: int) -> Policy:
        """The policy with that budget; what ``load_policy`` raises."""
        return load_policy(self.name, budget=budget, **self.options)


def parse_policies(text: str) -> list[PolicySpec]:
    """The policies of a list with commas; ``"all"`` stands for each that is installed.

    Options follow a colon: ``name:key=value,key=value``. Values are JSON, or else taken as text.

    Raises:
        PolicyConfigError: the list is empty or malformed, or names a policy twice.
        UnknownPolicyError: ``all``, and none is installed.
    """
    if text.strip() == "all":
        found = [policy for policy in installed_policies() if policy.status != "disabled"]
        if not found:
            raise UnknownPolicyError("no policy is installed; to get one: pip install velox-tova")
        names = [policy.name for policy in found]
        unique = [
            policy.name if names.count(policy.name) == 1 else policy.full_name for policy in found
        ]
        return [PolicySpec(name, name) for name in unique]
    specs: list[PolicySpec] = []
    for piece in text.split(","):
        before, equals, value = (part.strip() for part in piece.partition("="))
        name, _, key = before.rpartition(":") if equals else (before, "", "")
        if name:
            specs.append(PolicySpec(name, name))
        if equals and key and value and specs:  # an option, of the newest policy
            if key in ("budget", "protect"):
                hint = ": it is one for all, --budget or --budgets" if key == "budget" else ""
                raise PolicyConfigError(f"{key!r} can't be given as an option of {text!r}{hint}")
            last = specs.pop()
            shown = f"{last.text}{',' if last.options else ':'}{key}={value}"
            specs.append(PolicySpec(shown, last.name, {**last.options, key: option_value(value)}))
        elif equals or not name:
            raise PolicyConfigError(
                f"{text!r} isn't a list of policies: wanted 'all', or names with commas between, "
                "each with options if you like: tova,morphkv:window=8,scope=layer"
            )
    texts = [spec.text for spec in specs]
    for twice in texts:
        if texts.count(twice) > 1:
            raise PolicyConfigError(f"the policy {twice} is named twice in {text!r}")
    return specs


def code_of(policy: Policy) -> str:
    """A digest of the files that the policy's class comes from: what an older version gave, or the
    rule before it was changed, isn't its own. Empty where there are no files."""
    try:
        path = Path(inspect.getfile(type(policy)))
        files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
        return digest([file.read_text("utf-8", errors="replace") for file in files])
    except (TypeError, OSError):
        return ""


def settings_of(policy: Policy) -> dict[str, Any]:
    """What a record says of a policy beside its name and its budget: ``options`` and ``code``."""
    options = {name: value for name, value in policy.options().items() if name != "budget"}
    return {"options": options, "code": code_of(policy)}


def unplaced(text: str) -> str:
    """The policy of such a text without ``positions`` and ``max_age``."""
    return re.sub(r"(?<=[:,])(positions|max_age)=[^,]*,?", "", text).rstrip(":,")


def option_value(text: str) -> Any:
    """An option's value from a command line: JSON, or Python's True or False, or else the text."""
    try:
        return json.loads({"True": "true", "False": "false"}.get(text, text))
    except ValueError:
        return text
