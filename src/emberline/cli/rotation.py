"""`emberline gateway rotate-keys`: re-encrypts all stored provider keys with a new master key.

The command may run while gateways run, and it can be repeated after an interruption. Old master keys stay in the key
file until the command is run with `--forget-old`. With this option, the command deletes the old master keys after
checking that no stored provider key is still encrypted with one of them."""

from __future__ import annotations

import asyncio
import time

from emberline.core.config import MASTER_KEY_VARIABLE, read_secret
from emberline.core.errors import InvalidRequest
from emberline.core.gateway_config import GatewayConfig
from emberline.gateway.keys.master_keys import EnvironmentMasterKeys, open_master_keys
from emberline.gateway.keys.provider_key_vault import remove_old_master_keys, rewrap_all_data_keys, rotate_master_key
from emberline.gateway.store.factory import open_store


def rotate_keys(config: GatewayConfig, forget_old: bool) -> int:
    print(asyncio.run(_rotate_stored_keys(config, forget_old)))
    return 0


async def _rotate_stored_keys(config: GatewayConfig, forget_old: bool) -> str:
    masters = open_master_keys(config.master_key_file, read_secret(MASTER_KEY_VARIABLE))
    if not isinstance(masters, EnvironmentMasterKeys) and not config.master_key_file.exists():
        message = f"there is no master key at {config.master_key_file}, so no provider key is encrypted with one"
        hint = "use the gateway's own --config, and its EMBERLINE_CACHE or EMBERLINE_MASTER_KEY"
        raise InvalidRequest(message, param="master_key", hint=hint)
    store = await open_store(config.store_url)
    try:
        now = round(time.time() * 1e3)
        if isinstance(masters, EnvironmentMasterKeys):
            if forget_old:
                raise InvalidRequest(
                    f"--forget-old cannot delete master keys from the environment variable {MASTER_KEY_VARIABLE}",
                    hint=f"remove the old keys from {MASTER_KEY_VARIABLE}",
                )
            count = await rewrap_all_data_keys(store, masters.read(), now)
            current_id = masters.read().current_key.id
            return f"{count} keys are now encrypted with {current_id}, the first in {MASTER_KEY_VARIABLE}"
        if forget_old:
            return f"{await remove_old_master_keys(store, masters)} old master keys were deleted"
        count = await rotate_master_key(store, masters, now)
        return f"{count} keys are now encrypted with {masters.read().current_key.id}; gateways need no restart"
    finally:
        await store.close()
