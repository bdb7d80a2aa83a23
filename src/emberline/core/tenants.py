"""The header with which a gateway separates its callers at an engine or router.

All callers of a gateway use the engine with the same API key, or with none. The header's value is added to that key, so
it can only divide the tenant of the key: cached prompts, stored responses and resumable streams are not shared between
requests with different values.
"""

from __future__ import annotations

import hashlib

TENANT_SALT_HEADER = "x-emberline-tenant-salt"


def make_tenant(key: str, salt: str) -> str:
    """Return the tenant of an API key and a salt, of which at least one is not empty."""
    tenant = _hash(f"emberline tenant\0{key}")
    return tenant + "." + _hash(f"emberline tenant\0{key}\0{salt}") if salt else tenant


def key_of_tenant(tenant: str) -> str:
    """Return the part of a tenant that is the same for all salts. Keys share a server's resources equally."""
    return tenant.partition(".")[0]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
