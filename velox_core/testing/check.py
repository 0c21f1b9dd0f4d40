"""One check of the suite: what it wants, how it is run, and which others it builds on."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Mapping

import attrs

from ..discovery import one_line
from .failure import CheckFailed
from .result import CheckResult
from .subject import PolicyOrFactory, Subject
from .trial import LAYERS, Trial


@attrs.frozen
class Check:
    """One check. Called with a policy it raises ``CheckFailed`` if that doesn't pass, and
    ``unittest.SkipTest``, which pytest knows, if one that it builds on doesn't.

    Args:
        name: its name.
        expected: what it wants, in a sentence.
        run: does it in the trial's layer; may give what is worth knowing of a policy that passes.
        needs: the checks that it builds on. Where one of them fails too, this one's failure says
            nothing of its own.
    """

    name: str
    expected: str
    run: Callable[[Trial], str | None]
    needs: tuple[Check, ...] = ()

    def __call__(self, policy: PolicyOrFactory, seed: int = 0) -> None:
        result = self.result(Trial(Subject(policy), seed), {})
        if result.outcome == "skipped":
            raise unittest.SkipTest(result.got)
        if result.outcome == "failed":
            raise CheckFailed(result.expected, f"{result.got}\nTo repeat it:\n\n{result.repeat}")

    def result(self, trial: Trial, known: dict[str, CheckResult]) -> CheckResult:
        """Run it, and those that it needs if it fails.

        Args:
            trial: what it works with.
            known: results by name, to which this one is added.
        """
        if self.name not in known:
            known[self.name] = self._run(trial, known)
        return known[self.name]

    def _run(self, trial: Trial, known: dict[str, CheckResult]) -> CheckResult:
        repeat = self.repeat(trial)
        layer, note = LAYERS[0], ""
        try:
            for layer in LAYERS:
                note = self.run(attrs.evolve(trial, layer=layer)) or ""
        except CheckFailed as failure:
            expected, got = failure.expected, failure.got
        except Exception as error:  # what a policy's code may raise is anything
            expected, got = self.expected, one_line(error)
        else:
            return CheckResult(
                name=self.name, outcome="passed", expected=self.expected, got=note, repeat=repeat
            )
        got += f" (layer {layer})" if layer else ""
        for need in self.needs:
            if need.result(trial, known).outcome in ("failed", "skipped"):
                return CheckResult(
                    name=self.name,
                    outcome="skipped",
                    expected=expected,
                    got=f"it builds on {need.name!r}, which fails (here: {got})",
                    repeat=repeat,
                )
        return CheckResult(
            name=self.name, outcome="failed", expected=expected, got=got, repeat=repeat
        )

    def repeat(self, trial: Trial) -> str:
        """A program that runs this check alone."""
        line, expression = trial.subject.source
        lines = ["from velox_core.testing import check_policy", *[line] * bool(line)]
        call = f"check_policy({expression}, only=[{self.name!r}], seed={trial.seed})"
        return "\n".join([*sorted(lines), f"print(*{call})"])


def expect(result: CheckResult, expected_failures: Mapping[str, str]) -> CheckResult:
    """The result, where failing was expected: an expected failure, or a failure to fail."""
    reason = expected_failures.get(result.name)
    if reason is None:
        return result
    if result.outcome == "passed":
        got = f"it passes: take {result.name!r} out of expected_failures"
        return attrs.evolve(result, outcome="failed", expected=f"a failure ({reason})", got=got)
    return attrs.evolve(result, outcome="expected failure", got=f"{reason} ({result.got})")
