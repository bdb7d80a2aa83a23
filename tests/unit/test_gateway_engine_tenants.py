"""The gateway separates its callers at the engine by a salt for each account and gateway key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gateway_requests import call

from emberline.core.clock import ManualClock
from emberline.core.tenants import TENANT_SALT_HEADER
from emberline.gateway.core.engine_tenants import EngineTenants
from emberline.gateway.core.identity import Identity
from emberline.gateway.keys.tenant_secret import open_engine_tenants
from emberline.gateway.providers.provider_call import build_provider_call
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.store.sqlite import SQLiteStore


def salt_sent(registry: ProviderRegistry, key_id: str = "", **about: Any) -> str:
    identity = Identity(key_id, key_id, "virtual")
    about = {"endpoint": "v1/chat/completions", **about}
    request = call(b'{"model":"m"}', provider="emberline", model="m", identity=identity, **about)
    provider = registry.find_provider("emberline", request.settings)
    return build_provider_call(request, provider, "engine-key", None, 0).request.headers[TENANT_SALT_HEADER]


def test_each_account_and_key_has_a_salt_of_its_own() -> None:
    registry = ProviderRegistry(engine_tenants=EngineTenants(b"secret"))
    other_account = salt_sent(registry, "ann", settings={"account": "b"})
    others = [salt_sent(registry, ""), salt_sent(registry, "bob"), other_account]
    assert salt_sent(registry, "ann") not in others and len(set(others)) == 3
    assert salt_sent(registry, "ann") == salt_sent(registry, "ann", dialect="anthropic", endpoint="v1/messages")
    forged = {TENANT_SALT_HEADER: salt_sent(registry, "bob")}
    assert salt_sent(registry, "ann", headers=forged) == salt_sent(registry, "ann"), "clients cannot choose it"
    assert salt_sent(ProviderRegistry(), "ann") != salt_sent(registry, "ann"), "not computable without the secret"


def test_other_providers_get_no_salt() -> None:
    request = call(b'{"model":"m"}', provider="openai", identity=Identity("ann", "ann", "virtual"))
    provider = ProviderRegistry().find_provider("openai", request.settings)
    assert TENANT_SALT_HEADER not in build_provider_call(request, provider, "key", None, 0).request.headers


def test_replicas_and_restarts_have_the_same_secret(tmp_path: Path) -> None:
    async def open_three() -> list[EngineTenants]:
        first, second = await SQLiteStore.open(tmp_path), await SQLiteStore.open(tmp_path)
        try:
            opened = await asyncio.gather(*(open_engine_tenants(store, ManualClock()) for store in (first, second)))
            return [*opened, await open_engine_tenants(second, ManualClock())]
        finally:
            await first.close()
            await second.close()

    assert len({tenants.secret for tenants in asyncio.run(open_three())}) == 1
