"""What a check found, as data."""

from __future__ import annotations

from typing import Literal

import attrs

Outcome = Literal["passed", "failed", "skipped", "expected failure"]


@attrs.frozen(kw_only=True)
class CheckResult:
    """What one check found of one policy.

    Args:
        name: the check's name.
        outcome: ``"passed"``, ``"failed"``, ``"expected failure"``, or ``"skipped"``: it failed,
            but a check that it builds on failed too, so this one says nothing of its own.
        expected: what the check wants.
        got: what came instead; where it passed, what is worth knowing, or nothing.
        repeat: a program that runs this check alone.
    """

    name: str
    outcome: Outcome
    expected: str
    got: str = ""
    repeat: str = ""

    @property
    def ok(self) -> bool:
        """Whether it passed, or failed as expected."""
        return self.outcome in ("passed", "expected failure")

    def __str__(self) -> str:
        return f"{self.outcome}: {self.name}" + (f": {self.got}" if self.got else "")
