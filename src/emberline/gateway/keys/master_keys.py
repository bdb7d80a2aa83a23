"""MasterKeys: the keys that encrypt ("wrap") the data keys of stored provider keys.

The first master key wraps new data keys. The other master keys are older, and can still unwrap the data keys that they
wrapped. A master key's id is the beginning of its SHA-256 hash, so an id always names the same key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from emberline.core.errors import InvalidRequest
from emberline.gateway.keys.secret_file import SecretFile

_BYTES = 32


@dataclass(frozen=True, slots=True)
class MasterKey:
    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        return hashlib.sha256(b"emberline master key" + self.secret).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class MasterKeys:
    keys: tuple[MasterKey, ...]

    def __post_init__(self) -> None:
        assert self.keys

    @property
    def current_key(self) -> MasterKey:
        return self.keys[0]

    def get(self, id: str) -> MasterKey | None:
        return next((key for key in self.keys if key.id == id), None)

    @staticmethod
    def parse(text: str) -> MasterKeys:
        """Parse base64 keys that are separated by white space or commas.

        Raise InvalidRequest if a key is not valid base64 or has the wrong length.
        """
        try:
            keys = tuple(base64.b64decode(word, validate=True) for word in text.replace(",", " ").split())
        except binascii.Error as e:
            raise InvalidRequest(
                f"a master key is not valid base64: {e}", param="master_key", hint="create one: openssl rand -base64 32"
            ) from e
        if not keys or any(len(key) != _BYTES for key in keys):
            sizes = ", ".join(str(len(key)) for key in keys) or "none"
            raise InvalidRequest(
                f"every master key must have {_BYTES} bytes, but the sizes of the given keys are: {sizes}",
                param="master_key",
                hint="create one: openssl rand -base64 32",
            )
        return MasterKeys(tuple(map(MasterKey, keys)))

    def to_text(self) -> str:
        return "".join(base64.b64encode(key.secret).decode() + "\n" for key in self.keys)

    def with_new_key(self) -> MasterKeys:
        return MasterKeys((_new_master_key(), *self.keys))


def open_master_keys(key_file: Path, environment_value: str | None) -> EnvironmentMasterKeys | MasterKeyFile:
    """Return the source of master keys: the environment variable's value if it is set, else the file."""
    return EnvironmentMasterKeys(MasterKeys.parse(environment_value)) if environment_value else MasterKeyFile(key_file)


class EnvironmentMasterKeys:
    """Master keys that the operator set in the environment."""

    def __init__(self, keys: MasterKeys) -> None:
        self._keys = keys

    def read(self) -> MasterKeys:
        return self._keys


class MasterKeyFile:
    """A file of master keys. The first read creates the file with one new key."""

    def __init__(self, path: Path) -> None:
        self._file = SecretFile(path)

    def read(self) -> MasterKeys:
        return MasterKeys.parse(self._file.read_or_create(lambda: MasterKeys((_new_master_key(),)).to_text()))

    def write(self, keys: MasterKeys) -> None:
        self._file.write(keys.to_text())


def _new_master_key() -> MasterKey:
    return MasterKey(secrets.token_bytes(_BYTES))
