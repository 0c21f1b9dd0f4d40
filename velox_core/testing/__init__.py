"""The conformance suite: whether an eviction policy, anyone's, does what velox expects of one.

In a policy's own tests::

    from velox_core.testing import parametrize_policy_checks

    @parametrize_policy_checks([MyPolicy, MyPolicy(window=3)])
    def test_conformance(policy, check):
        check(policy)

``check_policy(MyPolicy)`` gives the same as data, and ``velox check my-policy`` prints it;
``example_rows`` is for tests of what is particular to a policy. Layers'
caches are fed with small random tensors, so no model is needed and a check takes a fraction of a
second.
"""

from .check import Check
from .example import example_rows
from .failure import CheckFailed
from .parametrize import parametrize_policy_checks
from .result import CheckResult
from .suite import CHECKS, check_policy

__all__ = [
    "CHECKS",
    "Check",
    "CheckFailed",
    "CheckResult",
    "check_policy",
    "example_rows",
    "parametrize_policy_checks",
]
