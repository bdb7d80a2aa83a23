"""open_engine_tenants: reads the secret of EngineTenants from the store, and creates it at the first start."""

from __future__ import annotations

import msgspec

from emberline.core.clock import Clock
from emberline.gateway.core.engine_tenants import EngineTenants
from emberline.gateway.core.errors import Conflict
from emberline.gateway.store.base import AuditEntry, Document, GatewayStore, StoreChange

_DOCUMENT_ID = "engine-tenants"


async def open_engine_tenants(store: GatewayStore, wall_clock: Clock) -> EngineTenants:
    """Return the salts of this store's gateway. All replicas, now and after a restart, have the same secret."""
    while (found := await store.get("secret", "", _DOCUMENT_ID)) is None:
        audit = AuditEntry(round(wall_clock.now() * 1e3), "", "operator", "secret.create", _DOCUMENT_ID)
        document = Document("secret", "", _DOCUMENT_ID, msgspec.json.encode(EngineTenants().secret))
        try:
            await store.commit(StoreChange(audit, put=[document]))
        except Conflict:
            continue  # another replica was first: its secret is used
    return EngineTenants(msgspec.json.decode(found.body, type=bytes))
