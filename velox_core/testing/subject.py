"""The policy under test, however it was given, and the budget that it is tried with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, TypeAlias

import attrs

from ..errors import PolicyConfigError, VeloxError
from ..policy import Policy
from ..registry import load_policy

#: An installed policy's name, a policy with its options, or what makes one when it is given a
#: budget: a policy class, for instance.
PolicyOrFactory: TypeAlias = str | Policy | Callable[..., Policy]

BUDGETS = [12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096]


@attrs.define(eq=False, slots=False)
class Subject:
    """The policy under test. Each run gets a fresh one, with a small budget in place of its own."""

    given: PolicyOrFactory

    def make(self, budget: int | None = None, extras: Iterable[object] = (), **more: Any) -> Policy:
        """A fresh policy.

        Args:
            budget: its budget. Default the subject's.
            extras: hooks that run beside it, besides its own protectors.
            more: options other than it was given with.
        """
        budget = self.budget if budget is None else budget
        more = {"slack": 0, **more}  # it is the core's, and makes rows depend on blocks
        if self._policy is not None:
            policy = attrs.evolve(self._policy, budget=budget, **more)
            extras = (*self._policy.extras, *extras)
        else:
            policy = self._made(budget)
            extras = (*policy.extras, *extras)
            policy = attrs.evolve(policy, **more)  # hooks that are set up take no more extras
        policy.hooks(extras)
        return policy

    @cached_property
    def _policy(self) -> Policy | None:
        """The policy, where it was given as one or by its name."""
        if isinstance(self.given, str):
            return load_policy(self.given)
        return self.given if isinstance(self.given, Policy) else None

    def _made(self, budget: int) -> Policy:
        assert callable(self.given)
        policy: object = self.given(budget=budget)
        if not isinstance(policy, Policy):
            raise PolicyConfigError(
                f"check_policy takes a policy's name, a velox_core.Policy, or what makes one when "
                f"given a budget; {self.label} gave {policy!r}."
            )
        return policy

    @cached_property
    def budget(self) -> int:
        """The smallest of some budgets that leaves the policy rows to choose among."""
        refused: Exception = PolicyConfigError("no budget was tried")
        for budget in BUDGETS:
            try:
                policy = self.make(budget)
                stay = sum(policy.claimed(budget).values())
            except VeloxError as error:
                refused = error
                continue
            if stay <= budget - max(4, budget // 4):
                return budget
            refused = PolicyConfigError(
                f"{self.label}: with budget={budget}, {stay} rows always stay, and too few are "
                "left to choose among."
            )
        raise refused

    @cached_property
    def scopes(self) -> list[str]:
        """The scopes that the policy takes."""
        takes = []
        for scope in ("layer", "head"):
            try:
                self.make(scope=scope)
            except PolicyConfigError:
                continue
            takes.append(scope)
        return takes

    @property
    def label(self) -> str:
        """What it is called, in a word."""
        if isinstance(self.given, str):
            return self.given
        named: Any = type(self.given) if isinstance(self.given, Policy) else self.given
        return str(getattr(named, "__name__", None) or named)

    @property
    def source(self) -> tuple[str, str]:
        """A line that imports it and an expression that makes it."""
        if isinstance(self.given, str):
            return "", repr(self.given)
        policy = isinstance(self.given, Policy)
        named: Any = type(self.given) if policy else self.given
        name = getattr(named, "__qualname__", self.label).partition(".<locals>")[0]
        module = getattr(named, "__module__", "__main__")
        options = ""
        if isinstance(self.given, Policy):
            options = ", ".join(f"{key}={value!r}" for key, value in self.given.options().items())
            options = f"({options})"
        return f"from {module} import {name.partition('.')[0]}", f"{name}{options}"
