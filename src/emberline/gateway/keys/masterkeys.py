"""MasterKeys: what data keys are wrapped with. The first is the one in use; older ones can still open what they closed.
A key's id is the beginning of its SHA-256, so an id cannot name another key than it was made with."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from emberline.core.errors import InvalidRequest
from emberline.gateway.keys.secretfile import SecretFile

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
    def current(self) -> MasterKey:
        return self.keys[0]

    def get(self, id: str) -> MasterKey | None:
        return next((key for key in self.keys if key.id == id), None)

    @staticmethod
    def parse(text: str) -> MasterKeys:
        """Keys in base64, with white space or commas between."""
        try:
            keys = tuple(base64.b64decode(word, validate=True) for word in text.replace(",", " ").split())
        except binascii.Error as e:
            raise InvalidRequest("a master key is not base64", param="master_key") from e
        if not keys or any(len(key) != _BYTES for key in keys):
            raise InvalidRequest(
                f"a master key must have {_BYTES} bytes", param="master_key", hint="openssl rand -base64 32"
            )
        return MasterKeys(tuple(map(MasterKey, keys)))

    def text(self) -> str:
        return "".join(base64.b64encode(key.secret).decode() + "\n" for key in self.keys)

    def with_new(self) -> MasterKeys:
        return MasterKeys((_new(), *self.keys))


def master_keys(file: Path, given: str | None) -> FixedKeys | KeyFile:
    """`given`: keys that the operator handed in by the environment; they go before the file."""
    return FixedKeys(MasterKeys.parse(given)) if given else KeyFile(file)


class FixedKeys:
    """Handed in by the operator."""

    def __init__(self, keys: MasterKeys) -> None:
        self._keys = keys

    def read(self) -> MasterKeys:
        return self._keys


class KeyFile:
    """Made with a new key when it is first read."""

    def __init__(self, path: Path) -> None:
        self._file = SecretFile(path)

    def read(self) -> MasterKeys:
        return MasterKeys.parse(self._file.read(lambda: MasterKeys((_new(),)).text()))

    def write(self, keys: MasterKeys) -> None:
        self._file.write(keys.text())


def _new() -> MasterKey:
    return MasterKey(secrets.token_bytes(_BYTES))
