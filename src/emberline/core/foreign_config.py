"""ForeignWorkerConfig: a vLLM or SGLang server behind the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from emberline.core.errors import InvalidRequest

Role = Literal["prefill", "decode", "both"]  # what a worker does: compute prompts for other workers, generate, or both

ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class ForeignWorkerConfig:
    """A vLLM or SGLang server behind the router. It does not register itself, so the router polls it."""

    url: str
    dialect: str  # vllm or sglang
    role: Role = "both"
    bootstrap: int = 8998  # SGLang: port at which decode workers contact a prefill worker

    def __post_init__(self) -> None:
        if self.dialect not in ("vllm", "sglang"):
            raise InvalidRequest(
                f"the foreign worker {self.url} has the unknown kind {self.dialect!r}", hint="use vllm or sglang"
            )
        if self.role not in ROLES:
            hint = "use prefill, decode or both"
            raise InvalidRequest(f"the foreign worker {self.url} has the unknown role {self.role!r}", hint=hint)
        if not self.url.startswith(("http://", "https://")):
            raise InvalidRequest(
                f"the foreign worker's URL is {self.url!r}; it must be an http or https URL",
                hint="use vllm=http://HOST:PORT",
            )

    @staticmethod
    def parse(text: str) -> ForeignWorkerConfig:
        """Parse KIND[:ROLE[:PORT]]=URL, for example sglang:prefill:8998=http://host:30000.

        Raises InvalidRequest if the text does not have this form."""
        kind, _, url = text.partition("=")
        dialect, *rest = kind.split(":")
        if len(rest) > 2 or (len(rest) == 2 and not rest[1].isdigit()):
            raise InvalidRequest(f"foreign worker {text!r} does not have the form KIND[:ROLE[:PORT]]=URL")
        role = cast("Role", rest[0] if rest else "both")
        return ForeignWorkerConfig(url.rstrip("/"), dialect, role, int(rest[1]) if len(rest) == 2 else 8998)
