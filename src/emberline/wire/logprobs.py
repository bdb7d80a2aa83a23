"""Renders logprobs in the formats of chat completions, text completions and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from emberline.wire.deltas import TokenInfo

MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON cannot represent


def render_chat_logprobs(tokens: Sequence[TokenInfo], *, as_ids: bool = False) -> list[dict[str, Any]]:
    return [
        {**_render_token(token, as_ids), "top_logprobs": [_render_token(other, as_ids) for other in token.top]}
        for token in tokens
    ]


def render_prompt_logprobs(tokens: Sequence[TokenInfo]) -> list[dict[str, Any] | None]:
    return [None if token.logprob is None else _logprobs_by_id(token) for token in tokens]


@dataclass(slots=True)
class TextLogprobs:
    """Log-probabilities in the format of text completions: four lists with one entry per token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    as_ids: bool = False

    def add(self, tokens: Sequence[TokenInfo], num_top: int, prompt_chars: int) -> TextLogprobs:
        """Append `tokens`; `prompt_chars`, the length of the echoed prompt, is added to their text offsets."""
        for token in tokens:
            self.tokens.append(_token_label(token, self.as_ids))
            self.token_logprobs.append(None if token.logprob is None else _clamp_logprob(token.logprob))
            self.top_logprobs.append(None if token.logprob is None else _logprobs_by_text(token, num_top, self.as_ids))
            self.text_offset.append(prompt_chars + token.offset)
        return self

    def body(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}


def _token_label(token: TokenInfo, as_ids: bool) -> str:
    """Return the token's text or, with `as_ids`, vLLM's "token_id:N", which is unique unlike the text."""
    return f"token_id:{token.id}" if as_ids else token.text


def _render_token(token: TokenInfo, as_ids: bool) -> dict[str, Any]:
    return {"token": _token_label(token, as_ids), "bytes": list(token.bytes), "logprob": _clamp_logprob(token.logprob)}


def _logprobs_by_text(token: TokenInfo, num_top: int, as_ids: bool) -> dict[str, float]:
    """Map text to logprob, for the `num_top` most likely tokens at this position and the token itself.

    If two tokens have the same text, the result has the logprob of the more likely token.
    """
    found: dict[str, float] = {}
    for other in (*token.top[:num_top], token):
        found.setdefault(_token_label(other, as_ids), _clamp_logprob(other.logprob))
    return found


def _logprobs_by_id(token: TokenInfo) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank, other in enumerate(token.top, 1):
        found[str(other.id)] = {"logprob": _clamp_logprob(other.logprob), "rank": rank, "decoded_token": other.text}
    found.setdefault(
        str(token.id), {"logprob": _clamp_logprob(token.logprob), "rank": None, "decoded_token": token.text}
    )
    return found


def _clamp_logprob(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)
