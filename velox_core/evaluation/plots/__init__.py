"""How results are shown, one file a kind: a table, and a plot.

``DISPLAYS`` says for each kind how ``velox eval``, ``velox bench`` and ``velox report`` show its
records. matplotlib is imported when a plot is made, not before.
"""

from __future__ import annotations

from . import bench, passkey, perplexity, positions, retention
from .display import Display

DISPLAYS: dict[str, Display] = {
    "perplexity": perplexity.DISPLAY,
    "passkey": passkey.DISPLAY,
    "retention": retention.DISPLAY,
    "positions": positions.DISPLAY,
    "bench": bench.DISPLAY,
}
