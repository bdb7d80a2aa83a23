"""Types of the management API's request and reply bodies. A body with an unknown field is rejected."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from emberline.gateway.core.identity import ALLOW_ALL
from emberline.gateway.keys.key_store import KeyScope, StoredKey
from emberline.gateway.limits.rule import LimitRule
from emberline.gateway.routes.graph import Element

Label = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]
Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Patterns = Annotated[tuple[Pattern, ...], msgspec.Meta(max_length=256)]
Slug = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$")]
Metadata = Annotated[dict[Label, Text], msgspec.Meta(max_length=5)]
Millis = Annotated[int, msgspec.Meta(ge=0, le=(1 << 48) - 1)]


class StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class KeySpec(StrictStruct, frozen=True, kw_only=True):
    """The request body that creates a gateway key."""

    name: Label
    kind: Literal["token", "virtual"] = "virtual"
    user: Annotated[str, msgspec.Meta(max_length=256)] = ""
    scopes: Annotated[tuple[KeyScope, ...], msgspec.Meta(min_length=1, max_length=3)] = ("use",)
    gateways: Patterns = ALLOW_ALL
    allowed_models: Patterns = ALLOW_ALL
    allowed_providers: Patterns = ALLOW_ALL
    metadata: Metadata = {}
    limits: Annotated[tuple[Label, ...], msgspec.Meta(max_length=20)] = ()  # names of rules
    expires: Millis | None = None  # ms since 1970
    disabled: bool = False


class KeyView(StrictStruct, frozen=True, kw_only=True):
    """A gateway key as the API shows it. Only the reply that creates the key contains the secret."""

    id: str
    shown: str  # first characters of the secret
    name: str
    kind: str
    user: str
    scopes: tuple[str, ...]
    gateways: tuple[str, ...]
    allowed_models: tuple[str, ...]
    allowed_providers: tuple[str, ...]
    metadata: dict[str, str]
    limits: tuple[str, ...]
    created: int
    expires: int | None
    disabled: bool
    secret: str | None = None  # only in the reply to the key's creation

    @staticmethod
    def from_stored_key(key: StoredKey, secret: str | None = None) -> KeyView:
        names = [name for name in KeyView.__struct_fields__ if name != "secret"]
        return KeyView(**{name: getattr(key, name) for name in names}, secret=secret)


class ProviderKeySpec(StrictStruct, frozen=True, kw_only=True):
    secret: Annotated[str, msgspec.Meta(min_length=1, max_length=16_384)]


class ProviderKeyView(StrictStruct, frozen=True, kw_only=True):
    """A stored provider key, without its secret."""

    provider: str
    alias: str
    created: int  # ms since 1970
    master_key: str  # id of the master key that encrypts it


class CustomProvider(StrictStruct, frozen=True, kw_only=True):
    """A provider that the account defines. Requests name the provider `custom-{slug}`."""

    name: Label
    slug: Slug
    base_url: str
    description: Text = ""
    link: Text = ""
    enable: bool = False
    beta: bool = False
    curl_example: Text = ""
    js_example: Text = ""
    speaks: tuple[str, ...] | None = None  # dialects; None: OpenAI's
    headers: dict[Label, Text] = {}  # sent with every request
    position: int = 0  # sort order in a user interface


class AccountBudget(StrictStruct, frozen=True, kw_only=True):
    """A limit on requests, tokens or cost that applies to some gateways of the account."""

    rule: LimitRule
    gateways: Patterns = ALLOW_ALL
    enabled: bool = True


class RouteSpec(StrictStruct, frozen=True, kw_only=True):
    elements: tuple[Element, ...]
    gateways: Patterns = ALLOW_ALL
    description: Text = ""


class Deployment(StrictStruct, frozen=True, kw_only=True):
    number: int  # counts the route's deployments, from 1
    version: int
    at: int  # ms since 1970


class StoredRoute(StrictStruct, frozen=True, kw_only=True):
    """The stored document of a route. Each version of the route is a separate document."""

    latest: int  # newest version
    deployed: int | None = None  # version in use
    history: tuple[int, ...] = ()  # versions to roll back to, oldest first
    deployments: tuple[Deployment, ...] = ()  # the last deployments and rollbacks, oldest first


class RouteVersion(StrictStruct, frozen=True, kw_only=True):
    number: int
    created: int  # ms since 1970
    by: str  # id of the key that added it
    elements: tuple[Element, ...]
    gateways: tuple[str, ...] = ALLOW_ALL
    description: str = ""


class DeployRequest(StrictStruct, frozen=True, kw_only=True):
    version: Annotated[int, msgspec.Meta(ge=1)]


class FeedbackSpec(StrictStruct, frozen=True, kw_only=True):
    feedback: Literal[-1, 1] | None = None
    score: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None
    metadata: Annotated[dict[Label, str | int | float | bool], msgspec.Meta(max_length=5)] | None = None


class AuditView(StrictStruct, frozen=True, kw_only=True):
    number: int
    at: int
    actor: str
    action: str
    target: str
    before: Any
    after: Any
