"""ProviderKeyVault: the provider keys in the store, in encrypted form.

Each provider key is encrypted (AES-256-GCM) with a data key of its own. A master key encrypts ("wraps") the data key.
Both ciphertexts are authenticated with the account, provider and alias, so that a ciphertext copied from a different
provider key is rejected.

A rotation wraps every data key with a new master key and leaves the encrypted provider keys as they are. The new master
key is written to the file before it wraps the first data key. So an interrupted rotation leaves every provider key
readable, and running it again completes it.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Protocol

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from emberline.gateway.core.errors import Conflict, StoreFailed
from emberline.gateway.keys.master_keys import MasterKey, MasterKeyFile, MasterKeys
from emberline.gateway.store.base import AuditEntry, Document, GatewayStore, StoreChange
from emberline.gateway.store.version_watch import StoreCache, StoreVersionWatch

_NONCE_BYTES = 12


class MasterKeySource(Protocol):
    def read(self) -> MasterKeys: ...


class EncryptedKey(msgspec.Struct, frozen=True):
    """A provider key in encrypted form, as it is stored."""

    master: str  # id of the master key that wraps the data key
    wrapped: bytes  # encrypted data key
    sealed: bytes  # encrypted secret
    created: int  # ms since 1970: when the secret was stored


class ProviderKeyID(msgspec.Struct, frozen=True):
    """The account, provider and alias that identify a provider key."""

    account: str
    provider: str
    alias: str = "default"

    @property
    def id(self) -> str:
        return f"{self.provider}/{self.alias}"

    @property
    def associated_data(self) -> bytes:
        """The data that AES-GCM authenticates together with the ciphertexts."""
        return msgspec.json.encode([self.account, self.provider, self.alias])

    @staticmethod
    def from_document(document: Document) -> ProviderKeyID:
        provider, _, alias = document.id.partition("/")
        return ProviderKeyID(document.account, provider, alias)


def encrypt_key(secret: str, key_id: ProviderKeyID, master_key: MasterKey, now: int) -> EncryptedKey:
    data_key = AESGCM.generate_key(256)
    sealed = _encrypt(data_key, secret.encode(), b"secret" + key_id.associated_data)
    return EncryptedKey(
        master_key.id, _encrypt(master_key.secret, data_key, b"key" + key_id.associated_data), sealed, now
    )


def decrypt_key(encrypted: EncryptedKey, key_id: ProviderKeyID, master_keys: MasterKeys) -> str:
    """Return the provider key in plain text.

    Raise StoreFailed if the master key is missing or the ciphertext is damaged.
    """
    data_key = _unwrap_data_key(encrypted, key_id, master_keys)
    return _decrypt(data_key, encrypted.sealed, b"secret" + key_id.associated_data, key_id).decode()


def rewrap_data_key(encrypted: EncryptedKey, key_id: ProviderKeyID, master_keys: MasterKeys) -> EncryptedKey:
    """Return the encrypted provider key with its data key wrapped by the current master key."""
    data_key = _unwrap_data_key(encrypted, key_id, master_keys)
    wrapped = _encrypt(master_keys.current_key.secret, data_key, b"key" + key_id.associated_data)
    return msgspec.structs.replace(encrypted, master=master_keys.current_key.id, wrapped=wrapped)


class ProviderKeyVault:
    def __init__(self, store: GatewayStore, watch: StoreVersionWatch, master_keys: MasterKeySource) -> None:
        self._store = store
        self._masters = master_keys
        self._cache: StoreCache[ProviderKeyID, str | None] = StoreCache(watch)

    async def get_key(self, account: str, provider: str, alias: str = "default") -> str | None:
        """Return the decrypted provider key, or None if the account has no such key."""
        key_id = ProviderKeyID(account, provider, alias)
        return await self._cache.get(key_id, lambda: self._load_key(key_id))

    async def encrypt_to_document(self, key_id: ProviderKeyID, secret: str, now: int) -> Document:
        """Encrypt a provider key and return it as a document, which the caller commits.

        The master keys are read again, because a rotation may have changed them.
        """
        masters = await asyncio.to_thread(self._masters.read)
        old = await self._store.get("provider_key", key_id.account, key_id.id)
        body = msgspec.json.encode(encrypt_key(secret, key_id, masters.current_key, now))
        return Document("provider_key", key_id.account, key_id.id, body, old.version if old else 0)

    async def _load_key(self, key_id: ProviderKeyID) -> str | None:
        document = await self._store.get("provider_key", key_id.account, key_id.id)
        if document is None:
            return None
        masters = await asyncio.to_thread(self._masters.read)
        return decrypt_key(msgspec.json.decode(document.body, type=EncryptedKey), key_id, masters)


async def rotate_master_key(store: GatewayStore, key_file: MasterKeyFile, now: int) -> int:
    """Create a new master key and wrap every data key with it. Return the number of data keys."""
    masters = (await asyncio.to_thread(key_file.read)).with_new_key()
    await asyncio.to_thread(key_file.write, masters)
    return await rewrap_all_data_keys(store, masters, now)


async def rewrap_all_data_keys(store: GatewayStore, master_keys: MasterKeys, now: int) -> int:
    """Wrap every data key with the current master key, except data keys that it already wraps.

    Return the number of data keys that an older master key had wrapped.
    """
    done = 0
    while stale := await _find_keys_to_rewrap(store, master_keys.current_key.id):
        for document in stale:
            body = rewrap_data_key(
                msgspec.json.decode(document.body, type=EncryptedKey),
                ProviderKeyID.from_document(document),
                master_keys,
            )
            audit = AuditEntry(now, document.account, "operator", "provider_key.rewrap", document.id)
            new = replace(document, body=msgspec.json.encode(body))
            try:
                await store.commit(StoreChange(audit, put=[new]))
                done += 1
            except Conflict:
                continue  # changed by another process: the next round reads it again
    return done


async def remove_old_master_keys(store: GatewayStore, key_file: MasterKeyFile) -> int:
    """Remove all master keys but the current one from the file. Return how many were removed.

    Raise Conflict if a provider key still needs an older master key.
    """
    masters = await asyncio.to_thread(key_file.read)
    if stale := await _find_keys_to_rewrap(store, masters.current_key.id):
        raise Conflict(
            f"old master keys cannot be removed: {len(stale)} provider keys are still wrapped with them",
            hint="complete the rotation first: emberline gateway rotate-keys",
        )
    await asyncio.to_thread(key_file.write, MasterKeys(masters.keys[:1]))
    return len(masters.keys) - 1


async def _find_keys_to_rewrap(store: GatewayStore, current_master_id: str) -> list[Document]:
    """Return the documents of the provider keys whose data key is wrapped by an older master key."""
    found: list[Document] = []
    after = ("", "")
    while page := await store.list_documents("provider_key", "", after=after, limit=1000):
        found += [
            each for each in page if msgspec.json.decode(each.body, type=EncryptedKey).master != current_master_id
        ]
        after = (page[-1].id, page[-1].account)
    return found


def _unwrap_data_key(encrypted: EncryptedKey, key_id: ProviderKeyID, master_keys: MasterKeys) -> bytes:
    master = master_keys.get(encrypted.master)
    if master is None:
        raise StoreFailed(
            f"provider key {key_id.id!r} cannot be decrypted: the master key {encrypted.master} is not available",
            hint="add that master key to the file or to EMBERLINE_MASTER_KEY, or store the provider key again",
        )
    return _decrypt(master.secret, encrypted.wrapped, b"key" + key_id.associated_data, key_id)


def _encrypt(key: bytes, plaintext: bytes, associated_data: bytes) -> bytes:
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, plaintext, associated_data)


def _decrypt(key: bytes, ciphertext: bytes, associated_data: bytes, key_id: ProviderKeyID) -> bytes:
    try:
        return AESGCM(key).decrypt(ciphertext[:_NONCE_BYTES], ciphertext[_NONCE_BYTES:], associated_data)
    except InvalidTag:
        raise StoreFailed(
            f"provider key {key_id.id!r} cannot be decrypted: the ciphertext is damaged or from a different key",
            hint="store the provider key again",
        ) from None
