"""Log-probabilities in three formats: chat objects, completions' parallel lists, vLLM's prompt_logprobs by token id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from emberline.wire.deltas import TokenInfo

MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON cannot represent


def chat_logprobs(tokens: Sequence[TokenInfo], *, as_ids: bool = False) -> list[dict[str, Any]]:
    return [
        {**_entry(token, as_ids), "top_logprobs": [_entry(other, as_ids) for other in token.top]} for token in tokens
    ]


def prompt_logprobs(tokens: Sequence[TokenInfo]) -> list[dict[str, Any] | None]:
    return [None if token.logprob is None else _by_id(token) for token in tokens]


@dataclass(slots=True)
class TextLogprobs:
    """The format of text completions: four parallel lists."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    as_ids: bool = False

    def add(self, tokens: Sequence[TokenInfo], num_top: int, prompt_chars: int) -> TextLogprobs:
        """Append these tokens; `prompt_chars`: the length of an echoed prompt, which is added to their offsets."""
        for token in tokens:
            self.tokens.append(_label(token, self.as_ids))
            self.token_logprobs.append(None if token.logprob is None else _finite(token.logprob))
            self.top_logprobs.append(None if token.logprob is None else _by_text(token, num_top, self.as_ids))
            self.text_offset.append(prompt_chars + token.offset)
        return self

    def body(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}


def _label(token: TokenInfo, as_ids: bool) -> str:
    """Return the token's text or, with `as_ids`, its id in vLLM's form: two tokens can have the same text."""
    return f"token_id:{token.id}" if as_ids else token.text


def _entry(token: TokenInfo, as_ids: bool) -> dict[str, Any]:
    return {"token": _label(token, as_ids), "bytes": list(token.bytes), "logprob": _finite(token.logprob)}


def _by_text(token: TokenInfo, top: int, as_ids: bool) -> dict[str, float]:
    """Return the `num_top` most likely tokens and the token itself; the likelier of two with the same text wins."""
    found: dict[str, float] = {}
    for other in (*token.top[:top], token):
        found.setdefault(_label(other, as_ids), _finite(other.logprob))
    return found


def _by_id(token: TokenInfo) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank, other in enumerate(token.top, 1):
        found[str(other.id)] = {"logprob": _finite(other.logprob), "rank": rank, "decoded_token": other.text}
    found.setdefault(str(token.id), {"logprob": _finite(token.logprob), "rank": None, "decoded_token": token.text})
    return found


def _finite(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)
