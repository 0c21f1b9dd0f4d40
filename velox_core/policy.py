"""The base class of policies: the options that all of them have, and what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import attrs
import mlx.core as mx
import pluggy

from .errors import PolicyConfigError
from .hooks import build_hooks, hookimpl, observes_only
from .protectors import Protector, options_of
from .rows import Rows


def at_least(minimum: int) -> Any:
    """An attrs validator: a whole number of at least ``minimum``."""

    def check(policy: Policy, attribute: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise PolicyConfigError(
                f"{type(policy).__name__}: {attribute.name}={value!r} isn't allowed; "
                f"it must be a whole number of at least {minimum}."
            )

    return check


def one_of(*allowed: str) -> Any:
    """An attrs validator: one of the given words."""

    def check(policy: Policy, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in allowed:
            raise PolicyConfigError(
                f"{type(policy).__name__}: {attribute.name}={value!r} isn't allowed; "
                f"it must be one of {', '.join(map(repr, allowed))}."
            )

    return check


def _budget(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _check_budget(policy: Policy, attribute: attrs.Attribute[Any], value: object) -> None:
    for rows in value if isinstance(value, tuple) and value else (value,):
        at_least(1)(policy, attribute, rows)


@attrs.frozen(eq=False, kw_only=True)
class Policy:
    """What every eviction policy is made of. A policy is stateless: it holds options, and all
    that changes lives with the rows, in the cache.

    Args:
        budget: rows that each layer keeps, or a sequence with one number a layer. Default 512.
        n_sink: the first tokens of a sequence, which always stay. Default 4.
        scope: ``"layer"``, one choice for all heads of a layer (default), or ``"head"``, a choice
            a KV head.
        queries: ``"model"``, the real queries that the model attends with (default), or
            ``"keys"``, the incoming keys in their place, for a model whose attention can't be
            observed.
        positions: where rows stand for the model. ``"absolute"`` (default): where their tokens do.
            ``"contiguous"``: numbered by their place in the cache, as in StreamingLLM's paper.
            ``"compressed"``: wide gaps between neighbours narrowed, as in TOVA's. The last two
            need a model whose RoPE can be done again; keys are held unrotated then.
        slack: decoded tokens for which a layer may hold more than its budget; they are then cut
            together, as a block of a prompt is. Quicker where many small operations are dear, and
            exact for fewer steps. Default 0: a row goes at each step.
        max_age: when rows must go, those of tokens more than this far back go first, whatever
            their score; sinks and pinned rows stay. Default None: none is too old.

    Raises:
        PolicyConfigError: an option out of its range.
    """

    #: The hook version that the policy was written for; each policy class says it itself.
    hook_version: ClassVar[int]
    #: How many of the latest queries ``score`` looks at; 0 for none. The queries of the newest
    #: block are there in any case, unless this is 0.
    n_queries: ClassVar[int] = 0
    #: Whether ``score`` must run after every block, and not only when rows must go.
    every_step: ClassVar[bool] = False
    #: Where a row's score is made of parts that are remembered one by one: how many. ``score``
    #: then gives ``[batch, heads or 1, rows, parts]``, and ``fuse`` makes one number of them. It
    #: takes ``every_step``. 0: a score is one number.
    score_parts: ClassVar[int] = 0
    #: Whether what the hooks build depends on nothing but ``rows`` and the options: no random
    #: numbers, no counting, no printing. Decoding is quicker then, as it can be replayed, and
    #: done for all layers at once.
    pure: ClassVar[bool] = False

    budget: int | tuple[int, ...] = attrs.field(
        default=512, converter=_budget, validator=_check_budget
    )
    n_sink: int = attrs.field(default=4, validator=at_least(0))
    scope: Literal["layer", "head"] = attrs.field(
        default="layer", validator=one_of("layer", "head")
    )
    queries: Literal["model", "keys"] = attrs.field(
        default="model", validator=one_of("model", "keys")
    )
    positions: Literal["absolute", "contiguous", "compressed"] = attrs.field(
        default="absolute", validator=one_of("absolute", "contiguous", "compressed")
    )
    slack: int = attrs.field(default=0, validator=at_least(0))
    max_age: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(at_least(1))
    )
    #: Protectors and observers beside it, from ``load_policy(protect=)``.
    extras: tuple[object, ...] = attrs.field(default=(), init=False, repr=False)
    _hooks: pluggy.PluginManager | None = attrs.field(default=None, init=False, repr=False)
    _spec: str | None = attrs.field(default=None, init=False, repr=False)  # see description.py
    #: What a decode step's hooks built, to be replayed: in each layer (eviction.py), and for all
    #: layers at once (turns.py), None where that can't be done.
    _replays: dict[int | str, Callable[..., Any] | None] = attrs.field(
        factory=dict, init=False, repr=False
    )

    @hookimpl
    def protect(self, rows: Rows) -> mx.array:
        """The sinks stay."""
        return rows.positions < self.n_sink

    def fuse(self, parts: mx.array) -> mx.array:
        """A row's score from its parts, with ``score_parts``: their sum.

        Args:
            parts: ``[batch, heads or 1, rows, parts]`` float32

        Returns:
            ``[batch, heads or 1, rows]`` float32
        """
        return parts.sum(axis=-1)

    def score_shape(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what ``score`` gives for rows of this shape."""
        return (*rows, self.score_parts) if self.score_parts else tuple(rows)

    def reserved(self, budget: int) -> dict[str, int]:
        """Rows of ``budget`` that ``protect`` may claim, by name; the newest row comes on top."""
        return {"n_sink": self.n_sink}

    def claimed(self, budget: int) -> dict[str, int]:
        """Rows of ``budget`` that the policy and its protectors may claim, by name."""
        claimed = dict(self.reserved(budget))
        for extra in self.extras:
            if isinstance(extra, Protector):
                claimed |= extra.reserved(self, budget)
        return claimed

    def check(self) -> None:
        """Raise ``PolicyConfigError`` unless each budget has room for the rows that must stay."""
        for budget in self.budget if isinstance(self.budget, tuple) else (self.budget,):
            reserved = {**self.claimed(budget), "the newest row": 1}
            if budget < sum(reserved.values()):
                parts = " + ".join(f"{rows} ({name})" for name, rows in reserved.items())
                raise PolicyConfigError(
                    f"{type(self).__name__}: budget={budget} leaves no room: {parts} = "
                    f"{sum(reserved.values())} rows always stay. Raise the budget or lower them."
                )

    def layer_budget(self, layer: int, n_layers: int) -> int:
        """The rows that layer ``layer`` of ``n_layers`` keeps."""
        if not isinstance(self.budget, tuple):
            return self.budget
        if len(self.budget) != n_layers:
            raise PolicyConfigError(
                f"{type(self).__name__}: budget has {len(self.budget)} numbers and the model has "
                f"{n_layers} layers; give one number a layer, or a single one for all."
            )
        return self.budget[layer]

    def options(self) -> dict[str, Any]:
        """The options, ready for ``load_policy(name, **options)`` and for JSON."""
        return options_of(self)

    def hooks(self, extras: Iterable[object] = ()) -> pluggy.PluginManager:
        """The manager that calls this policy's hooks, made once. ``extras`` (protectors,
        observers) are taken when it is made."""
        extras = tuple(extras)
        if self._hooks is None:
            object.__setattr__(self, "extras", extras)
            self.check()
            object.__setattr__(self, "_hooks", build_hooks(self, extras))
        elif extras:
            raise PolicyConfigError(
                f"{type(self).__name__}: its hooks are set up already, and protectors can't join "
                "later. Give them to load_policy(…, protect=[…])."
            )
        assert self._hooks is not None
        return self._hooks

    @property
    def replayable(self) -> bool:
        """Whether it and all that stand beside it are ``pure``."""
        return self.pure and all(getattr(extra, "pure", False) for extra in self.extras)

    def chooses_as(self, other: Policy) -> bool:
        """Whether both always keep the same rows: the same class, options and protectors."""
        return (
            type(self) is type(other)
            and self.options() == other.options()
            and _choosers(self) == _choosers(other)
        )

    # A copied cache shares its policy: nothing in it changes, and a manager can't be copied.
    def __deepcopy__(self, memo: object) -> Policy:
        return self


def _choosers(policy: Policy) -> list[object]:
    """What makes two sets of protectors equal; observers don't matter."""
    return [
        (type(extra), extra.options()) if isinstance(extra, Protector) else extra
        for extra in policy.extras
        if not observes_only(extra)
    ]
