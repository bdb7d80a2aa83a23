"""TargetModel: which request options the provider's model accepts, derived from the model's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from emberline.gateway.dialects.canonical import Effort

_CLAUDE_VERSION = re.compile(r"claude-(?:[a-z]+-)?(\d+)(?:[-.](\d{1,2})(?!\d))?")
_GEMINI_GENERATION = re.compile(r"gemini-(\d+)")
# The pro, chat, codex and astra models have other effort levels.
_GPT_VERSION = re.compile(r"(?:^|/)gpt-(\d+)(?:\.(\d+))?(?!.*(?:pro|chat|codex|astra))")
_VersionsByFamily = Mapping[str, tuple[int, int]]  # Claude family -> first version
_ALWAYS_THINK_SINCE: _VersionsByFamily = {"fable": (5, 0), "mythos": (5, 0), "opus": (5, 5)}
_THINK_BETWEEN_TOOLS_SINCE: _VersionsByFamily = {"sonnet": (5, 5)}
_REJECT_FORCED_TOOLS_SINCE: _VersionsByFamily = {"fable": (5, 1), "mythos": (5, 1), "opus": (5, 5), "sonnet": (5, 5)}
_O_SERIES = re.compile(r"(?:^|/)o[134](?:-mini)?(?:-\d|$)")
_GPT_EFFORTS: tuple[tuple[tuple[int, int], tuple[Effort, ...]], ...] = (  # (first version, effort levels)
    ((6, 1), ("low", "medium", "high", "xhigh", "max")),
    ((5, 6), ("none", "low", "medium", "high", "xhigh", "max")),
    ((5, 2), ("none", "low", "medium", "high", "xhigh")),
    ((5, 1), ("none", "low", "medium", "high")),
    ((5, 0), ("minimal", "low", "medium", "high")),
    ((0, 0), ()),
)


@dataclass(frozen=True)
class TargetModel:
    model: str  # the provider's name for it
    max_output: int | None = None  # tokens, from the model catalogue
    accepts_reasoning: bool = False  # accepts any model's reasoning in the history (Emberline's engine, DeepSeek)
    max_tokens_field: str = "max_completion_tokens"  # chat field; older providers know only max_tokens

    @cached_property
    def claude_version(self) -> tuple[int, int] | None:
        """The version of a Claude model, such as (4, 5), or (99, 0) if the name has no known version.

        None for models that are not Claude.
        """
        match = _CLAUDE_VERSION.search(self.model)
        if match is None:
            return (99, 0) if "claude" in self.model else None
        return int(match[1]), int(match[2] or 0)

    @property
    def claude_supports_budget(self) -> bool:
        """Whether the Claude model accepts `thinking.budget_tokens`; newer models reject it."""
        return self.claude_version is None or self.claude_version < (4, 7)

    @property
    def claude_supports_effort(self) -> bool:
        """Whether the Claude model accepts adaptive thinking and output_config.effort."""
        return self.claude_version is None or self.claude_version >= (4, 6)

    @property
    def claude_supports_sampling(self) -> bool:
        """Whether the Claude model accepts temperature, top_p and top_k; newer models reject them."""
        return self.claude_version is None or self.claude_version < (4, 7)

    @property
    def claude_supports_late_system_messages(self) -> bool:
        """Whether the Claude model accepts system messages after the first user message."""
        return self.claude_version is None or self.claude_version >= (4, 8)

    @property
    def claude_supports_schemas(self) -> bool:
        """Whether the Claude model accepts JSON schema output and strict tools."""
        return self.claude_version is None or self.claude_version >= (4, 5)

    @property
    def claude_thinks_between_tools(self) -> bool:
        """Whether the Claude model always thinks between tool calls, so that thinking cannot be disabled."""
        return self._is_claude_since(_THINK_BETWEEN_TOOLS_SINCE)

    @property
    def claude_rejects_forced_tools(self) -> bool:
        """Whether the Claude model rejects a tool_choice that forces a tool call."""
        return self._is_claude_since(_REJECT_FORCED_TOOLS_SINCE)

    def _is_claude_since(self, first_versions: _VersionsByFamily) -> bool:
        return self.claude_version is not None and any(
            family in self.model and self.claude_version >= first_versions[family] for family in first_versions
        )

    @property
    def claude_efforts(self) -> tuple[Effort, ...]:
        """The effort levels that the Claude model accepts; models that always think do not accept "none"."""
        if self._is_claude_since(_ALWAYS_THINK_SINCE):
            return ("low", "medium", "high", "xhigh", "max")
        newer: tuple[Effort, ...] = ("xhigh",) if self.claude_version is None or self.claude_version >= (4, 7) else ()
        return ("none", "low", "medium", "high", *newer, "max")

    @property
    def gpt_efforts(self) -> tuple[Effort, ...] | None:
        """The effort levels that the GPT model accepts: () if it does not reason, None for unknown models."""
        if _O_SERIES.search(self.model):
            return ("low", "medium", "high")
        if (match := _GPT_VERSION.search(self.model)) is None:
            return None
        version = int(match[1]), int(match[2] or 0)
        return next(efforts for since, efforts in _GPT_EFFORTS if version >= since)

    @property
    def gemini_efforts(self) -> tuple[Effort, ...]:
        """The thinking levels that the Gemini model accepts; only Gemini 3 and later have thinking levels."""
        least: tuple[Effort, ...] = () if "-pro" in self.model else ("minimal",)
        return (*least, "low", "medium", "high")

    @cached_property
    def gemini_generation(self) -> int:
        """The major version of a Gemini model, 99 if its name has none, or 0 for models that are not Gemini."""
        match = _GEMINI_GENERATION.search(self.model)
        return int(match[1]) if match else (99 if "gemini" in self.model else 0)
