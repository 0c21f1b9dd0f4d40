"""Protectors: rows that stay, beside any policy and without touching it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import mlx.core as mx

from .errors import PolicyConfigError
from .hooks import HOOK_VERSION, hookimpl
from .rows import Rows

if TYPE_CHECKING:
    from .policy import Policy

__all__ = ["Pin", "Protector"]


@attrs.frozen(eq=False)
class Protector:
    """What a protector is made of: a ``protect`` hook, and its options as attrs fields.

    Like a policy it is stateless, and its class says the hook version that it was written for.
    Declared as an entry point in the group ``velox.protectors`` it is found again when a cache is
    loaded that was saved with it.
    """

    hook_version: ClassVar[int]
    #: Whether its hook depends on nothing but ``rows`` and the options, as ``Policy.pure``.
    pure: ClassVar[bool] = False

    def reserved(self, policy: Policy, budget: int) -> dict[str, int]:
        """Rows of ``budget`` that it may claim besides the policy's sinks, by name."""
        return {}

    def options(self) -> dict[str, Any]:
        """The options, ready for ``load_protector(name, **options)`` and for JSON."""
        return options_of(self)


def _spans(tokens: Any) -> tuple[tuple[int, int], ...]:
    """Positions as ``(start, stop)`` pairs in order, none touching the next."""
    wrong = PolicyConfigError(
        f"Pin: tokens={tokens!r} isn't allowed; it must hold positions, whole numbers of at least "
        "0, or pairs of a first one and an end, as range(0, 120), [0, 1, 7] or [[0, 120]]."
    )
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise wrong
    if isinstance(tokens, range) and tokens.step == 1:
        tokens = [(tokens.start, tokens.stop)]
    spans: list[tuple[int, int]] = []
    for item in tokens:
        pair = (item, item + 1) if _whole(item) else item
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(map(_whole, pair)):
            raise wrong
        if not 0 <= pair[0] < pair[1]:
            raise wrong
        spans.append((int(pair[0]), int(pair[1])))
    if not spans:
        raise wrong
    merged = [min(spans)]
    for start, stop in sorted(spans):
        if start > merged[-1][1]:
            merged.append((start, stop))
        else:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
    return tuple(merged)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@attrs.frozen(eq=False)
class Pin(Protector):
    """Tokens that are never evicted, by their positions in the sequence; in a batch, in each.

    Args:
        tokens: positions, as a ``range`` or any whole numbers of at least 0, or ``(start, stop)``
            pairs, as ``options()`` gives them.

    Raises:
        PolicyConfigError: there are none, or one that can't be a position.
    """

    hook_version: ClassVar[int] = HOOK_VERSION
    pure: ClassVar[bool] = True

    tokens: tuple[tuple[int, int], ...] = attrs.field(converter=_spans)

    @hookimpl
    def protect(self, rows: Rows) -> mx.array:
        """The pinned tokens' rows stay."""
        pinned = mx.zeros(rows.positions.shape, mx.bool_)
        for start, stop in self.tokens:
            pinned = pinned | ((rows.positions >= start) & (rows.positions < stop))
        return pinned

    def reserved(self, policy: Policy, budget: int) -> dict[str, int]:
        beyond = [(max(start, policy.n_sink), stop) for start, stop in self.tokens]
        spans = [(start, stop) for start, stop in beyond if start < stop]
        if not spans:
            return {}
        names = ", ".join(
            f"{start} to {stop - 1}" if stop - start > 1 else str(start) for start, stop in spans
        )
        return {f"pinned: tokens {names}": sum(stop - start for start, stop in spans)}


def options_of(instance: Any) -> dict[str, Any]:
    """The options of a policy or protector: what its class takes, by name."""
    return {
        f.alias: list(v) if isinstance(v := getattr(instance, f.name), tuple) else v
        for f in attrs.fields(type(instance))
        if f.init
    }
