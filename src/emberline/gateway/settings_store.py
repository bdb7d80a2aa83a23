"""SettingsStore: the complete settings of every gateway.

The complete settings combine the gateway's own settings, from the configuration file or the store, with the custom
providers, budgets, routes and prices of its account. StoreVersionWatch decides how soon a change takes effect.
"""

from __future__ import annotations

import contextlib
import tomllib
import zlib
from collections.abc import AsyncIterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from emberline.core.clock import Clock
from emberline.core.config import read_secret
from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.schemas import AccountBudget, CustomProvider, RouteVersion, StoredRoute
from emberline.gateway.core.cost import Price
from emberline.gateway.core.errors import Conflict, GatewayNotFound
from emberline.gateway.core.paths import DEFAULT_NAME
from emberline.gateway.core.settings import GatewaySettings, ProviderSettings
from emberline.gateway.routes.graph import RouteGraph
from emberline.gateway.settings_checks import check_settings
from emberline.gateway.store.base import AuditEntry, Document, DocumentKind, GatewayStore, StoreChange
from emberline.gateway.store.version_watch import StoreCache, StoreVersionWatch

PAGE_SIZE = 500
ConfiguredGateways = Mapping[tuple[str, str], GatewaySettings]
T = TypeVar("T")


class SettingsStore:
    def __init__(
        self,
        configured: ConfiguredGateways,
        store: GatewayStore,
        watch: StoreVersionWatch,
        engine: ProviderSettings,
        *,
        require_keys: bool = False,
    ) -> None:
        """Create the store of settings.

        `configured`: the gateways of the configuration file, which the management API cannot change. `engine`: address
        and key of the engine. `require_keys`: every gateway in `store` requires a key, even if its settings do not; the
        settings in `configured` stay as they are.
        """
        self._require_keys = require_keys
        self._configured = configured
        self._store = store
        self._engine = engine
        self._cache: StoreCache[tuple[str, str], GatewaySettings | None] = StoreCache(watch)

    async def get_settings(self, account: str, gateway: str) -> GatewaySettings:
        found = await self._cache.get((account, gateway), lambda: self._load_settings(account, gateway))
        if found is None:
            raise GatewayNotFound(
                f"account {account[:80]!r} has no gateway {gateway[:80]!r}",
                hint="create the gateway with the management API or add [gateways.NAME] to the configuration file",
            )
        return found

    async def _load_settings(self, account: str, gateway: str) -> GatewaySettings | None:
        settings = self._configured.get((account, gateway))
        if settings is None:
            document = await self._store.get("gateway", account, gateway)
            if document is None:
                return None
            settings = with_engine_provider(_read_stored_settings(document), self._engine)
            if self._require_keys:
                settings = msgspec.structs.replace(settings, authentication=True)
        providers = {
            f"custom-{each.slug}": _custom_provider_settings(each)
            async for each in self._decode_all("custom_provider", account, CustomProvider)
        }
        return msgspec.structs.replace(
            settings,
            providers={**providers, **settings.providers},
            budgets=(*settings.budgets, *[rule async for rule in self._account_budgets(account, gateway)]),
            routes={**settings.routes, **{name: graph async for name, graph in self._account_routes(account, gateway)}},
            prices={**settings.prices, **{name: price async for name, price in self._account_prices(account)}},
        )

    async def _account_budgets(self, account: str, gateway: str) -> AsyncIterator[dict[str, Any]]:
        async for budget in self._decode_all("budget", account, AccountBudget):
            if budget.enabled and _matches_any(gateway, budget.gateways):
                yield msgspec.to_builtins(budget.rule)

    async def _account_prices(self, account: str) -> AsyncIterator[tuple[str, Price]]:
        async for document in self._list_documents("price", account):
            yield document.id, msgspec.json.decode(document.body, type=Price)

    async def _account_routes(self, account: str, gateway: str) -> AsyncIterator[tuple[str, Any]]:
        async for document in self._list_documents("route", account):
            route = msgspec.json.decode(document.body, type=StoredRoute)
            if route.deployed is not None:
                found = await self._store.get("route_version", account, f"{document.id}/{route.deployed:08d}")
                version = msgspec.json.decode(found.body, type=RouteVersion) if found is not None else None
                if version is not None and _matches_any(gateway, version.gateways):
                    yield document.id, {"elements": msgspec.to_builtins(version.elements)}

    async def _decode_all(self, kind: DocumentKind, account: str, type: type[T]) -> AsyncIterator[T]:
        async for document in self._list_documents(kind, account):
            yield msgspec.json.decode(document.body, type=type)

    async def _list_documents(self, kind: DocumentKind, account: str) -> AsyncIterator[Document]:
        after = ("", "")
        while page := await self._store.list_documents(kind, account, after=after, limit=PAGE_SIZE):
            for document in page:
                yield document
            after = (page[-1].id, page[-1].account)


def _matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _read_stored_settings(document: Document) -> GatewaySettings:
    """Return the stored settings, in which provider addresses are restricted to public ones.

    A user of the management API is not the operator, and must not reach private addresses.
    """
    settings = msgspec.json.decode(document.body, type=GatewaySettings)
    providers = {slug: msgspec.structs.replace(each, public=True) for slug, each in settings.providers.items()}
    return msgspec.structs.replace(settings, version=document.version, providers=providers)


def _custom_provider_settings(custom: CustomProvider) -> ProviderSettings:
    return ProviderSettings(
        base_url=custom.base_url, speaks=custom.speaks, headers=custom.headers, enabled=custom.enable, public=True
    )


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the decoded configuration file. Raise InvalidRequest if the file cannot be read."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise InvalidRequest(
            f"configuration file {path} cannot be read: {e}", hint="the file must exist and be valid TOML"
        ) from e


async def load_default_gateway(
    configured: ConfiguredGateways, store: GatewayStore, wall_clock: Clock
) -> GatewaySettings:
    """Return the default gateway's own settings: from the configuration file if it defines them, else from the store.

    If neither has them, add a default gateway to the store. The management API can then change it like any other.
    """
    name = (DEFAULT_NAME, DEFAULT_NAME)
    if (settings := configured.get(name)) is not None:
        return settings
    if await store.get("gateway", *name) is None:
        now = round(wall_clock.now() * 1e3)
        audit = AuditEntry(at=now, account=DEFAULT_NAME, actor="gateway", action="gateway.create", target=DEFAULT_NAME)
        with contextlib.suppress(Conflict):  # another process has just added it
            # An empty object: settings that are not stored have the defaults of the running version.
            await store.commit(StoreChange(audit, put=[Document("gateway", *name, b"{}")]))
    document = await store.get("gateway", *name)
    assert document is not None, "the management API does not delete the default gateway"
    return _read_stored_settings(document)


def read_configured_gateways(
    config: Mapping[str, Any], engine: ProviderSettings
) -> dict[tuple[str, str], GatewaySettings]:
    """Return the gateways of the `[gateways.NAME]` tables, by account and name.

    Raise InvalidRequest if a table has an invalid value or names a provider key that cannot be read.
    """
    tables = config.get("gateways", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidRequest(
            "gateways in the configuration file must be tables", param="gateways", hint="write [gateways.NAME] tables"
        )
    gateways = {}
    for name, table in tables.items():
        settings = GatewaySettings.parse({"gateway": name, **table})
        if settings.gateway != name:
            raise InvalidRequest(
                f"gateway in the table [gateways.{name}] must be {name!r}, not {settings.gateway[:80]!r}",
                param="gateway",
                hint="leave `gateway` out of the table",
            )
        check_settings(settings)
        for route in settings.routes.values():
            RouteGraph.parse(route)
        if settings.cache_invalidate_on_update:
            settings = msgspec.structs.replace(settings, version=zlib.crc32(msgspec.json.encode(settings)))
        gateways[settings.account, name] = _with_provider_keys(with_engine_provider(settings, engine))
    return gateways


def with_engine_provider(settings: GatewaySettings, engine: ProviderSettings) -> GatewaySettings:
    """Return the settings with a provider `emberline`.

    It has the address and the key of `engine`, unless the settings give it another address or key.
    """
    own = settings.providers.get("emberline", ProviderSettings())
    if own.base_url is not None:  # the key is only for the address of `engine`
        return settings
    # The operator chose this address, so it may be private, also in settings from the management API.
    found = msgspec.structs.replace(own, base_url=engine.base_url, key=own.key or engine.key, public=False)
    return msgspec.structs.replace(settings, providers={**settings.providers, "emberline": found})


def _with_provider_keys(settings: GatewaySettings) -> GatewaySettings:
    providers = dict(settings.providers)
    for slug, provider in providers.items():
        if provider.key_env is not None:
            if (key := read_secret(provider.key_env)) is None:
                raise InvalidRequest(
                    f"the key of provider {slug!r} cannot be read: environment variable {provider.key_env} is not set",
                    param=f"providers.{slug}.key_env",
                    hint=f"set {provider.key_env}, or correct key_env",
                )
            providers[slug] = msgspec.structs.replace(provider, key=key)
        elif provider.key_file is not None:
            try:
                key = Path(provider.key_file).expanduser().read_text().strip()
            except (OSError, ValueError) as e:
                raise InvalidRequest(
                    f"the key of provider {slug!r} cannot be read: {e}",
                    param=f"providers.{slug}.key_file",
                    hint="check the path in key_file and the file's owner and mode",
                ) from e
            providers[slug] = msgspec.structs.replace(provider, key=key)
    return msgspec.structs.replace(settings, providers=providers)
