"""The conformance suite: ours pass it, broken policies fail the right check and no other."""

import ast
import subprocess
import sys
import unittest

import broken_policies as broken
import mlx.core as mx
import pytest

from velox_core import Pin, PolicyConfigError, UnknownPolicyError, load_policy
from velox_core.testing import CHECKS, CheckFailed, check_policy, parametrize_policy_checks

OURS = ["tova", "h2o", "morphkv", "streaming"]

# Which checks each broken policy fails, all of them.
FAILS = {
    broken.Right: set(),
    broken.NoReturn: {"score"},
    broken.WrongShape: {"score"},
    broken.OneScope: {"score"},
    broken.OneSequence: {"score"},
    broken.InfiniteScores: {"score"},
    broken.KeysType: {"dtypes"},
    broken.DividesByZero: {"ties"},
    broken.Overflows: {"magnitudes"},
    broken.IgnoresProtection: {"protected"},
    broken.KeepsEmptyRows: {"evict"},
    broken.OneRowTwice: {"evict"},
    broken.BeyondTheRows: {"evict"},
    broken.ForgetsNaN: {"nan_keys"},
    broken.ForgetsSinks: {"protected"},
    broken.ClaimsInSecret: {"protected"},
    broken.ClaimsAll: {"protected"},
    broken.TwiceTheBudget: {"budget"},
    broken.HalfTheBudget: {"kvcache"},
    broken.ChangesKeys: {"offsets"},
    broken.Remembers: {"stateless"},
    broken.Random: {"deterministic"},
    broken.CopiesLoseOptions: {"copies"},
    broken.OptionsDrift: {"saved"},
    broken.NoJSON: {"saved"},
    broken.LastQueryOnly: {"chunking"},
    broken.DecaysEachCall: {"batch", "chunking"},
    broken.MixesSequences: {"batch"},
    broken.Waits: {"waiting"},
    broken.IfOfAnArray: {"waiting"},
    broken.Slow: {"cost"},
}


@parametrize_policy_checks(OURS)
def test_ours_pass(policy, check):
    check(policy)


@pytest.mark.parametrize("policy", FAILS, ids=lambda policy: policy.__name__)
def test_broken_ones_fail_the_right_checks(policy):
    results = check_policy(policy)
    failed = {
        r.name: f"expected {r.expected}; got {r.got}" for r in results if r.outcome == "failed"
    }
    assert set(failed) == FAILS[policy], failed
