"""Tokens and their probabilities in the three shapes in use: chat's list of objects, completions' parallel lists, and
vLLM's prompt_logprobs keyed by token id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from emberline.api.deltas import TokenInfo

IMPOSSIBLE = -9999.0  # JSON has no infinity; OpenAI writes this


def chat_logprobs(tokens: Sequence[TokenInfo], *, as_ids: bool = False) -> list[dict[str, Any]]:
    return [
        {**_entry(token, as_ids), "top_logprobs": [_entry(other, as_ids) for other in token.top]} for token in tokens
    ]


def prompt_logprobs(tokens: Sequence[TokenInfo]) -> list[dict[str, Any] | None]:
    return [None if token.logprob is None else _by_id(token) for token in tokens]


@dataclass(slots=True)
class TextLogprobs:
    """Completions' shape: four lists side by side."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    as_ids: bool = False

    def add(self, tokens: Sequence[TokenInfo], top: int, before: int) -> TextLogprobs:
        """`before`: how many characters of echoed prompt stand before the text these offsets count in."""
        for token in tokens:
            self.tokens.append(_shown(token, self.as_ids))
            self.token_logprobs.append(None if token.logprob is None else _finite(token.logprob))
            self.top_logprobs.append(None if token.logprob is None else _by_text(token, top, self.as_ids))
            self.text_offset.append(before + token.offset)
        return self

    def body(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}


def _shown(token: TokenInfo, as_ids: bool) -> str:
    """A token as text or, since two tokens can have the same text, by its id as vLLM writes it."""
    return f"token_id:{token.id}" if as_ids else token.text


def _entry(token: TokenInfo, as_ids: bool) -> dict[str, Any]:
    return {"token": _shown(token, as_ids), "bytes": list(token.bytes), "logprob": _finite(token.logprob)}


def _by_text(token: TokenInfo, top: int, as_ids: bool) -> dict[str, float]:
    """The best `top` and the token itself; of two tokens with the same text the likelier one shows."""
    found: dict[str, float] = {}
    for other in (*token.top[:top], token):
        found.setdefault(_shown(other, as_ids), _finite(other.logprob))
    return found


def _by_id(token: TokenInfo) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rank, other in enumerate(token.top, 1):
        found[str(other.id)] = {"logprob": _finite(other.logprob), "rank": rank, "decoded_token": other.text}
    found.setdefault(str(token.id), {"logprob": _finite(token.logprob), "rank": None, "decoded_token": token.text})
    return found


def _finite(logprob: float | None) -> float:
    return IMPOSSIBLE if logprob is None else max(logprob, IMPOSSIBLE)
