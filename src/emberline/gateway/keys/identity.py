"""Identity: who asks, and what they may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["token", "virtual", "anonymous"]
ANY = ("*",)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a key stands for. `allowed_*` are patterns in which `*` stands for anything; none of them allows nothing."""

    key_id: str
    name: str
    kind: Kind
    user: str = ""
    allowed_models: tuple[str, ...] = ANY
    allowed_providers: tuple[str, ...] = ANY
    metadata: Mapping[str, str] = field(default_factory=dict)  # added to every request of this key
    admin: bool = False  # may use the management API
    use: bool = True  # may use models
    account: str = "*"  # a pattern: the accounts it is of
    gateways: tuple[str, ...] = ANY
    limits: tuple[str, ...] = ()  # names of rules that hold for this key besides the gateway's

    def may_enter(self, account: str, gateway: str) -> bool:
        return self.use and _any(account, (self.account,)) and _any(gateway, self.gateways)

    def may_use(self, provider: str, model: str) -> bool:
        return allows(self.allowed_providers, self.allowed_models, provider, model)


def allows(providers: tuple[str, ...], models: tuple[str, ...], provider: str, model: str) -> bool:
    """A pattern of models names the model alone, or provider/model."""
    if providers is ANY is models:  # as most
        return True
    return _any(provider, providers) and (_any(model, models) or _any(f"{provider}/{model}", models))


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return patterns == ANY or any(fnmatchcase(name, pattern) for pattern in patterns)


ANONYMOUS = Identity("", "anonymous", "anonymous")
