"""Book: every gateway's settings, put together: what the file or the store says of the gateway, and what the store has
of its account besides: custom providers, budgets, routes, prices. A change is known within the watch's time."""

from __future__ import annotations

import tomllib
import zlib
from collections.abc import AsyncIterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from emberline.core.config import secret
from emberline.core.errors import InvalidRequest
from emberline.gateway.admin.shapes import Budget, CustomProvider, Route, RouteVersion
from emberline.gateway.checked import check_settings
from emberline.gateway.costs.cost import Price
from emberline.gateway.errors import GatewayNotFound
from emberline.gateway.paths import DEFAULT
from emberline.gateway.routes.graph import Graph
from emberline.gateway.settings import ProviderSettings, Settings
from emberline.gateway.store.base import Document, Kind, Store
from emberline.gateway.store.watch import Remembered, Watch

PAGE = 500
Fixed = Mapping[tuple[str, str], Settings]
T = TypeVar("T")


class Book:
    def __init__(self, fixed: Fixed, store: Store, watch: Watch, engine: str, *, needs_keys: bool = False) -> None:
        """`fixed`: those of the file, which the store cannot change. `needs_keys`: all need a key, in any case."""
        self._needs_keys = needs_keys
        self._fixed = fixed
        self._store = store
        self._engine = engine
        self._known: Remembered[tuple[str, str], Settings | None] = Remembered(watch)

    async def settings(self, account: str, gateway: str) -> Settings:
        found = await self._known.get((account, gateway), lambda: self._load(account, gateway))
        if found is None:
            raise GatewayNotFound(f"account {account[:80]!r} has no gateway {gateway[:80]!r}")
        return found

    async def _load(self, account: str, gateway: str) -> Settings | None:
        settings = self._fixed.get((account, gateway))
        if settings is None:
            document = await self._store.get("gateway", account, gateway)
            if document is None:
                return None
            settings = with_engine(_stored(document), self._engine)
            if self._needs_keys:
                settings = msgspec.structs.replace(settings, authentication=True)
        providers = {
            f"custom-{each.slug}": _custom(each) async for each in self._all("custom_provider", account, CustomProvider)
        }
        return msgspec.structs.replace(
            settings,
            providers={**providers, **settings.providers},
            budgets=(*settings.budgets, *[rule async for rule in self._budgets(account, gateway)]),
            routes={**settings.routes, **{name: graph async for name, graph in self._routes(account, gateway)}},
            prices={**settings.prices, **{name: price async for name, price in self._prices(account)}},
        )

    async def _budgets(self, account: str, gateway: str) -> AsyncIterator[dict[str, Any]]:
        async for budget in self._all("budget", account, Budget):
            if budget.enabled and _any(gateway, budget.gateways):
                yield msgspec.to_builtins(budget.rule)

    async def _prices(self, account: str) -> AsyncIterator[tuple[str, Price]]:
        async for document in self._documents("price", account):
            yield document.id, msgspec.json.decode(document.body, type=Price)

    async def _routes(self, account: str, gateway: str) -> AsyncIterator[tuple[str, Any]]:
        async for document in self._documents("route", account):
            route = msgspec.json.decode(document.body, type=Route)
            if route.deployed is not None:
                found = await self._store.get("route_version", account, f"{document.id}/{route.deployed:08d}")
                version = msgspec.json.decode(found.body, type=RouteVersion) if found is not None else None
                if version is not None and _any(gateway, version.gateways):
                    yield document.id, {"elements": msgspec.to_builtins(version.elements)}

    async def _all(self, kind: Kind, account: str, type: type[T]) -> AsyncIterator[T]:
        async for document in self._documents(kind, account):
            yield msgspec.json.decode(document.body, type=type)

    async def _documents(self, kind: Kind, account: str) -> AsyncIterator[Document]:
        after = ("", "")
        while page := await self._store.documents(kind, account, after=after, limit=PAGE):
            for document in page:
                yield document
            after = (page[-1].id, page[-1].account)


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _stored(document: Document) -> Settings:
    """Whoever may use the management API is not the operator: addresses it gives must be public ones."""
    settings = msgspec.json.decode(document.body, type=Settings)
    checked = {slug: msgspec.structs.replace(each, public=True) for slug, each in settings.providers.items()}
    return msgspec.structs.replace(settings, version=document.version, providers=checked)


def _custom(given: CustomProvider) -> ProviderSettings:
    return ProviderSettings(
        base_url=given.base_url, speaks=given.speaks, headers=given.headers, enabled=given.enable, public=True
    )


def read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise InvalidRequest(f"{path} cannot be read: {e}") from e


def read_gateways(found: Mapping[str, Any], engine: str) -> dict[tuple[str, str], Settings]:
    """From `[gateways.NAME]` tables; the default one is always there."""
    tables = found.get("gateways", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidRequest("gateways must be tables: [gateways.NAME]", param="gateways")
    gateways = {}
    for name, table in {DEFAULT: {}, **tables}.items():
        settings = Settings.read({"gateway": name, **table})
        if settings.gateway != name:
            raise InvalidRequest(f"gateway {name!r} calls itself {settings.gateway[:80]!r}", param="gateway")
        check_settings(settings)
        for route in settings.routes.values():
            Graph.read(route)
        if settings.cache_invalidate_on_update:
            settings = msgspec.structs.replace(settings, version=zlib.crc32(msgspec.json.encode(settings)))
        gateways[settings.account, name] = _with_secrets(with_engine(settings, engine))
    return gateways


def with_engine(settings: Settings, engine: str) -> Settings:
    """Our own engine is where the configuration says, unless the gateway knows better."""
    if "emberline" in settings.providers:
        return settings
    ours = {"emberline": ProviderSettings(base_url=engine)}
    return msgspec.structs.replace(settings, providers={**ours, **settings.providers})


def _with_secrets(settings: Settings) -> Settings:
    providers = dict(settings.providers)
    for slug, provider in providers.items():
        if provider.key_env is not None:
            if (key := secret(provider.key_env)) is None:
                raise InvalidRequest(
                    f"the key of {slug} is in the environment variable {provider.key_env}, which is not set",
                    param=f"providers.{slug}.key_env",
                )
            providers[slug] = msgspec.structs.replace(provider, key=key)
        elif provider.key_file is not None:
            try:
                key = Path(provider.key_file).expanduser().read_text().strip()
            except (OSError, ValueError) as e:
                raise InvalidRequest(
                    f"the key of {slug} cannot be read: {e}", param=f"providers.{slug}.key_file"
                ) from e
            providers[slug] = msgspec.structs.replace(provider, key=key)
    return msgspec.structs.replace(settings, providers=providers)
