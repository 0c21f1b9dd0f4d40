"""Taking back the newest tokens, as speculative decoding and the reuse of prompts do."""

from __future__ import annotations

from .numbering import Numbered


class Trimmable(Numbered):
    """Rows whose newest may be taken back."""

    def is_trimmable(self) -> bool:
        """Whether the newest tokens can be taken back exactly: those of the newest block while
        its eviction waits, or any while nothing was evicted and the policy has no memory."""
        return self._untouched() or 0 < self._n_new == min(self._fresh)

    def trim(self, n: int) -> int:
        """Take back the newest ``n`` tokens.

        Returns:
            How many were taken back: ``n`` (or all there are), or 0 where that can't be exact.
        """
        n = min(n, *self._tokens)
        if n <= 0 or not (self._untouched() or n <= min(self._fresh) == self._n_new):
            return 0
        taken = n
        if self._overwritten is not None and n == self._n_new:
            self._hole = self._overwritten
        else:
            self._rows -= n
        self._tokens = [seen - n for seen in self._tokens]
        self._held = [held - n for held in self._held]
        self._set_offset()
        if n >= self._n_new:
            self._forget_block()
        else:
            self._n_new -= n
            self._fresh = [fresh - n for fresh in self._fresh]
            self._chosen = None
            self._forget_numbers()
            while self._earlier and n >= self._last:  # of a block that grew, token by token
                n -= self._last
                self._seen = self._earlier.pop()
                self._last = 1 if self._earlier else self._n_new
            if n and self._seen is not None:
                self._seen = self._seen.without_last(n)
        return taken

    def _untouched(self) -> bool:
        remembers = self.policy.every_step or self.policy.n_queries > 1
        evicted = self._tokens != self._held
        padded = self._padded  # the newest rows needn't be the last ones then
        kept = remembers or evicted or padded or self._coming or self._hole is not None
        return not (kept and any(self._tokens))
