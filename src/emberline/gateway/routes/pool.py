"""Pool: the places that have one model, and how one of them is chosen.

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

Choose = Literal["weighted", "fastest", "cheapest"]


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    provider: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    key: Annotated[str, msgspec.Meta(max_length=64)] = ""  # alias of the stored one; "": the usual
    weight: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0

    @property
    def place(self) -> tuple[str, str, str]:
        return self.provider, self.model, self.key


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=20)]
    choose: Choose = "weighted"
    hedge: bool = False  # a second member is asked where the first takes longer than 95 of 100 times

    def __post_init__(self) -> None:
        if len({member.place for member in self.members}) < len(self.members):
            raise InvalidRequest("a pool has the same member twice", param="pools.members")
        if not any(member.weight for member in self.members):
            raise InvalidRequest("all members of a pool weigh nothing", param="pools.members")
