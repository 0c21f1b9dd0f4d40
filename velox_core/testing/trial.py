"""What a check works with: fresh caches of the policy under test, and texts to feed them with."""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx

from ..cache import VeloxCache
from ..policy import Policy
from .stream import Stream
from .subject import Subject
from .watcher import Guard

#: The layers that each check is run in: a policy may do another thing in each.
LAYERS = (0, 31)


@attrs.frozen
class Trial:
    """What a check works with.

    Args:
        subject: the policy under test.
        seed: of the texts.
        layer: the one that caches are of.
    """

    subject: Subject
    seed: int
    layer: int = LAYERS[0]

    @property
    def budget(self) -> int:
        return self.subject.budget

    def policy(self, *extras: object, budget: int | None = None, **options: Any) -> Policy:
        """A fresh policy, guarded.

        Args:
            extras: more hooks beside it.
            budget: its budget. Default the subject's.
            options: other options than it was given with.
        """
        return self.subject.make(budget, (Guard(), *extras), **options)

    def cache(self, *extras: object, policy: Policy | None = None, **options: Any) -> VeloxCache:
        """A cache with a fresh policy, or with the given one. Its budget is that of a model's only
        layer, whichever layer it is of."""
        policy = policy or self.policy(*extras, **options)
        return VeloxCache(policy, policy.layer_budget(0, 1), self.layer)

    def stream(self, tokens: int, more: int = 0, dtype: mx.Dtype = mx.float32) -> Stream:
        """A made-up text; another one for each number ``more``."""
        return Stream.random(tokens, self.seed + 1000 * more, dtype)
