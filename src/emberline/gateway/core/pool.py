"""ModelPool: several providers that serve one model, and the rule that selects one of them.

An example in gateway.toml:

[gateways.default.pools.small]
choose = "fastest"
hedge = true
members = [{ provider = "groq", model = "llama-3.3-70b-versatile" },
           { provider = "cerebras", model = "llama-3.3-70b", weight = 3 },
           { provider = "openai", model = "gpt-4o-mini", key = "second" }]
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from emberline.core.errors import InvalidRequest

SelectionPolicy = Literal["weighted", "fastest", "cheapest"]


class PoolMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    provider: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # name of the provider
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]  # name of the model at this provider
    key: Annotated[str, msgspec.Meta(max_length=64)] = ""  # alias of a stored provider key; "": the default key
    weight: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0  # share of the requests, with choose = "weighted"

    @property
    def member_key(self) -> tuple[str, str, str]:
        return self.provider, self.model, self.key


class ModelPool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    members: Annotated[tuple[PoolMember, ...], msgspec.Meta(min_length=1, max_length=20)]  # see pools.NAME.members
    choose: SelectionPolicy = "weighted"  # weighted, fastest or cheapest
    hedge: bool = False  # call a second member when the first takes longer than its 95th percentile

    def __post_init__(self) -> None:
        if len({member.member_key for member in self.members}) < len(self.members):
            raise InvalidRequest(
                "members of a pool must differ in provider, model or key",
                param="pools.members",
                hint="remove the repeated member",
            )
        if not any(member.weight for member in self.members):
            raise InvalidRequest(
                "members of a pool must not all have weight 0",
                param="pools.members",
                hint="give one member a positive weight",
            )
