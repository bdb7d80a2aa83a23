"""The default gateway: the management API can change it unless the configuration file defines it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.core.clock import ManualClock
from emberline.gateway.admin.admin import AdminAPI
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.core.identity import ANONYMOUS, Identity
from emberline.gateway.core.settings import GatewaySettings, ProviderSettings
from emberline.gateway.keys.master_keys import MasterKeyFile
from emberline.gateway.keys.provider_key_vault import ProviderKeyVault
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.settings_store import SettingsStore, load_default_gateway, read_configured_gateways
from emberline.gateway.store.sqlite import SQLiteStore
from emberline.gateway.store.version_watch import StoreVersionWatch

ADMIN = Identity("root", "root", "token", is_admin=True)
USER = Identity("u", "a user", "virtual")
ENGINE = ProviderSettings(base_url="http://127.0.0.1:8000", key="k")
PATH = "/admin/accounts/default/gateways/default"


class GatewayProcess:
    """The parts of a gateway process that read and change settings, on a store that outlives them."""

    def __init__(self, directory: Path, config_file: dict[str, Any]) -> None:
        self._runner = asyncio.Runner()
        self.run: Any = self._runner.run
        self.clock = ManualClock()
        self.store = self.run(SQLiteStore.open(directory / "store"))
        configured = read_configured_gateways(config_file, ENGINE)
        self.own_settings = self.run(load_default_gateway(configured, self.store, self.clock))
        watch = StoreVersionWatch(self.store, self.clock, fresh_s=0)
        vault = ProviderKeyVault(self.store, watch, MasterKeyFile(directory / "master.key"))
        self.admin = AdminAPI(AdminContext(self.store, vault, self.clock, LocalLimiter(), configured=configured))
        self._settings = SettingsStore(configured, self.store, watch, ENGINE)

    def __call__(
        self, method: str, path: str = PATH, body: Any = None, query: str = "", caller: Identity = ADMIN
    ) -> tuple[int, Any]:
        raw = b"" if body is None else msgspec.json.encode(body)
        status, found = self.run(self.admin.handle(method, path, query, raw, caller))
        return status, msgspec.json.decode(msgspec.json.encode(found))

    @property
    def settings(self) -> GatewaySettings:
        found: GatewaySettings = self.run(self._settings.get_settings("default", "default"))
        return found

    def close(self) -> None:
        self.run(self.store.close())
        self._runner.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start a process on the test's store; the one before it is closed."""
    processes: list[GatewayProcess] = []

    def start(config_file: dict[str, Any] | None = None) -> GatewayProcess:
        stop()
        processes.append(GatewayProcess(tmp_path, config_file or {}))
        return processes[-1]

    def stop() -> None:
        if processes:
            processes.pop().close()

    yield start
    stop()


def test_default_gateway_can_be_changed_and_outlives_a_restart(start: Any) -> None:
    gateway = start()
    assert gateway.settings.authentication is False and gateway.settings.cache_ttl == 0
    [shown] = gateway("GET", "/admin/accounts/default/gateways")[1]["items"]
    assert shown["id"] == "default" and shown["version"] == 1, "version 0 is read-only in the dashboard"
    changed = {
        "authentication": True,
        "cache_ttl": 300,
        "retries": {"attempts": 3},
        "fallbacks": [{"model": "*", "to": ["emberline/small"]}],
        "limits": [{"name": "each", "limit": 5, "split": ["key"]}],
    }
    assert gateway("PUT", body=changed, query="version=1")[0] == 200
    assert gateway("PUT", body={}, query="version=1")[0] == 409, "another request has changed it"
    for settings in (gateway.settings, start().settings):
        assert settings.authentication and settings.cache_ttl == 300 and settings.retries.attempts == 3
        assert settings.fallbacks[0].to == ("emberline/small",) and settings.limits[0]["name"] == "each"
        assert settings.providers["emberline"].base_url == ENGINE.base_url, "the operator's engine stays reachable"
    entries = start()("GET", "/admin/accounts/default/audit")[1]["items"]
    assert [(e["actor"], e["action"]) for e in entries] == [("root", "gateway.update"), ("gateway", "gateway.create")]
    assert entries[0]["before"]["cache_ttl"] == 0 and entries[0]["after"]["cache_ttl"] == 300


def test_configuration_file_overrides_the_stored_default_gateway(start: Any) -> None:
    start()("PUT", body={"cache_ttl": 300})
    gateway = start({"gateways": {"default": {"cache_ttl": 60}}})
    assert gateway.settings.cache_ttl == gateway.own_settings.cache_ttl == 60
    [shown] = gateway("GET", "/admin/accounts/default/gateways")[1]["items"]
    assert (shown["version"], shown["value"]["cache_ttl"]) == (0, 60), "listed once, as the file defines it"
    cloudflare = gateway("GET", "/client/v4/accounts/default/ai-gateway/gateways")[1]["result"]
    assert [(each["id"], each["cache_ttl"]) for each in cloudflare] == [("default", 60)]
    status, found = gateway("PUT", body={})
    assert status == 409 and "configuration file" in found["error"]["message"]
    assert start().settings.cache_ttl == 300, "without the table, the stored settings apply again"


def test_default_gateway_needs_admin_rights_and_cannot_be_deleted(start: Any) -> None:
    gateway = start()
    assert gateway("PUT", body={"authentication": True}, caller=ANONYMOUS)[0] == 401
    assert gateway("PUT", body={"authentication": True}, caller=USER)[0] == 403
    assert gateway("DELETE")[0] == 409
    assert gateway.settings.authentication is False


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"retries": {"attempts": 9}}, "retries.attempts"),
        ({"timeouts": {"total": 0}}, "timeouts.total"),
        ({"cache_ttl": -1}, "cache_ttl"),
        ({"cache_ttl": "long"}, "cache_ttl"),
        ({"semantic": {"threshold": 2}}, "semantic.threshold"),
        ({"logs": {"days": 0}}, "logs.days"),
        ({"fallbacks": [{"model": "*", "to": ["small"]}]}, "fallbacks.to"),
        ({"default_provider": "opanai"}, "default_provider"),
        ({"limits": [{"name": "a", "limit": 1}, {"name": "b", "limit": -1}]}, "limits[1].limit"),
        ({"limits": [{"name": "a", "limit": 1, "split": ["team"]}]}, "limits[0].split"),
        ({"limits": [{"name": "a", "limit": 1, "per": "fortnight"}]}, "limits[0].per"),
        ({"budgets": [{"name": "a", "limit": 1.5}]}, "budgets[0].limit"),
        ({"budgets": [{"name": "a", "limit": 1}, {"name": "a", "limit": 1}]}, "budgets"),
    ],
)
def test_errors_name_the_setting(start: Any, settings: dict[str, Any], param: str) -> None:
    status, found = start()("PUT", body=settings)
    assert (status, found["error"]["param"]) == (400, param), found
