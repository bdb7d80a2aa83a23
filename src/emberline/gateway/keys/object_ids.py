"""ObjectIds: the ids by which callers refer to responses and conversations that a provider stores.

All callers share the operator's account at the provider, so the provider would show every caller's objects to everyone.
The gateway therefore replaces the provider's id by an id that contains the provider and a message authentication code.
The code depends on the caller's key and gateway, so an id is of use only to the key that created the object. Nothing is
stored; all replicas with the same master key accept the id, also after a restart.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

import msgspec

from emberline.gateway.core.request import GatewayRequest
from emberline.gateway.keys.master_keys import EnvironmentMasterKeys, MasterKeyFile, MasterKeys

_CODE_BYTES = 16
_PURPOSE = b"emberline ids of stored objects"


class StoredObject(msgspec.Struct, array_like=True, frozen=True):
    """An object at a provider."""

    id: str  # the provider's own
    provider: str
    key_alias: str | None  # of the stored provider key that created the object


class ObjectIds:
    def __init__(self, source: EnvironmentMasterKeys | MasterKeyFile) -> None:
        self._source = source
        self._keys: MasterKeys | None = None

    def wrap(self, found: StoredObject, call: GatewayRequest) -> str:
        """Return the id of an object that is valid for the caller of this request only."""
        payload = msgspec.msgpack.encode(found)
        code = _authentication_code(self._master_keys().current_key.secret, payload, call)
        prefix = found.id.partition("_")[0]
        return f"{prefix}_{base64.urlsafe_b64encode(code + payload).decode().rstrip('=')}"

    def unwrap(self, id: str, call: GatewayRequest) -> StoredObject | None:
        """Return the object with this id, or None if the id is malformed or belongs to another caller."""
        prefix, _, encoded = id.partition("_")
        try:
            data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
            found = msgspec.msgpack.decode(data[_CODE_BYTES:], type=StoredObject)
        except (binascii.Error, ValueError, msgspec.DecodeError):
            return None
        if found.id.partition("_")[0] != prefix or not self._is_authentic(data, call):
            return None
        return found

    def _is_authentic(self, data: bytes, call: GatewayRequest) -> bool:
        code, payload = data[:_CODE_BYTES], data[_CODE_BYTES:]
        if _matches_any_key(self._master_keys(), code, payload, call):
            return True
        self._keys = None  # the file may have a new key, with which another replica has made the id
        return _matches_any_key(self._master_keys(), code, payload, call)

    def _master_keys(self) -> MasterKeys:
        if self._keys is None:
            self._keys = self._source.read()
        return self._keys


def _matches_any_key(keys: MasterKeys, code: bytes, payload: bytes, call: GatewayRequest) -> bool:
    return any(hmac.compare_digest(_authentication_code(key.secret, payload, call), code) for key in keys.keys)


def _authentication_code(secret: bytes, payload: bytes, call: GatewayRequest) -> bytes:
    owner = msgspec.msgpack.encode((call.account, call.gateway, call.identity.kind, call.identity.key_id))
    key = hmac.digest(secret, _PURPOSE, "sha256")
    return hmac.digest(key, hashlib.sha256(owner).digest() + payload, "sha256")[:_CODE_BYTES]
