"""`emberline gateway rotate-keys`: re-encrypts all stored provider keys with a new master key.

It may run beside running gateways, and again after an interruption. Old master keys stay in the file until
`--forget-old`, which first checks that no stored key needs them."""

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
                raise InvalidRequest(
                    f"--forget-old cannot change the environment variable {MASTER_KEY}, which has the master keys",
                    hint=f"remove the old keys from {MASTER_KEY}",
                )
            count = await rewrap_all(store, masters.read(), now)
            return f"{count} keys are now encrypted with {masters.read().current.id}, the first key in {MASTER_KEY}"
        if forget:
            return f"{await forget_old(store, masters)} old master keys were deleted"
        count = await rotate(store, masters, now)
        return f"{count} keys are now encrypted with {masters.read().current.id}; gateways need no restart"
    finally:
        await store.close()
