"""The suite as tests of pytest, a check a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .subject import PolicyOrFactory, Subject
from .suite import CHECKS, check_names


def parametrize_policy_checks(
    policies: Iterable[PolicyOrFactory], expected_failures: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """A decorator for a test that takes ``policy`` and ``check`` and calls ``check(policy)``.

    Args:
        policies: what ``check_policy`` takes, each of them.
        expected_failures: names of checks that needn't pass, each with the reason; the tests are
            marked xfail. One that passes all the same fails.
    """
    import pytest  # here alone: the suite needs it only for this

    expected_failures = expected_failures or {}
    check_names(expected_failures)
    tests = []
    for policy in policies:
        label = Subject(policy).label
        for check in CHECKS:
            reason = expected_failures.get(check.name)
            marks = [] if reason is None else [pytest.mark.xfail(reason=reason, strict=True)]
            tests.append(pytest.param(policy, check, id=f"{label}-{check.name}", marks=marks))
    return pytest.mark.parametrize(("policy", "check"), tests)
