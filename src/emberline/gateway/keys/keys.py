"""Keys: gateway tokens and virtual keys. A secret is 32 random bytes, shown once and kept as its SHA-256: what nobody
can guess needs no slow hash, and this one costs a request half a microsecond. The hash's beginning is the key's id.

What a key may do is read from the store once and then known until the store changes (see `watch`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Literal

import msgspec

from emberline.core.clock import Clock
from emberline.core.errors import InvalidRequest
from emberline.gateway.keys.identity import ANY, Identity
from emberline.gateway.store.base import Store
from emberline.gateway.store.watch import Remembered, Watch

PREFIXES = {"token": "egt_", "virtual": "evk_"}
_BEGINNINGS = tuple(PREFIXES.values())
_LENGTH = len(PREFIXES["token"]) + len(secrets.token_urlsafe(32))
_SHOWN = 10  # characters of a secret by which people know it again

Scope = Literal["use", "admin"]


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """As it is stored. `limits` names rules of the gateway that hold for this key besides those for all."""

    hash: str  # SHA-256, hex
    shown: str  # the secret's beginning
    name: str
    kind: Literal["token", "virtual"]
    account: str
    created: int  # ms
    user: str = ""
    scopes: tuple[Scope, ...] = ("use",)
    gateways: tuple[str, ...] = ANY
    allowed_models: tuple[str, ...] = ANY
    allowed_providers: tuple[str, ...] = ANY
    metadata: dict[str, str] = {}
    limits: tuple[str, ...] = ()
    expires: int | None = None  # ms
    disabled: bool = False

    @property
    def id(self) -> str:
        return id_of(self.hash)

    def holds(self, now: int) -> bool:
        return not self.disabled and (self.expires is None or now < self.expires)

    @property
    def identity(self) -> Identity:
        return Identity(
            key_id=self.id,
            name=self.name,
            kind=self.kind,
            user=self.user,
            allowed_models=self.allowed_models,
            allowed_providers=self.allowed_providers,
            metadata=self.metadata,
            admin="admin" in self.scopes,
            use="use" in self.scopes,
            account=self.account,
            gateways=self.gateways,
            limits=self.limits,
        )


def new_secret(kind: Literal["token", "virtual"]) -> str:
    return PREFIXES[kind] + secrets.token_urlsafe(32)


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def id_of(hash: str) -> str:
    return hash[:16]


def shown_of(secret: str) -> str:
    return secret[:_SHOWN]


def is_ours(token: str) -> bool:
    """It was one of ours, or is meant to be: nobody else's begin like that."""
    return token.startswith(_BEGINNINGS)


class Keys:
    def __init__(self, store: Store, watch: Watch, wall: Clock, fixed: Mapping[str, Identity] | None = None) -> None:
        """`wall` tells seconds since 1970. `fixed`: secrets of the configuration, which no change can take away."""
        for secret in fixed or {}:
            if len(secret) < 16:
                raise InvalidRequest("a key of the configuration is too short", hint="give 16 characters or more")
        self._fixed = {hash_of(secret): identity for secret, identity in (fixed or {}).items()}
        self._store = store
        self._wall = wall
        self._known: Remembered[str, tuple[Key, Identity] | None] = Remembered(watch)

    async def identify(self, token: str) -> Identity | None:
        """None: unknown, expired, disabled."""
        hash = hash_of(token)
        if hash in self._fixed:
            return self._fixed[hash]
        if len(token) != _LENGTH or not is_ours(token):
            return None
        return self._holding(await self._known.get(hash, lambda: self._load(hash)))

    async def holder(self, id: str) -> Identity | None:
        """Of the key with this id, which was shown before. None: it holds no longer."""
        fixed = next((each for each in self._fixed.values() if each.key_id == id), None)
        return fixed or self._holding(await self._known.get(id, lambda: self._load(id)))

    def _holding(self, found: tuple[Key, Identity] | None) -> Identity | None:
        if found is None or not found[0].holds(round(self._wall.now() * 1e3)):
            return None
        return found[1]

    async def _load(self, hash: str) -> tuple[Key, Identity] | None:
        """By all of its hash, or only by its id."""
        documents = await self._store.documents("key", "", prefix=id_of(hash), limit=2)
        for document in documents:
            key = msgspec.json.decode(document.body, type=Key)
            if hmac.compare_digest(key.hash[: len(hash)], hash):
                return key, key.identity
        return None
