"""DraftContext: which requests a draft model can draft for, since it has computed nearly all of their tokens.

While drafts are off, the draft model does not run, and lacks the keys and values of the tokens of those steps. If few
are missing, it still drafts. If many are missing, its drafts would be wrong, and would not show whether drafts make the
engine faster."""

from __future__ import annotations

from collections.abc import Sequence

from emberline.core.plan import WorkItem

MAX_MISSING = 0.125  # share of a request's tokens
ALWAYS_ALLOWED = 16  # missing tokens: at least those of one measurement without drafts


class DraftContext:
    def __init__(self) -> None:
        self._missing: dict[str, int] = {}  # by request: tokens that the draft model has not computed

    def skip(self, work: Sequence[WorkItem]) -> None:
        """Record a step in which the draft model does not run."""
        for item in work:
            before = self._missing.get(item.id, 0) if item.start else 0  # a preempted request begins again
            self._missing[item.id] = before + len(item.tokens) - item.num_draft

    def run(self, work: Sequence[WorkItem]) -> None:
        """Record a step in which the draft model runs."""
        for item in work:
            if not item.start:
                self.forget(item.id)

    def is_known(self, request_id: str, num_tokens: int) -> bool:
        """Return whether the draft model can draft for a request with this number of tokens."""
        return self._missing.get(request_id, 0) <= max(ALWAYS_ALLOWED, MAX_MISSING * num_tokens)

    def count_known(self, work: Sequence[WorkItem]) -> int:
        """Return for how many requests of a step the draft model can draft."""
        return sum(self.is_known(item.id, item.start + len(item.tokens)) for item in work)

    def forget(self, request_id: str) -> None:
        self._missing.pop(request_id, None)
