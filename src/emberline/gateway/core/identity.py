"""Identity: the caller of a request, and the gateways and models that the caller may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

IdentityKind = Literal["token", "virtual", "anonymous"]
ALLOW_ALL = ("*",)


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner and the permissions of a gateway key.

    The `allowed_*` fields are patterns in which `*` matches any text. An empty tuple allows nothing.
    """

    key_id: str
    name: str
    kind: IdentityKind
    user: str = ""
    allowed_models: tuple[str, ...] = ALLOW_ALL
    allowed_providers: tuple[str, ...] = ALLOW_ALL
    metadata: Mapping[str, str] = field(default_factory=dict)  # added to every request of this key
    is_admin: bool = False  # may use the management API
    can_use_models: bool = True  # may use models
    may_state_cost: bool = False  # the header cf-aig-custom-cost of its requests replaces the known price
    account: str = "*"  # pattern of account names
    gateways: tuple[str, ...] = ALLOW_ALL  # patterns of gateway names
    limits: tuple[str, ...] = ()  # names of rules that apply to this key in addition to the gateway's

    def may_use_gateway(self, account: str, gateway: str) -> bool:
        return self.can_use_models and _matches_any(account, (self.account,)) and _matches_any(gateway, self.gateways)

    def may_use_provider(self, provider: str) -> bool:
        """Return whether the key may use at least some models of this provider."""
        prefixes = (pattern.partition("/")[0] for pattern in self.allowed_models)
        has_model = any("/" not in pattern for pattern in self.allowed_models) or any(
            fnmatchcase(provider, prefix) for prefix in prefixes
        )
        return _matches_any(provider, self.allowed_providers) and has_model

    def may_use_model(self, provider: str, model: str) -> bool:
        return allows_model(self.allowed_providers, self.allowed_models, provider, model)


def allows_model(
    provider_patterns: tuple[str, ...], model_patterns: tuple[str, ...], provider: str, model: str
) -> bool:
    """Return whether the patterns allow this model. A model pattern matches "model" or "provider/model"."""
    if provider_patterns is ALLOW_ALL is model_patterns:  # the usual case
        return True
    if not _matches_any(provider, provider_patterns):
        return False
    return _matches_any(model, model_patterns) or _matches_any(f"{provider}/{model}", model_patterns)


def _matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return patterns == ALLOW_ALL or any(fnmatchcase(name, pattern) for pattern in patterns)


ANONYMOUS = Identity("", "anonymous", "anonymous")
