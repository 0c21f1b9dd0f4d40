"""What a check raises when a policy doesn't pass it."""

from __future__ import annotations


class CheckFailed(AssertionError):
    """A policy doesn't do what a check wants of it."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}; got {got}")
        self.expected, self.got = expected, got
