"""KeyStore: gateway tokens and virtual keys.

A secret is 32 random bytes. It is shown once and stored as its SHA-256 hash. A random secret needs no slow hash, and
SHA-256 costs half a microsecond per request. The first 16 digits of the hash are the key's id.

Keys are cached until the store changes (see `version_watch`).
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
from emberline.gateway.core.identity import ALLOW_ALL, Identity
from emberline.gateway.store.base import GatewayStore
from emberline.gateway.store.version_watch import StoreCache, StoreVersionWatch

KEY_PREFIXES = {"token": "egt_", "virtual": "evk_"}
_PREFIXES = tuple(KEY_PREFIXES.values())
_SECRET_CHARS = len(KEY_PREFIXES["token"]) + len(secrets.token_urlsafe(32))
_VISIBLE_CHARS = 10  # of a secret, shown in lists of keys

KeyScope = Literal["use", "admin", "cost"]


class StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway key as it is stored.

    `limits` lists the names of limits that apply only to keys that name them (`named = true` in the settings).
    """

    hash: str  # SHA-256, hex
    shown: str  # first characters of the secret
    name: str
    kind: Literal["token", "virtual"]
    account: str
    created: int  # ms
    user: str = ""
    scopes: tuple[KeyScope, ...] = ("use",)
    gateways: tuple[str, ...] = ALLOW_ALL
    allowed_models: tuple[str, ...] = ALLOW_ALL
    allowed_providers: tuple[str, ...] = ALLOW_ALL
    metadata: dict[str, str] = {}
    limits: tuple[str, ...] = ()
    expires: int | None = None  # ms
    disabled: bool = False

    @property
    def id(self) -> str:
        return key_id_of(self.hash)

    def is_valid(self, now: int) -> bool:
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
            is_admin="admin" in self.scopes,
            can_use_models="use" in self.scopes,
            may_state_cost=not {"admin", "cost"}.isdisjoint(self.scopes),
            account=self.account,
            gateways=self.gateways,
            limits=self.limits,
        )


def new_secret(kind: Literal["token", "virtual"]) -> str:
    return KEY_PREFIXES[kind] + secrets.token_urlsafe(32)


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def key_id_of(secret_hash: str) -> str:
    return secret_hash[:16]


def visible_prefix(secret: str) -> str:
    return secret[:_VISIBLE_CHARS]


def is_gateway_key(token: str) -> bool:
    """Return whether the token has the prefix of a gateway key, which no provider's keys have."""
    return token.startswith(_PREFIXES)


class KeyStore:
    def __init__(
        self,
        store: GatewayStore,
        watch: StoreVersionWatch,
        wall_clock: Clock,
        configured: Mapping[str, Identity] | None = None,
    ) -> None:
        """Create a store of gateway keys. `wall_clock` returns seconds since 1970.

        `configured` maps the secrets in the configuration file to identities; these secrets never expire. Raise
        InvalidRequest if one of them is too short.
        """
        for secret in configured or {}:
            if len(secret) < 16:
                raise InvalidRequest(
                    f"an API key in the configuration is too short: {len(secret)} characters",
                    hint="use a key of at least 16 characters",
                )
        self._configured = {hash_secret(secret): identity for secret, identity in (configured or {}).items()}
        self._store = store
        self._wall_clock = wall_clock
        self._cache: StoreCache[str, tuple[StoredKey, Identity] | None] = StoreCache(watch)

    async def identify(self, secret: str) -> Identity | None:
        """Return the identity of the key with this secret, or None if the key is unknown, expired or disabled."""
        hash = hash_secret(secret)
        if hash in self._configured:
            return self._configured[hash]
        if len(secret) != _SECRET_CHARS or not is_gateway_key(secret):
            return None
        return self._identity_if_valid(await self._cache.get(hash, lambda: self._load_key(hash)))

    async def identity_by_key_id(self, key_id: str) -> Identity | None:
        """Return the identity of the key with this id, or None if the key is unknown, expired or disabled.

        An id is not a secret. Call this method only for requests that were authenticated before.
        """
        configured = next((each for each in self._configured.values() if each.key_id == key_id), None)
        return configured or self._identity_if_valid(await self._cache.get(key_id, lambda: self._load_key(key_id)))

    def _identity_if_valid(self, key_and_identity: tuple[StoredKey, Identity] | None) -> Identity | None:
        if key_and_identity is None or not key_and_identity[0].is_valid(round(self._wall_clock.now() * 1e3)):
            return None
        return key_and_identity[1]

    async def _load_key(self, hash_or_id: str) -> tuple[StoredKey, Identity] | None:
        """Return the stored key with this hash or id, and its identity. An id is the beginning of a hash."""
        documents = await self._store.list_documents("key", "", prefix=key_id_of(hash_or_id), limit=2)
        for document in documents:
            key = msgspec.json.decode(document.body, type=StoredKey)
            if hmac.compare_digest(key.hash[: len(hash_or_id)], hash_or_id):
                return key, key.identity
        return None
