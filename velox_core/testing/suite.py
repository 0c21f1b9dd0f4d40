"""All checks, and running them on a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .check import Check, expect
from .copy_checks import COPY_CHECKS
from .hook_checks import HOOK_CHECKS
from .number_checks import NUMBER_CHECKS
from .result import CheckResult
from .row_checks import ROW_CHECKS
from .step_checks import STEP_CHECKS
from .subject import PolicyOrFactory, Subject
from .trial import Trial

CHECKS: list[Check] = [*HOOK_CHECKS, *ROW_CHECKS, *COPY_CHECKS, *NUMBER_CHECKS, *STEP_CHECKS]


def check_policy(
    policy: PolicyOrFactory,
    *,
    only: Iterable[str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    seed: int = 0,
) -> list[CheckResult]:
    """Run the conformance suite on a policy.

    Args:
        policy: an installed policy's name, a policy with its options, or what makes one when
            given a ``budget`` (a policy class, for instance). The budget is always the suite's.
        only: names of the checks to run. Default all.
        expected_failures: names of checks that this policy needn't pass, each with the reason.
            One that passes all the same counts as failed.
        seed: of the random texts. Default 0.

    Returns:
        A result a check, in the suite's order.

    Raises:
        VeloxError: the policy can't be loaded, or no budget leaves it rows to choose among.
        ValueError: a check's name that there isn't.
    """
    expected_failures = expected_failures or {}
    chosen = set(CHECK_NAMES if only is None else only)
    check_names(chosen)
    check_names(expected_failures)
    trial, known = Trial(Subject(policy), seed), dict[str, CheckResult]()
    assert trial.budget  # whatever is wrong with the policy's options is found before any check
    results = [check.result(trial, known) for check in CHECKS if check.name in chosen]
    return [expect(result, expected_failures) for result in results]


CHECK_NAMES = [check.name for check in CHECKS]


def check_names(names: Iterable[str]) -> None:
    """Raise ``ValueError`` for a name that no check has."""
    for name in names:
        if name not in CHECK_NAMES:
            raise ValueError(f"there is no check {name!r}. The checks: {', '.join(CHECK_NAMES)}")
