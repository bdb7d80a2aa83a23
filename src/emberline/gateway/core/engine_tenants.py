"""EngineTenants: the salts that separate the gateway's callers at the local engine.

All callers use the engine with the gateway's key. Without a salt, they would share its prefix cache, so that
`cached_tokens` and the time to the first token show what others have sent, and its stored responses.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class EngineTenants:
    """Computes the salt of each account and gateway key, with a secret that the engine's operator does not know."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)

    def salt_of(self, account: str, key_id: str) -> str:
        """Return the salt of the requests of a gateway key to an account. `key_id` is "" without a key."""
        return hmac.digest(self.secret, f"{account}\0{key_id}".encode(), hashlib.sha256).hex()[:32]
