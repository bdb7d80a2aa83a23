"""Identity: the caller of a request, and what the caller may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["token", "virtual", "anonymous"]
ANY = ("*",)


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner and the permissions of a key.

    `allowed_*` are patterns in which `*` matches any text; an empty tuple allows nothing.
    """

    key_id: str
    name: str
    kind: Kind
    user: str = ""
    allowed_models: tuple[str, ...] = ANY
    allowed_providers: tuple[str, ...] = ANY
    metadata: Mapping[str, str] = field(default_factory=dict)  # added to every request of this key
    admin: bool = False  # may use the management API
    use: bool = True  # may use models
    account: str = "*"  # pattern of account names
    gateways: tuple[str, ...] = ANY  # patterns of gateway names
    limits: tuple[str, ...] = ()  # names of rules that apply to this key in addition to the gateway's

    def may_enter(self, account: str, gateway: str) -> bool:
        return self.use and _matches_any(account, (self.account,)) and _matches_any(gateway, self.gateways)

    def may_use(self, provider: str, model: str) -> bool:
        return allows(self.allowed_providers, self.allowed_models, provider, model)


def allows(providers: tuple[str, ...], models: tuple[str, ...], provider: str, model: str) -> bool:
    """Return whether the patterns allow the model. Those of models match "model" or "provider/model"."""
    if providers is ANY is models:  # the usual case
        return True
    if not _matches_any(provider, providers):
        return False
    return _matches_any(model, models) or _matches_any(f"{provider}/{model}", models)


def _matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return patterns == ANY or any(fnmatchcase(name, pattern) for pattern in patterns)


ANONYMOUS = Identity("", "anonymous", "anonymous")
