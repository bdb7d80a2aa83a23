"""`emberline gateway rotate-keys`: a new master key for all providers' keys. It may run beside running gateways, and
again after it was interrupted. Old master keys stay in the file until `--forget-old`, which checks what is needed."""

from __future__ import annotations

import asyncio
import time

from emberline.core.config import MASTER_KEY, secret
from emberline.core.errors import InvalidRequest
from emberline.core.gateway_config import GatewayConfig
from emberline.gateway.keys.masterkeys import FixedKeys, master_keys
from emberline.gateway.keys.vault import forget_old, rewrap_all, rotate
from emberline.gateway.store.opening import open_store


def rotate_keys(config: GatewayConfig, forget: bool) -> int:
    print(asyncio.run(_rotate(config, forget)))
    return 0


async def _rotate(config: GatewayConfig, forget: bool) -> str:
    masters = master_keys(config.master_file, secret(MASTER_KEY))
    store = await open_store(config.store_url)
    try:
        now = round(time.time() * 1e3)
        if isinstance(masters, FixedKeys):
            if forget:
                raise InvalidRequest(f"the master keys are in {MASTER_KEY}", hint="take the old ones out there")
            count = await rewrap_all(store, masters.read(), now)
            return f"{count} keys are now wrapped with {masters.read().current.id}, the first in {MASTER_KEY}"
        if forget:
            return f"{await forget_old(store, masters)} old master keys are gone"
        count = await rotate(store, masters, now)
        return f"{count} keys are now wrapped with {masters.read().current.id}; gateways need no restart"
    finally:
        await store.close()
