"""Whether a model still finds a number that was said once in a long text.

The prompt is a filler with one more piece in its midst, and a question at its end, which is left
for the model to complete::

    The grass is green. The sky is blue. … The pass key: 71432. Remember the pass key: 71432. The
    grass is green. … What was the pass key? The pass key:

It is plain text, without a chat template: models of 135M parameters complete it and don't answer
it. The piece lies at the end of the filler's sentence that is nearest to a depth; 0 is the prompt's
beginning, 100 comes just before the question. The prompt is read in blocks, as mlx-lm reads one,
and its last token and the key one at a time. The key counts as found if each of its tokens is the
likeliest, that is if greedy decoding gives it.

A record, of kind ``"passkey"``, holds one prompt, read with one cache:

- ``filler`` (its name), ``digest`` (of all that is said) and ``block``: what was read and how;
- ``policy``, ``options``, ``code`` and ``budget``: with which cache, as in a perplexity record;
- ``length`` (tokens, the key's included, at most; less than a sentence short), ``depth`` (percent)
  and ``trial`` (0, 1, …): which prompt; its key follows from these;
- ``found``, ``probability``, the geometric mean of those that the key's tokens had, and
  ``seconds``.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import attrs
import mlx.core as mx

from ..errors import VeloxError
from .caches import arrays
from .perplexity import token_nll

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
NEEDLE = "The pass key: {key}. Remember the pass key: {key}. "
QUESTION = "What was the pass key? The pass key:"
ANSWER = " {key}"


@attrs.frozen
class Prompt:
    """The tokens of a prompt, and of the key that ought to come next."""

    tokens: list[int]
    answer: list[int]

    @property
    def cost(self) -> int:
        """Tokens that are read."""
        return len(self.tokens) + len(self.answer) - 1


class Prompts:
    """Makes prompts of a filler.

    Args:
        encode: gives the tokens of a text.
        filler: the text; by default five short sentences, over and over.

    Raises:
        VeloxError: the filler is blank.
    """

    def __init__(self, encode: Callable[[str], list[int]], filler: str = FILLER) -> None:
        self.encode = encode
        #: Pieces that end where a sentence or a line does, with the blanks that follow.
        self.sentences = [
            piece if piece[-1].isspace() else f"{piece} "
            for piece in re.findall(r"\S.*?(?:(?:[.!?](?=\s)|\n|\Z)\s*)", filler, re.DOTALL)
        ]
        if not self.sentences:
            raise VeloxError("the filler is blank: give a text with sentences")
        self._costs = [len(encode(piece)) for piece in self.sentences]

    def make(self, length: int, depth: int, trial: int = 0) -> Prompt:
        """The prompt of that length, with a key that is this trial's own.

        Args:
            length: tokens of prompt and key, at most.
            depth: where the key is said: 0, the beginning, to 100, just before the question.

        Raises:
            VeloxError: the length leaves no room for a sentence of filler.
        """
        key = str(random.Random(f"{length} {depth} {trial}").randrange(10_000, 100_000))
        needle, answer = NEEDLE.format(key=key), ANSWER.format(key=key)
        room = length - len(self.encode(needle + QUESTION + answer))
        pieces, costs = self._fill(room)
        while pieces:
            ends = [0, *accumulate(costs)]
            cut = min(range(len(ends)), key=lambda i: abs(ends[i] - ends[-1] * depth / 100))
            text = "".join([*pieces[:cut], needle, *pieces[cut:], QUESTION])
            tokens = self.encode(text)
            whole = self.encode(text + answer)
            if len(whole) <= length:
                return Prompt(tokens, whole[len(tokens) :])
            # The tokens of a whole may be more than those of its parts.
            pieces, costs = pieces[:-1], costs[:-1]
        raise VeloxError(
            f"a prompt of {length} tokens has no room for a sentence beside the key and the "
            f"question, {length - room} tokens: make it longer"
        )

    def _fill(self, room: int) -> tuple[list[str], list[int]]:
        """As many sentences as fit, beginning anew where the filler ends, and their tokens."""
        pieces: list[str] = []
        costs: list[int] = []
        while sum(costs) + self._costs[len(pieces) % len(self._costs)] <= room:
            costs.append(self._costs[len(pieces) % len(self._costs)])
            pieces.append(self.sentences[len(pieces) % len(self.sentences)])
        return pieces, costs


def recall(
    model: Any,
    prompt: Prompt,
    cache: list[Any],
    block: int,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Read the prompt, then the key, with this cache; give what the record says of it: ``found``,
    ``probability`` and ``seconds``.

    Args:
        cache: new and empty, one a layer.
        block: tokens of the prompt fed at a time.
        progress: told after each block how many tokens it had.
    """
    started = time.perf_counter()
    tokens = mx.array(prompt.tokens + prompt.answer)
    last = len(prompt.tokens) - 1
    steps = [
        *((start, min(start + block, last)) for start in range(0, last, block)),
        *((at, at + 1) for at in range(last, len(tokens) - 1)),
    ]
    logits = []
    for start, stop in steps:
        step = model(tokens[None, start:stop], cache=cache)
        if start >= last:
            logits.append(step[0])
        mx.eval(logits[-1:], arrays(cache))
        if progress is not None:
            progress(stop - start)
    foretold, answer = mx.concatenate(logits), tokens[last + 1 :]
    return {
        "found": bool(mx.array_equal(mx.argmax(foretold, axis=-1), answer).item()),
        "probability": mx.exp(-mx.mean(token_nll(foretold, answer))).item(),
        "seconds": time.perf_counter() - started,
    }


def rates(records: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The share of the records whose key was found, and the mean probability."""
    n = len(records)
    found = sum(record["found"] for record in records)
    return found / n, sum(record["probability"] for record in records) / n
