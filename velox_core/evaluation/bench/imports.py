"""What importing velox costs, and listing the policies: each time in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import distributions
from typing import Any

from .plan import Progress

#: What velox_core needs is imported first, so that its own part shows.
CODE = """
import importlib.metadata, json, time
clock = time.perf_counter
start = clock()
import attrs, mlx_lm, packaging, pluggy
needed = clock()
import velox_core
imported = clock()
{listing}
print(json.dumps([imported - start, imported - needed, clock() - imported]))
"""
#: Each in a process of its own: the second to look would find the folders' contents remembered.
LISTINGS = {
    "policies": "velox_core.installed_policies()",
    "entry_points": "importlib.metadata.entry_points()",
}


def imports(rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """Times of fresh interpreters, ``2 * rounds`` of them.

    Returns:
        One case with, by round, the seconds of ``import`` (all that velox_core needs, too), of
        ``own`` (velox_core alone), ``policies`` (listing them) and ``entry_points`` (reading every
        distribution's, as Python does); and how many ``distributions`` there are.
    """
    times: dict[str, list[float]] = {"import": [], "own": [], **{name: [] for name in LISTINGS}}
    for _ in range(rounds):
        for name, listing in LISTINGS.items():
            every, own, listed = fresh(CODE.format(listing=listing))
            times["import"].append(every)
            times["own"].append(own)
            times[name].append(listed)
            progress()
    return [{**times, "distributions": len({each.name for each in distributions()})}]


def fresh(code: str) -> Any:
    """What the code prints, in a new interpreter, as JSON."""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)
