"""Foreign: the settings of a server of another kind that a router sends requests to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from emberline.core.errors import InvalidRequest

Role = Literal["prefill", "decode", "both"]  # of a worker: computes prompts for others, generates, or both


@dataclass(frozen=True, slots=True)
class Foreign:
    """A server of another kind behind the router; it does not register, it is looked for."""

    url: str
    dialect: str  # vllm or sglang
    role: Role = "both"
    bootstrap: int = 8998  # SGLang: where those that decode meet it

    def __post_init__(self) -> None:
        if self.dialect not in ("vllm", "sglang"):
            raise InvalidRequest(f"{self.dialect!r} is no kind of server known here", hint="vllm or sglang")
        if self.role not in get_args(Role):
            raise InvalidRequest(f"{self.role!r} is no role", hint="prefill, decode or both")
        if not self.url.startswith(("http://", "https://")):
            raise InvalidRequest(f"{self.url!r} is not an http or https URL")

    @staticmethod
    def parsed(text: str) -> Foreign:
        """vllm=URL, vllm:decode=URL, sglang:prefill:8998=URL"""
        kind, _, url = text.partition("=")
        dialect, *rest = kind.split(":")
        if len(rest) > 2 or (len(rest) == 2 and not rest[1].isdigit()):
            raise InvalidRequest(f"{text!r} is not KIND[:ROLE[:PORT]]=URL")
        role = cast("Role", rest[0] if rest else "both")
        return Foreign(url.rstrip("/"), dialect, role, int(rest[1]) if len(rest) == 2 else 8998)
