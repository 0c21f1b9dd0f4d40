"""What a record of kind ``"retention"`` says: who stayed for how long, and how much is recent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

CLASSES = {
    "f": "first token",
    "p": "punctuation",
    "d": "digits",
    "c": "capitalised",
    "b": "blank",
    "o": "other",
}


def classify(pieces: Iterable[str]) -> str:
    """A letter for each token's text: the first token, blanks (line ends too), what has a digit,
    what has neither letter nor digit, what begins with a capital, and the rest."""
    letters = []
    for position, piece in enumerate(pieces):
        text = piece.strip()
        if not position:
            letters.append("f")
        elif not text:
            letters.append("b")
        elif any(map(str.isdigit, text)):
            letters.append("d")
        elif not any(map(str.isalpha, text)):
            letters.append("p")
        else:
            letters.append("c" if text[0].isupper() else "o")
    return "".join(letters)


@attrs.frozen
class Summary:
    """What one layer of one policy kept.

    Args:
        policy: the policy.
        layer: the layer.
        recent: of the rows held, the share that were among the newest ``budget`` tokens, the mean
            over the steps from twice the budget on (from where there are as many older tokens to
            choose from), or the last step in a shorter text. A plain window has 1.
        first_stays: whether every head held the first token to the end.
        lives: by class, for how many steps a token was held, the mean over its tokens and the
            heads. Tokens held to the end count up to the end, so means are at least that; the last
            ``budget`` tokens, which a plain window would hold to the end too, are left out.
    """

    policy: str
    layer: int
    recent: float
    first_stays: bool
    lives: dict[str, float]


def summaries(record: dict[str, Any]) -> list[Summary]:
    """A summary of each layer that was watched."""
    n = record["tokens"]
    position = np.arange(n)
    found = []
    for i, (layer, budget) in enumerate(zip(record["layers"], record["budgets"], strict=True)):
        life = _steps(record, i) - position
        counted = life[:, : max(n - budget, 0)].mean(axis=0)
        letters = np.array(list(record["classes"]))[: len(counted)]
        held = held_share(record, i)
        newest = position[:, None] - position < budget
        later = slice(min(2 * budget, n - 1), None)
        recent = (held * newest)[later].sum(axis=1) / held[later].sum(axis=1)
        found.append(
            Summary(
                policy=record["policy"],
                layer=layer,
                recent=float(recent.mean()),
                first_stays=bool((life[:, 0] == n).all()),
                lives={
                    name: float(counted[letters == letter].mean())
                    for letter, name in CLASSES.items()
                    if letter in letters
                },
            )
        )
    return found


def held_share(record: dict[str, Any], index: int) -> np.ndarray[Any, Any]:
    """``[steps, tokens]``: the share of heads that held a token after a step, in the layer
    ``record["layers"][index]``."""
    n = record["tokens"]
    step = np.arange(n)[:, None]
    share = np.zeros((n, n))
    for head in _steps(record, index):
        share += (np.arange(n) <= step) & (step < head)
    return share / len(record["evicted_at"][index])


def _steps(record: dict[str, Any], index: int) -> np.ndarray[Any, Any]:
    """``[heads, tokens]``: the step that each token went at, or how many there were."""
    n = record["tokens"]
    return np.array([[n if s is None else s for s in head] for head in record["evicted_at"][index]])
