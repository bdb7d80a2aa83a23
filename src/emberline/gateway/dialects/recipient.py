"""Recipient: what is known of who gets a translated request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_CLAUDE = re.compile(r"claude-(?:[a-z]+-)?(\d+)(?:[-.](\d{1,2})(?!\d))?")
_GEMINI = re.compile(r"gemini-(\d+)")


@dataclass(frozen=True)
class Recipient:
    model: str  # as the provider calls it
    max_output: int | None = None  # the catalogue's
    takes_thoughts: bool = False  # thinking of anyone is welcome in the history (our engine, DeepSeek)
    max_tokens_name: str = "max_completion_tokens"  # in chat; older providers know only max_tokens

    @cached_property
    def claude(self) -> tuple[int, int] | None:
        """Its version; None: not one of Anthropic's models, so nothing is known that it would refuse."""
        match = _CLAUDE.search(self.model)
        if match is None:
            return (99, 0) if "claude" in self.model else None
        return int(match[1]), int(match[2] or 0)

    @property
    def claude_has_budget(self) -> bool:
        """Thinking by a budget of tokens; later models refuse it."""
        return self.claude is None or self.claude < (4, 7)

    @property
    def claude_has_effort(self) -> bool:
        """Adaptive thinking and output_config.effort."""
        return self.claude is None or self.claude >= (4, 6)

    @property
    def claude_has_sampling(self) -> bool:
        """temperature, top_p and top_k; later models refuse them."""
        return self.claude is None or self.claude < (4, 7)

    @property
    def claude_hears_system_later(self) -> bool:
        """Messages of the system between the others."""
        return self.claude is None or self.claude >= (4, 8)

    @cached_property
    def gemini(self) -> int:
        """Its generation; 0: not one of Google's models."""
        match = _GEMINI.search(self.model)
        return int(match[1]) if match else (99 if "gemini" in self.model else 0)
