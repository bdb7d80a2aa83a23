"""Guardrails: what a gateway searches for in prompts and replies, and what it does about a finding.

    [[gateways.default.guardrails.patterns]]
    name = "no-cards"
    find = ["payment_card", "iban"]
    on = "both"
    action = "block"

    [[gateways.default.guardrails.judges]]
    name = "hazards"
    provider = "workers-ai"
    model = "@cf/meta/llama-guard-3-8b"
    prompt = { S1 = "block", S9 = "block", S6 = "flag" }
    reply = { S1 = "block" }

If a judge fails or its answer is invalid, the text is blocked if the judge may block, and flagged otherwise."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.guardrail_finding import Action

AppliesTo = Literal["prompt", "reply", "both"]
PatternKind = Literal[
    "payment_card", "iban", "api_key", "private_key", "email", "phone", "ipv4", "ipv6", "us_ssn"
]  # see patterns.py
CATEGORIES = {
    "S1": "violent crimes",
    "S2": "non-violent crimes",
    "S3": "sex-related crimes",
    "S4": "sexual exploitation of children",
    "S5": "defamation",
    "S6": "specialized advice (financial, medical, legal) that endangers",
    "S7": "privacy: sensitive personal information",
    "S8": "intellectual property",
    "S9": "indiscriminate weapons",
    "S10": "hate",
    "S11": "suicide and self-harm",
    "S12": "sexual content",
    "S13": "elections: false information about how they are held",
}
JudgeAction = Literal["flag", "block"]
ShortName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class PatternRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: ShortName  # shown in errors, logs and metrics
    find: Annotated[tuple[PatternKind, ...], msgspec.Meta(min_length=1)]  # kinds of data
    on: AppliesTo = "both"  # prompt, reply or both
    action: Action = "flag"  # flag, redact or block

    def applies_to(self, side: Literal["prompt", "reply"]) -> bool:
        return self.on in ("both", side)


class Judge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A moderation model. It answers "safe", or "unsafe" and on the next line the violated categories."""

    name: ShortName  # shown in errors, logs and metrics
    provider: ShortName  # of the moderation model
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]  # the moderation model
    prompt: dict[str, JudgeAction] = {}  # category -> action for a prompt in it
    reply: dict[str, JudgeAction] = {}  # category -> action for a reply in it
    instructions: Annotated[str, msgspec.Meta(max_length=16_384)] | None = None  # replaces the built-in instructions
    seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0  # timeout for one text

    def __post_init__(self) -> None:
        for name in (*self.prompt, *self.reply):
            if name not in CATEGORIES:
                raise InvalidRequest(
                    f"judge {self.name!r} has an unknown category {name[:20]!r}",
                    param="guardrails.judges",
                    hint=f"known categories: {', '.join(CATEGORIES)}",
                )

    def can_block(self, side: Literal["prompt", "reply"]) -> bool:
        return "block" in self.category_actions(side).values()

    def category_actions(self, side: Literal["prompt", "reply"]) -> dict[str, JudgeAction]:
        return self.prompt if side == "prompt" else self.reply


class Guardrails(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    patterns: Annotated[tuple[PatternRule, ...], msgspec.Meta(max_length=20)] = ()
    judges: Annotated[tuple[Judge, ...], msgspec.Meta(max_length=5)] = ()

    def __bool__(self) -> bool:
        return bool(self.patterns or self.judges)
