"""Recipient: what is known of who gets a translated request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from emberline.gateway.dialects.inner import Effort

_CLAUDE = re.compile(r"claude-(?:[a-z]+-)?(\d+)(?:[-.](\d{1,2})(?!\d))?")
_GEMINI = re.compile(r"gemini-(\d+)")
_GPT = re.compile(r"(?:^|/)gpt-(\d+)(?:\.(\d+))?(?!.*(?:pro|chat|codex|astra))")  # those have efforts of their own
_Since = Mapping[str, tuple[int, int]]  # a family of Claude -> since which version
_ALWAYS_THINK: _Since = {"fable": (5, 0), "mythos": (5, 0), "opus": (5, 5)}
_THINK_BETWEEN: _Since = {"sonnet": (5, 5)}
_NEVER_FORCED: _Since = {"fable": (5, 1), "mythos": (5, 1), "opus": (5, 5), "sonnet": (5, 5)}
_O = re.compile(r"(?:^|/)o[134](?:-mini)?(?:-\d|$)")
_GPT_EFFORTS: tuple[tuple[tuple[int, int], tuple[Effort, ...]], ...] = (  # since a version
    ((6, 1), ("low", "medium", "high", "xhigh", "max")),
    ((5, 6), ("none", "low", "medium", "high", "xhigh", "max")),
    ((5, 2), ("none", "low", "medium", "high", "xhigh")),
    ((5, 1), ("none", "low", "medium", "high")),
    ((5, 0), ("minimal", "low", "medium", "high")),
    ((0, 0), ()),
)


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

    @property
    def claude_has_schemas(self) -> bool:
        """Formats of JSON, and tools that keep to theirs."""
        return self.claude is None or self.claude >= (4, 5)

    @property
    def claude_thinks_between(self) -> bool:
        """The least it can be asked for is to think only between calls of tools."""
        return self._is_claude(_THINK_BETWEEN)

    @property
    def claude_is_never_forced(self) -> bool:
        """To call tools."""
        return self._is_claude(_NEVER_FORCED)

    def _is_claude(self, since: _Since) -> bool:
        return self.claude is not None and any(
            family in self.model and self.claude >= since[family] for family in since
        )

    @property
    def claude_efforts(self) -> tuple[Effort, ...]:
        """Who always thinks has no "none"."""
        if self._is_claude(_ALWAYS_THINK):
            return ("low", "medium", "high", "xhigh", "max")
        newer: tuple[Effort, ...] = ("xhigh",) if self.claude is None or self.claude >= (4, 7) else ()
        return ("none", "low", "medium", "high", *newer, "max")

    @property
    def gpt_efforts(self) -> tuple[Effort, ...] | None:
        """None: not one of OpenAI's models, or one of which nothing is known."""
        if _O.search(self.model):
            return ("low", "medium", "high")
        if (match := _GPT.search(self.model)) is None:
            return None
        version = int(match[1]), int(match[2] or 0)
        return next(efforts for since, efforts in _GPT_EFFORTS if version >= since)

    @property
    def gemini_efforts(self) -> tuple[Effort, ...]:
        """Since the third generation."""
        least: tuple[Effort, ...] = () if "-pro" in self.model else ("minimal",)
        return (*least, "low", "medium", "high")

    @cached_property
    def gemini(self) -> int:
        """Its generation; 0: not one of Google's models."""
        match = _GEMINI.search(self.model)
        return int(match[1]) if match else (99 if "gemini" in self.model else 0)
