"""SamplingParams: how the tokens of one request are chosen, and when the request ends.

These settings are independent of the API protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from emberline.core.errors import InvalidRequest

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 128


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the output: a JSON schema, a pattern, a list of choices or a grammar.

    `text` is the schema, pattern or grammar. For `choice` it is a JSON array of strings."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int | None = None  # None: up to the context length
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None  # None: off; k: of the chosen token and of the k most probable ones
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()  # stop strings, found in the text outside the engine
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences whose last token is never sampled after the others
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that are sampled; (): all

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, excludes_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, excludes_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("top_k", self.top_k, 0, (1 << 31) - 1)
        _check_range("n", self.n, 1, MAX_COMPLETIONS)
        _check_range("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 1 << 31)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens must be at most max_tokens, {self.max_tokens}, not {self.min_tokens}",
                    param="min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _check_range("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if len(self.stop) > 16 or any(not s or len(s) > 1024 for s in self.stop):
            raise InvalidRequest("stop must have at most 16 strings, each of 1 to 1024 characters", param="stop")
        if any(not word or min(word) < 0 for word in self.bad_words) or min(self.allowed_token_ids, default=0) < 0:
            raise InvalidRequest("bad_words and allowed_token_ids must contain token ids of at least 0")
        if len(self.logit_bias) > 1024:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} tokens; it must have at most 1024", param="logit_bias"
            )
        for token, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_rules(self) -> bool:
        """Whether the host takes part in sampling, because of penalties, biases, masks or log-probabilities."""
        restricts = self.grammar is not None or self.bad_words or self.allowed_token_ids or self.logit_bias
        return bool(restricts or self.has_penalties or self.min_tokens or self.logprobs is not None)

    @property
    def needs_sync_steps(self) -> bool:
        """Whether the next step can be launched only after the host has read the previous sampled token."""
        return self.prompt_logprobs is not None


def _check_range(name: str, value: float, low: float, high: float, *, excludes_low: bool = False) -> None:
    too_low = value <= low if excludes_low else value < low
    if too_low or value > high or not math.isfinite(value):
        bracket = "(" if excludes_low else "["
        raise InvalidRequest(f"{name} is {value}; it must be in {bracket}{low:g}, {high:g}]", param=name.split("[")[0])
