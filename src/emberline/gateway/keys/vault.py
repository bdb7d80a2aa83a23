"""Vault: providers' keys, encrypted. Each has a data key of its own (AES-256-GCM), which a master key wraps; both are
bound to the account, provider and alias they were made for, so that one ciphertext cannot stand in another's place.

Rotation wraps data keys anew and leaves secrets as they are. The new master key is written beside the old before the
first is wrapped with it, so whenever it is interrupted everything can be read, and running it again finishes it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Protocol

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from emberline.gateway.errors import Conflict, StoreFailed
from emberline.gateway.keys.masterkeys import KeyFile, MasterKey, MasterKeys
from emberline.gateway.store.base import Audit, Change, Document, Store
from emberline.gateway.store.watch import Remembered, Watch

_NONCE = 12


class MasterSource(Protocol):
    def read(self) -> MasterKeys: ...


class Sealed(msgspec.Struct, frozen=True):
    """A provider's key, as it is stored."""

    master: str  # id of the key that wraps
    wrapped: bytes  # the data key
    sealed: bytes  # the secret
    created: int  # ms: when the secret was given


class Place(msgspec.Struct, frozen=True):
    account: str
    provider: str
    alias: str = "default"

    @property
    def id(self) -> str:
        return f"{self.provider}/{self.alias}"

    @property
    def bound(self) -> bytes:
        return msgspec.json.encode([self.account, self.provider, self.alias])

    @staticmethod
    def of(document: Document) -> Place:
        provider, _, alias = document.id.partition("/")
        return Place(document.account, provider, alias)


def seal(secret: str, place: Place, master: MasterKey, now: int) -> Sealed:
    data = AESGCM.generate_key(256)
    sealed = _close(data, secret.encode(), b"secret" + place.bound)
    return Sealed(master.id, _close(master.secret, data, b"key" + place.bound), sealed, now)


def unseal(sealed: Sealed, place: Place, masters: MasterKeys) -> str:
    data = _data_key(sealed, place, masters)
    return _open(data, sealed.sealed, b"secret" + place.bound).decode()


def rewrap(sealed: Sealed, place: Place, masters: MasterKeys) -> Sealed:
    """With the current master key."""
    data = _data_key(sealed, place, masters)
    wrapped = _close(masters.current.secret, data, b"key" + place.bound)
    return msgspec.structs.replace(sealed, master=masters.current.id, wrapped=wrapped)


class Vault:
    def __init__(self, store: Store, watch: Watch, masters: MasterSource) -> None:
        self._store = store
        self._masters = masters
        self._known: Remembered[Place, str | None] = Remembered(watch)

    async def reveal(self, account: str, provider: str, alias: str = "default") -> str | None:
        place = Place(account, provider, alias)
        return await self._known.get(place, lambda: self._load(place))

    async def document(self, place: Place, secret: str, now: int) -> Document:
        """To commit. The master keys are read anew: a rotation may have changed them."""
        masters = await asyncio.to_thread(self._masters.read)
        old = await self._store.get("provider_key", place.account, place.id)
        body = msgspec.json.encode(seal(secret, place, masters.current, now))
        return Document("provider_key", place.account, place.id, body, old.version if old else 0)

    async def _load(self, place: Place) -> str | None:
        document = await self._store.get("provider_key", place.account, place.id)
        if document is None:
            return None
        masters = await asyncio.to_thread(self._masters.read)
        return unseal(msgspec.json.decode(document.body, type=Sealed), place, masters)


async def rotate(store: Store, file: KeyFile, now: int) -> int:
    """A new master key for everything; how many keys were wrapped anew."""
    masters = (await asyncio.to_thread(file.read)).with_new()
    await asyncio.to_thread(file.write, masters)
    return await rewrap_all(store, masters, now)


async def rewrap_all(store: Store, masters: MasterKeys, now: int) -> int:
    done = 0
    while stale := await _stale(store, masters.current.id):
        for document in stale:
            body = rewrap(msgspec.json.decode(document.body, type=Sealed), Place.of(document), masters)
            audit = Audit(now, document.account, "operator", "provider_key.rewrap", document.id)
            new = replace(document, body=msgspec.json.encode(body))
            try:
                await store.commit(Change(audit, put=[new]))
                done += 1
            except Conflict:
                continue  # it was changed meanwhile: the next round looks at it again
    return done


async def forget_old(store: Store, file: KeyFile) -> int:
    """Old master keys that nothing needs any more are taken out of the file; how many."""
    masters = await asyncio.to_thread(file.read)
    if await _stale(store, masters.current.id):
        raise Conflict("some keys are still wrapped with an old master key", hint="finish the rotation first")
    await asyncio.to_thread(file.write, MasterKeys(masters.keys[:1]))
    return len(masters.keys) - 1


async def _stale(store: Store, current: str) -> list[Document]:
    found: list[Document] = []
    after = ("", "")
    while page := await store.documents("provider_key", "", after=after, limit=1000):
        found += [each for each in page if msgspec.json.decode(each.body, type=Sealed).master != current]
        after = (page[-1].id, page[-1].account)
    return found


def _data_key(sealed: Sealed, place: Place, masters: MasterKeys) -> bytes:
    master = masters.get(sealed.master)
    if master is None:
        raise StoreFailed(
            f"the key of {place.id} is wrapped with master key {sealed.master}, which is not here",
            hint="give that master key as well, or store the provider's key again",
        )
    return _open(master.secret, sealed.wrapped, b"key" + place.bound)


def _close(key: bytes, plain: bytes, bound: bytes) -> bytes:
    nonce = os.urandom(_NONCE)
    return nonce + AESGCM(key).encrypt(nonce, plain, bound)


def _open(key: bytes, closed: bytes, bound: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(closed[:_NONCE], closed[_NONCE:], bound)
    except InvalidTag:
        raise StoreFailed("a provider's key was damaged or moved", hint="store it again") from None
