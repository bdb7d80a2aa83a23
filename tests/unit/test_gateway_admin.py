"""The management API: access, valid and invalid requests, and the audit entry of every change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
from gateway_records import DAY, NOON, make_record, new_record_id

from emberline.core.clock import ManualClock
from emberline.core.errors import EmberlineError, InvalidRequest, Overloaded
from emberline.gateway.admin import logs
from emberline.gateway.admin.admin import AdminAPI
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.admin.admin_request import AdminRequest
from emberline.gateway.admin.logs import LogEndpoints
from emberline.gateway.core.identity import ANONYMOUS, Identity
from emberline.gateway.core.log_record import LogPayload, LogRecord
from emberline.gateway.core.settings import GatewaySettings, ProviderSettings
from emberline.gateway.costs.catalogue import Catalogue
from emberline.gateway.keys.key_store import KeyStore
from emberline.gateway.keys.master_keys import MasterKeyFile
from emberline.gateway.keys.provider_key_vault import ProviderKeyVault
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.limits.rule import LimitRule
from emberline.gateway.providers.registry import PROVIDERS_BY_SLUG
from emberline.gateway.store.sqlite import SQLiteStore
from emberline.gateway.store.version_watch import StoreVersionWatch
from emberline.wire.usage import Usage

ROOT = Identity("root", "root", "token", is_admin=True)
ACME = Identity("a1", "acme's", "token", is_admin=True, account="acme")
USER = Identity("u1", "a user", "virtual", account="acme")
A = "/admin/accounts/acme"
CF = "/client/v4/accounts/acme/ai-gateway"


class AdminClient:
    def __init__(self, directory: Path) -> None:
        self._runner = asyncio.Runner()
        self.run: Any = self._runner.run
        self.store = self.run(SQLiteStore.open(directory / "store"))
        self.clock, self.wall = ManualClock(), ManualClock(NOON / 1e3)
        self.watch = StoreVersionWatch(self.store, self.clock)
        self.vault = ProviderKeyVault(self.store, self.watch, MasterKeyFile(directory / "master.key"))
        self.limiter = LocalLimiter()
        provider = ProviderSettings(base_url="http://127.0.0.1:8000", key="sk-in-the-file")
        fixed = {("acme", "filed"): GatewaySettings(account="acme", gateway="filed", providers={"emberline": provider})}
        self.admin_context = AdminContext(self.store, self.vault, self.wall, self.limiter, configured=fixed)
        self.admin = AdminAPI(self.admin_context, "1.0")

    def __call__(
        self, method: str, path: str, body: Any = None, query: str = "", caller: Identity = ACME
    ) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        status, found = self.run(self.admin.handle(method, path, query, raw, caller))
        return status, msgspec.json.decode(msgspec.json.encode(found))

    def ok(self, method: str, path: str, body: Any = None, query: str = "") -> Any:
        status, found = self(method, path, body, query)
        assert status in (200, 201), found
        return found

    def expect_error(self, status: int, method: str, path: str, body: Any = None, query: str = "") -> dict[str, Any]:
        got, found = self(method, path, body, query)
        assert got == status, found
        return found["error"] if "error" in found else found["errors"][0]

    def audits(self) -> list[tuple[str, str, str]]:
        return [(each["actor"], each["action"], each["target"]) for each in self.ok("GET", f"{A}/audit")["items"]]

    def close(self) -> None:
        self.run(self.store.close())
        self._runner.close()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[AdminClient]:
    opened = AdminClient(tmp_path)
    yield opened
    opened.close()


# Access


def test_only_admin_keys_of_the_account_are_allowed(api: AdminClient) -> None:
    for path in (f"{A}/keys", f"{CF}/gateways"):
        assert api("GET", path, caller=ANONYMOUS)[0] == 401
        assert api("GET", path, caller=USER)[0] == 403
        assert api("GET", path.replace("acme", "other"), caller=ACME)[0] == 403
        assert api("GET", path, caller=ACME)[0] == 200
        assert api("GET", path.replace("acme", "other"), caller=ROOT)[0] == 200
    for caller in (ANONYMOUS, USER):
        with pytest.raises(EmberlineError):
            api.admin.export("GET", f"{A}/logs/export", "", caller)
    assert api("GET", "/admin/openapi.json", caller=ANONYMOUS)[0] == 200


def test_account_in_path_is_a_name_not_a_pattern(api: AdminClient) -> None:
    for account in ("*", "a*", "..", "a%2Fb", "a" * 65, "%ff"):
        assert api("GET", f"/admin/accounts/{account}/keys", caller=ROOT)[0] in (400, 404), account


def test_unknown_paths_methods_and_parameters_are_refused(api: AdminClient) -> None:
    api.expect_error(404, "GET", f"{A}/nothing")
    assert "called with GET" in api.expect_error(405, "POST", f"{A}/audit")["message"]
    assert api.expect_error(400, "GET", f"{A}/keys", query="x=1")["param"] == "x"
    assert "twice" in api.expect_error(400, "GET", f"{A}/keys", query="limit=1&limit=2")["message"]
    api.expect_error(400, "GET", f"{A}/keys", query="limit=0")
    api.expect_error(400, "GET", f"{A}/keys", b"{}")
    api.expect_error(400, "POST", f"{A}/keys", b"{")
    api.expect_error(400, "POST", f"{A}/keys", b"\xff")
    api.expect_error(400, "GET", f"{A}/logs/export")  # only by export


def test_handles_path_recognizes_admin_paths() -> None:
    for path in (f"{A}/keys", f"{CF}/gateways", "/accounts/a/ai-gateway/logs"):
        assert AdminAPI.handles_path(path)
    for path in (
        "/accounts/a/ai/v1/chat/completions",
        "/client/v4/accounts/a/ai/run/m",
        "/v1/a/g/openai",
        "/administer",
    ):
        assert not AdminAPI.handles_path(path)


# Keys


def test_key_is_shown_once_works_and_is_revoked(api: AdminClient) -> None:
    wish = {"name": "ci", "user": "bot", "allowed_models": ["gpt-*"], "metadata": {"team": "x"}, "limits": ["small"]}
    key = api.ok("POST", f"{A}/keys", wish)
    secret, id = key["secret"], key["id"]
    assert secret.startswith(key["shown"]) and len(secret) > 40
    shown = [api.ok("GET", f"{A}/keys/{id}"), api.ok("GET", f"{A}/keys"), api.ok("GET", f"{A}/audit")]
    assert secret not in str(shown) and "hash" not in str(shown)
    keys = KeyStore(api.store, api.watch, api.wall)
    caller = api.run(keys.identify(secret))
    assert (caller.account, caller.user, caller.limits, caller.is_admin) == ("acme", "bot", ("small",), False)
    patched = api.ok("PATCH", f"{A}/keys/{id}", {"disabled": True, "metadata": {"team": None, "x": "y"}})
    assert patched["disabled"] and patched["metadata"] == {"x": "y"} and patched["user"] == "bot"
    api.clock.advance(1.0)
    assert api.run(keys.identify(secret)) is None
    api.ok("PATCH", f"{A}/keys/{id}", {"disabled": False})
    api.clock.advance(1.0)
    assert api.run(keys.identify(secret)) is not None
    api.ok("DELETE", f"{A}/keys/{id}")
    api.clock.advance(1.0)
    assert api.run(keys.identify(secret)) is None
    api.expect_error(404, "GET", f"{A}/keys/{id}")
    actions = [("a1", f"key.{action}", id) for action in ("delete", "update", "update", "create")]
    assert api.audits() == actions


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a", "hash": "x"}, "hash"),
        ({"name": "a", "account": "other"}, "account"),
        ({"name": "a", "kind": "root"}, "kind"),
        ({"name": "a", "scopes": []}, "scopes"),
        ({"name": "a", "scopes": ["use", "fly"]}, "scopes[1]"),
        ({"name": "a", "metadata": {str(i): "" for i in range(6)}}, "metadata"),
        ({"name": "a", "expires": NOON}, "expires"),
        ({"name": "a", "expires": "soon"}, "expires"),
        ({"name": "a" * 129}, "name"),
    ],
)
def test_invalid_key_is_refused(api: AdminClient, wish: Any, param: str | None) -> None:
    assert api.expect_error(400, "POST", f"{A}/keys", wish)["param"] == param
    assert api.audits() == []


def test_fixed_fields_of_a_key_cannot_be_changed(api: AdminClient) -> None:
    id = api.ok("POST", f"{A}/keys", {"name": "a"})["id"]
    for patch in ({"kind": "token"}, {"hash": "0"}, {"account": "other"}, {"created": 1}):
        api.expect_error(400, "PATCH", f"{A}/keys/{id}", patch)
    api.expect_error(400, "PATCH", f"{A}/keys/{id}", {"name": None})  # required


def test_key_of_another_account_is_not_found(api: AdminClient) -> None:
    id = api.ok("POST", f"{A}/keys", {"name": "a"})["id"]
    for method in ("GET", "DELETE"):
        assert api(method, f"/admin/accounts/other/keys/{id}", caller=ROOT)[0] == 404


# Provider keys


def test_provider_key_is_stored_and_never_shown(api: AdminClient) -> None:
    path = f"{A}/provider-keys/openai/default"
    api.ok("PUT", path, {"secret": "sk-one"})
    assert api.run(api.vault.get_key("acme", "openai", "default")) == "sk-one"
    api.ok("PUT", path, {"secret": "sk-two"})
    api.clock.advance(1.0)
    assert api.run(api.vault.get_key("acme", "openai", "default")) == "sk-two"
    everything = str([api.ok("GET", f"{A}/provider-keys"), api.ok("GET", f"{A}/audit")])
    assert "sk-" not in everything and "'openai'" in everything
    for wrong in ("", " sk", "sk\n", "sk-ü"):
        api.expect_error(400, "PUT", path, {"secret": wrong})
    api.ok("DELETE", path)
    api.clock.advance(1.0)
    assert api.run(api.vault.get_key("acme", "openai", "default")) is None
    assert [action for _, action, _ in api.audits()] == [f"provider_key.{a}" for a in ("delete", "update", "create")]


# LocalGateway, prices, budgets, custom providers


def test_gateway_is_created_changed_and_deleted(api: AdminClient) -> None:
    path = f"{A}/gateways/main"
    made = api.ok("POST", path, {"cache_ttl": 60, "logs": {"days": 7}})
    assert (made["version"], made["value"]["account"], made["value"]["gateway"]) == (1, "acme", "main")
    api.expect_error(409, "POST", path, {})
    patched = api.ok("PATCH", path, {"cache_ttl": None, "logs": {"payloads": False}})
    assert (patched["version"], patched["value"]["cache_ttl"]) == (2, 0)
    assert patched["value"]["logs"] == {"collect": True, "payloads": False, "days": 7}
    api.expect_error(409, "PUT", path, {}, query="version=1")
    assert api.ok("PUT", path, {}, query="version=2")["value"]["logs"]["days"] == 30
    api.expect_error(409, "DELETE", path, query="version=2")
    api.ok("DELETE", path, query="version=3")
    api.expect_error(404, "GET", path)
    assert len(api.audits()) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"unknown": 1},
        {"cache_ttl": -1},
        {"cache_ttl": "60"},
        {"retries": {"attempts": 9}},
        {"limits": [{"name": "a", "limit": -1}]},
        {"limits": [{"name": "a", "limit": 1, "split": ["nothing"]}]},
        {"budgets": [{"name": "a", "limit": 1}, {"name": "a", "limit": 1}]},
        {"routes": {"x": {}}},
        {"providers": {"openai": {"key": "sk-secret"}}},
        {"providers": {"openai": {"key_env": "HOME"}}},
        {"providers": {"own": {"base_url": "http://127.0.0.1"}}},
        {"providers": {"own": {"base_url": "https://169.254.169.254"}}},
        {"providers": {"own": {"base_url": "https://a.example", "speaks": ["klingon"]}}},
        {"providers": {"own": {"base_url": "https://a.example", "headers": {"x": "a\nb"}}}},
        {"providers": {"own": {}}},
        {"fallbacks": [{"model": "*", "to": ["nobody/m"]}]},
        {"prices": {"openai/gpt-5": {"input": -1, "output": 1}}},
        {"account": "another"},
        {"gateway": "another"},
        {"logs": {"days": 0}},
    ],
)
def test_invalid_settings_are_refused(api: AdminClient, settings: Any) -> None:
    error = api.expect_error(400, "POST", f"{A}/gateways/main", settings)
    assert error["message"] and "sk-secret" not in str(error)
    assert api.audits() == []


def test_configured_gateway_is_shown_without_keys_and_cannot_change(api: AdminClient) -> None:
    shown = api.ok("GET", f"{A}/gateways")["items"]
    assert [each["id"] for each in shown] == ["filed"] and "sk-in-the-file" not in str(shown)
    assert "sk-in-the-file" not in str(api.ok("GET", f"{A}/gateways/filed"))
    assert "sk-in-the-file" not in str(api.ok("GET", f"{CF}/gateways/filed"))
    for method, body in (("POST", {}), ("PUT", {}), ("PATCH", {}), ("DELETE", None)):
        assert "configuration file" in api.expect_error(409, method, f"{A}/gateways/filed", body)["message"]


def test_price_names_may_have_slashes(api: AdminClient) -> None:
    path = f"{A}/prices/huggingface/meta-llama%2FLlama-3/x"
    made = api.ok("PUT", path, {"input": 150_000, "output": 600_000, "cached_read": 75_000})
    assert made["id"] == "huggingface/meta-llama/Llama-3/x"
    assert api.ok("GET", path)["value"]["output"] == 600_000
    for wrong in (
        {"input": 1.5, "output": 1},
        {"input": -1, "output": 1},
        {"input": 1},
        {"input": 1, "output": 10**13},
    ):
        api.expect_error(400, "PUT", path, wrong)
    assert [each["id"] for each in api.ok("GET", f"{A}/prices")["items"]] == [made["id"]]


def test_budgets_are_stored_and_checked(api: AdminClient) -> None:
    rule = {"name": "month", "limit": 5_000_000, "amount": "micros", "per": "month", "split": ["key"]}
    made = api.ok("PUT", f"{A}/budgets/month", {"rule": rule, "gateways": ["main"]})
    assert made["value"]["rule"]["limit"] == 5_000_000
    api.expect_error(400, "PUT", f"{A}/budgets/other", {"rule": rule})
    duplicate = {"limits": [{"name": "month", "limit": 1}]}
    api.expect_error(400, "PUT", f"{A}/gateways/main", duplicate)  # both apply to that gateway
    api.ok("PUT", f"{A}/gateways/side", duplicate)
    api.expect_error(400, "PATCH", f"{A}/budgets/month", {"gateways": ["*"]})
    api.expect_error(400, "PUT", f"{A}/budgets/month", {"rule": {**rule, "limit": "much"}})


def test_budget_usage_is_listed(api: AdminClient) -> None:
    whole = {"name": "whole", "limit": 1000, "amount": "micros", "per": "day"}
    each = {
        "name": "each",
        "limit": 500,
        "amount": "tokens",
        "per": 60,
        "technique": "sliding",
        "split": ["metadata.n"],
    }
    api.ok("PUT", f"{A}/gateways/main", {"budgets": [whole]})
    api.ok("PUT", f"{A}/gateways/side", {})
    api.ok("PUT", f"{A}/budgets/each", {"rule": each, "gateways": ["main"]})
    api.ok("PUT", f"{A}/budgets/off", {"rule": {"name": "off", "limit": 1}, "enabled": False})
    rules = LimitRule.parse([whole, each])

    async def use(metadata: str, micros: int, tokens: int) -> None:
        facts = {"gateway": "acme/main", "metadata.n": metadata}
        claims = [rule.make_claim(facts, 100) for rule in rules]
        made = await api.limiter.reserve(claims, NOON / 1e3, 9)
        api.limiter.settle(made, {"micros": micros, "tokens": tokens})

    metadata: list[dict[str, Any]] = [{"n": 1}, {"n": True}, {"n": "quiet"}, {}]
    records = [make_record(NOON + i, gateway="main", metadata=entry) for i, entry in enumerate(metadata)]
    api.run(api.store.append_records([(record, None) for record in [*records, make_record(gateway="side")]]))
    for team, micros, tokens in (("1", 70, 400), ("true", 30, 20), ("unseen", 5, 10)):
        api.run(use(team, micros, tokens))
    found = api.ok("GET", f"{A}/spent")["items"]
    shown = [(each["budget"], each["gateway"], each["split"], each["used"], each["limit"]) for each in found]
    assert shown == [
        ("each", "main", {"metadata.n": "1"}, 400, 500),
        ("whole", "main", {}, 105, 1000),
        ("each", "main", {"metadata.n": "true"}, 20, 500),
    ]
    assert [each["ends"] for each in found] == [None, NOON + DAY // 2, None]  # fixed windows of a day end at midnight
    assert api.ok("GET", f"{A}/spent", query="gateway=side")["items"] == []


@pytest.mark.parametrize("split", ["user", "key", "model", "provider", "metadata.team"])
def test_budget_usage_of_a_value_without_recent_records_is_listed(api: AdminClient, split: str) -> None:
    each = {"name": "each", "limit": 500, "amount": "tokens", "per": "day", "split": [split]}
    api.ok("PUT", f"{A}/gateways/main", {"budgets": [each]})
    field = {"key": "key_id"}.get(split, split)
    of_ann = {"metadata": {"team": "ann"}} if split == "metadata.team" else {field: "ann"}
    first = make_record(NOON - 60_000, gateway="main", micros=9, **of_ann)
    others = [make_record(NOON - 50_000 + i, gateway="main") for i in range(600)]
    api.run(api.store.append_records([(record, None) for record in (first, *others)]))

    async def use() -> None:
        claims = [rule.make_claim({"gateway": "acme/main", split: "ann"}, 100) for rule in LimitRule.parse([each])]
        api.limiter.settle(await api.limiter.reserve(claims, NOON / 1e3, 9), {"tokens": 490})

    api.run(use())
    assert [(view["split"], view["used"]) for view in api.ok("GET", f"{A}/spent")["items"]] == [({split: "ann"}, 490)]


def test_custom_providers_need_public_addresses(api: AdminClient) -> None:
    given = {"name": "Ours", "slug": "ours", "base_url": "https://llm.example/v1/"}
    assert api.ok("POST", f"{A}/custom-providers/ours", given)["value"]["base_url"] == "https://llm.example/v1"
    for url in ("http://llm.example", "https://10.0.0.1", "https://u:p@llm.example", "https://localhost"):
        error = api.expect_error(400, "PATCH", f"{A}/custom-providers/ours", {"base_url": url})
        assert error["param"] == "base_url"
    api.expect_error(400, "POST", f"{A}/custom-providers/other", given)
    api.expect_error(400, "PATCH", f"{A}/custom-providers/ours", {"headers": {"x": "a\r\nb: c"}})


def test_listings_are_paged(api: AdminClient) -> None:
    for i in range(5):
        api.ok("PUT", f"{A}/prices/p/m{i}", {"input": i, "output": i})
    seen, after = [], ""
    while True:
        page = api.ok("GET", f"{A}/prices", query=f"limit=2&after={after}" if after else "limit=2")
        seen += [each["id"] for each in page["items"]]
        if not (after := page["next"]):
            break
    assert seen == [f"p/m{i}" for i in range(5)]


# Routes

MODEL = {"id": "m", "type": "model", "properties": {"provider": "openai", "model": "gpt-4o"}}
ELEMENTS: list[dict[str, Any]] = [
    {"id": "s", "type": "start", "outputs": {"next": {"elementId": "c"}}},
    {
        "id": "c",
        "type": "conditional",
        "properties": {"condition": {"metadata.plan": {"$eq": "free"}}},
        "outputs": {"true": {"elementId": "p"}, "false": {"elementId": "r"}},
    },
    {"id": "p", "type": "percentage", "outputs": {"10%": {"elementId": "m"}, "else": {"elementId": "r"}}},
    {
        "id": "r",
        "type": "rate_limit",
        "properties": {
            "limitType": "count",
            "key": "metadata.user",
            "limit": 100,
            "interval": 60,
            "technique": "sliding",
        },
        "outputs": {"success": {"elementId": "m"}, "fallback": {"elementId": "e"}},
    },
    {**MODEL, "outputs": {"success": {"elementId": "e"}, "fallback": {"elementId": "e"}}},
    {"id": "e", "type": "end"},
]


def test_routes_are_versioned_deployed_and_rolled_back(api: AdminClient) -> None:
    path = f"{A}/routes/support"
    assert api.ok("POST", f"{path}/check", {"elements": ELEMENTS})["valid"]
    api.expect_error(404, "GET", path)
    for number in (1, 2, 3):
        assert (
            api.ok("POST", f"{path}/versions", {"elements": ELEMENTS, "description": str(number)})["number"] == number
        )
    assert api.ok("GET", path)["deployed"] is None
    api.expect_error(409, "POST", f"{path}/rollback")
    api.expect_error(404, "POST", f"{path}/deploy", {"version": 9})
    for number in (1, 3):
        assert api.ok("POST", f"{path}/deploy", {"version": number})["deployed"] == number
    assert api.ok("POST", f"{path}/rollback")["deployed"] == 1
    assert api.ok("GET", f"{path}/versions/2")["description"] == "2"
    assert [each["number"] for each in api.ok("GET", f"{path}/versions")["items"]] == [1, 2, 3]
    api.ok("POST", f"{A}/routes/support2/versions", {"elements": ELEMENTS})
    api.ok("DELETE", path)
    api.expect_error(404, "GET", f"{path}/versions/1")
    assert [each["name"] for each in api.ok("GET", f"{A}/routes")["items"]] == ["support2"]
    assert api.audits()[-4][1] == "route.deploy"


def _without(*ids: str) -> list[dict[str, Any]]:
    return [each for each in ELEMENTS if each["id"] not in ids]


def _with(id: str, **fields: Any) -> list[dict[str, Any]]:
    return [{**each, **fields} if each["id"] == id else each for each in ELEMENTS]


def test_route_with_unknown_provider_is_refused(api: AdminClient) -> None:
    path = f"{A}/routes/support/check"
    own = {"elements": _with("m", properties={"provider": "own", "model": "m"})}
    assert "unknown provider 'own'" in api.expect_error(400, "POST", path, own)["message"]
    api.ok("POST", f"{A}/gateways/team", {"providers": {"own": {"base_url": "https://own.example"}}})
    for provider in ("own", "pool", "custom-later"):
        there = _with("m", properties={"provider": provider, "model": "m"})
        assert api.ok("POST", path, {"elements": there})["valid"]


@pytest.mark.parametrize(
    ("elements", "why"),
    [
        ([], "1 to 100"),
        (_without("s"), "one start"),
        (_without("e"), "does not exist"),
        ([*ELEMENTS, {"id": "e", "type": "end"}], "is used by two elements"),
        ([*ELEMENTS, {"id": "lost", "type": "end"}], "cannot be reached"),
        (_with("m", outputs={"success": {"elementId": "c"}}), "cycle"),
        (_with("p", outputs={"90%": {"elementId": "m"}, "20%": {"elementId": "r"}}), "110%"),
        (_with("p", outputs={"90%": {"elementId": "m"}}), "90%"),
        (_with("p", outputs={"many": {"elementId": "m"}}), "10%"),
        (_with("c", properties={"condition": {"metadata.x": {"$like": "a"}}}), "$like"),
        (_with("c", properties={"condition": {"weather": "fine"}}), "weather"),
        (_with("c", properties={"condition": {"$and": []}}), "$and"),
        (_with("c", properties={"condition": {}}), "condition"),
        (_with("r", type="warp"), "warp"),
        (_with("m", extra=1), "extra"),
        (_with("m", properties={"provider": "openai", "model": ""}), "length"),
        (
            [
                {"id": "s", "type": "start", "outputs": {"next": {"elementId": "e"}}},
                {"id": "e", "type": "end"},
            ],
            "model",
        ),
    ],
)
def test_invalid_graphs_are_refused(api: AdminClient, elements: Any, why: str) -> None:
    for where in ("check", "versions"):
        assert why in api.expect_error(400, "POST", f"{A}/routes/r/{where}", {"elements": elements})["message"]


# Logs


def fill(api: AdminClient) -> list[str]:
    records = [
        make_record(
            NOON - i * 1000,
            gateway="main" if i % 2 else "side",
            model=f"m{i % 3}",
            micros=i * 100,
            status=500 if i == 4 else 200,
            success=i != 4,
            usage=Usage(input=10 * i, cached_read=i, output=i),
            metadata={"n": i % 2},
            duration_ms=i * 10,
        )
        for i in range(10)
    ]
    payloads = {1: LogPayload(b'{"messages": []}', b"data: [DONE]\n\n"), 3: LogPayload(b'"\xff"', b"\xfe")}
    api.run(api.store.append_records([(each, payloads.get(i)) for i, each in enumerate(records)]))
    return [each.id for each in records]


def test_logs_are_paged_filtered_and_exported(api: AdminClient) -> None:
    ids = fill(api)

    def list_ids(query: str) -> list[int]:
        return [ids.index(each["id"]) for each in api.ok("GET", f"{A}/logs", query=query)["items"]]

    page = api.ok("GET", f"{A}/logs", query="limit=4")
    assert [each["id"] for each in page["items"]] == ids[:4] and page["has_more"] and page["complete"]
    assert list_ids(f"limit=4&before={page['cursor']}") == [4, 5, 6, 7]
    assert list_ids("gateway=main") == [1, 3, 5, 7, 9]
    assert list_ids("model=m0,m1&success=true") == [0, 1, 3, 6, 7, 9]
    assert list_ids("status=500") == list_ids("success=false") == [4]
    assert list_ids("min_cost=0.0003&max_cost=0.0005") == [3, 4, 5]
    assert list_ids("min_duration=80") == [8, 9] and list_ids("max_tokens_in=20") == [0, 1, 2]
    assert list_ids("metadata.n=1&gateway=main") == [1, 3, 5, 7, 9]
    assert list_ids(f"id={ids[2]},{ids[5]}") == [2, 5]
    assert list_ids(f"since={NOON - 2000}") == [0, 1, 2]
    filters = (
        '[{"key":"cost","operator":"gt","value":0.0007},{"key":"created_at","operator":"lt","value":"2100-01-01"}]'
    )
    assert list_ids(f"filters={filters}") == [8, 9]
    filters = '[{"key":"metadata.key","operator":"eq","value":"n"},{"key":"metadata.value","operator":"eq","value":0}]'
    assert list_ids(f"filters={filters}") == [0, 2, 4, 6, 8]

    async def lines() -> list[bytes]:
        return [part async for part in api.admin.export("GET", f"{A}/logs/export", "model=m1", ACME)]

    exported = b"".join(api.run(lines())).splitlines()
    assert [msgspec.json.decode(each)["id"] for each in exported] == [ids[1], ids[4], ids[7]]
    with pytest.raises(InvalidRequest, match="since"):  # before the first line is sent
        api.admin.export("GET", f"{A}/logs/export", "since=yesterday", ACME)


def test_logs_are_deleted_by_filter(api: AdminClient) -> None:
    fill(api)
    assert api.ok("DELETE", f"{A}/logs", query="model=m0") == {"deleted": 4, "has_more": False}
    assert api.ok("DELETE", f"{CF}/gateways/main/logs")["result"]["deleted"] == 3
    assert len(api.ok("GET", f"{A}/logs")["items"]) == 3
    assert api.audits() == [("a1", "log.delete", "main"), ("a1", "log.delete", "*")]


@pytest.mark.parametrize(
    "query",
    [
        "before=x",
        "since=yesterday",
        "status=ok",
        "success=1",
        "min_cost=cheap",
        "min_cost=nan",
        "id=7",
        "filters={}",
        'filters=[{"key":"x","operator":"eq","value":1}]',
        'filters=[{"key":"model","operator":"gt","value":1}]',
        'filters=[{"key":"metadata.key","operator":"eq","value":"a"}]',
        "limit=1001",
    ],
)
def test_invalid_log_queries_are_refused(api: AdminClient, query: str) -> None:
    fill(api)
    api.expect_error(400, "GET", f"{A}/logs", query=query)


def test_record_payload_and_feedback_are_read_and_changed(api: AdminClient) -> None:
    ids = fill(api)
    one = api.ok("GET", f"{A}/logs/{ids[1]}")
    assert (one["cost"], one["micros"], one["tokens_in"], one["status_code"]) == (0.0001, 100, 10, 200)
    assert one["usage_metadata"] == {"input_cached_tokens": 1} and one["created_at"].startswith("2026-")
    assert api.ok("GET", f"{A}/logs/{ids[1]}/request") == {"messages": []}
    assert api.ok("GET", f"{A}/logs/{ids[1]}/response") == "data: [DONE]\n\n"
    assert "\ufffd" in api.ok("GET", f"{A}/logs/{ids[3]}/request"), (
        "a payload that is neither is shown with replacement characters"
    )
    api.expect_error(404, "GET", f"{A}/logs/{ids[2]}/request")
    for id in (new_record_id(NOON), "7", "g" * 32):
        api.expect_error(404, "GET", f"{A}/logs/{id}")
    assert api.ok("PATCH", f"{A}/logs/{ids[1]}", {"feedback": -1, "score": 20})["feedback"] == -1
    assert api.ok("PATCH", f"{A}/logs/{ids[1]}", {"metadata": {"good": True}})["metadata"] == {"n": 1, "good": True}
    for wrong in ({}, {"feedback": 2}, {"score": 101}, {"nothing": 1}):
        api.expect_error(400, "PATCH", f"{A}/logs/{ids[1]}", wrong)
    assert [e["id"] for e in api.ok("GET", f"{A}/logs", query="feedback=-1")["items"]] == [ids[1]]


def test_rollups_are_listed(api: AdminClient) -> None:
    fill(api)
    (total,) = api.ok("GET", f"{A}/rollups", query="unit=day&over_time=false")["items"]
    assert (total["requests"], total["errors"], total["micros"]) == (10, 1, 4500)
    assert 40 <= total["duration_p50"] <= 63
    by_model = api.ok("GET", f"{A}/rollups", query="dimension=model&over_time=false&gateway=main")["items"]
    assert {each["value"]: each["requests"] for each in by_model} == {"openai/m0": 2, "openai/m1": 2, "openai/m2": 1}
    for wrong in ("unit=minute&dimension=user", "dimension=weather", "unit=year"):
        api.expect_error(400, "GET", f"{A}/rollups", query=wrong)


# Cloudflare's paths


def test_cloudflare_gateways(api: AdminClient) -> None:
    wish = {
        "id": "cf",
        "cache_ttl": 300,
        "cache_invalidate_on_update": True,
        "collect_logs": True,
        "rate_limiting_interval": 60,
        "rate_limiting_limit": 50,
        "rate_limiting_technique": "sliding",
        "authentication": True,
        "retry_max_attempts": 3,
        "retry_delay": 500,
        "retry_backoff": "linear",
    }
    made = api.ok("POST", f"{CF}/gateways", wish)
    assert made["success"] and made["errors"] == [] and wish.items() <= made["result"].items()
    settings = api.ok("GET", f"{A}/gateways/cf")["value"]
    assert settings["limits"] == [{"name": "rate_limiting", "limit": 50, "per": 60, "technique": "sliding"}]
    assert (settings["authentication"], settings["retries"]["delay"]) == (True, 0.5)
    api.ok("PATCH", f"{A}/gateways/cf", {"zdr": True})
    changed = api.ok("PUT", f"{CF}/gateways/cf", {"rate_limiting_interval": 0, "rate_limiting_limit": 0})["result"]
    assert (changed["zdr"], changed["cache_ttl"], changed["rate_limiting_limit"]) == (True, 300, 0)
    listed = api.ok("GET", f"{CF}/gateways", query="page=1&per_page=1")
    assert listed["result_info"] == {"count": 1, "page": 1, "per_page": 1, "total_count": 2}
    for wrong in ({"logpush": True}, {"rate_limiting_limit": 5}, {"log_management": 10000}, {"id": "other"}, {"x": 1}):
        refused = api.expect_error(400, "PUT", f"{CF}/gateways/cf", wrong)
        assert refused["code"] == 7001 and (next(iter(wrong)) in refused["message"]), wrong
    api.ok("DELETE", f"{CF}/gateways/cf")
    status, gone = api("GET", f"{CF}/gateways/cf")
    assert status == 404 and not gone["success"] and gone["errors"][0]["code"] == 7002 and gone["result"] is None


def test_cloudflare_logs(api: AdminClient) -> None:
    ids = fill(api)
    logs = f"{CF}/gateways/main/logs"
    seen, page = [], 1
    while True:
        found = api.ok("GET", logs, query=f"page={page}&per_page=2&order_by=created_at&order_by_direction=desc")
        seen += [ids.index(each["id"]) for each in found["result"]]
        if not found["result_info"]["has_more"]:
            break
        page += 1
    assert seen == [1, 3, 5, 7, 9] and page == 3
    api.expect_error(400, "GET", logs, query="order_by=colour")
    api.expect_error(400, "GET", logs, query="order_by_direction=up")
    api.expect_error(400, "GET", logs, query="page=1001&per_page=10")
    assert api.ok("GET", f"{logs}/{ids[1]}/request")["result"] == {"messages": []}
    assert api.ok("PATCH", f"{logs}/{ids[1]}", {"feedback": 1})["result"]["feedback"] == 1
    assert api.ok("PATCH", f"{logs}/{ids[1]}", {})["result"]["feedback"] == 1  # a body without changes is valid there
    assert api("PATCH", f"{logs}/{'0' * 32}", {})[0] == 404
    assert api("GET", f"{CF}/gateways/side/logs/{ids[1]}")[0] == 404


def test_cloudflare_logs_are_sorted_searched_and_filtered(api: AdminClient) -> None:
    ids = fill(api)
    logs = f"{CF}/gateways/main/logs"

    def list_ids(query: str) -> list[int]:
        return [ids.index(each["id"]) for each in api.ok("GET", logs, query=query)["result"]]

    assert list_ids("order_by_direction=asc") == list_ids("direction=asc") == [9, 7, 5, 3, 1]
    assert list_ids("order_by=cost&order_by_direction=desc&per_page=2&page=2") == [5, 3]
    assert list_ids("order_by=model&order_by_direction=asc") == [9, 3, 7, 1, 5]
    assert list_ids("search=M1") == [1, 7] and list_ids("search=%25") == list_ids("search=m_") == []
    assert list_ids("min_total_tokens=55&max_total_tokens=77") == [5, 7]

    def filter_ids(*filters: tuple[str, str, Any]) -> list[int]:
        """Send filters as Cloudflare's SDK does: repeated parameters with dots."""
        pairs = []
        for key, operator, values in filters:
            pairs += [("filters.key", key), ("filters.operator", operator)]
            pairs += [("filters.value", str(value)) for value in values]
        return list_ids(urlencode(pairs))

    assert filter_ids(("model", "eq", ["m0", "m2"])) == [3, 5, 9]
    assert filter_ids(("model", "neq", ["m0", "m2"])) == [1, 7]
    assert filter_ids(("model", "contains", ["M1", "2"])) == [1, 5, 7]
    assert filter_ids(("tokens", "gt", [33]), ("duration", "lt", [90])) == [5, 7]
    assert filter_ids(("cost", "neq", [0.0003]), ("id", "neq", [ids[1]])) == [5, 7, 9]
    assert filter_ids(("success", "neq", ["false"]), ("cached", "eq", ["false"])) == [1, 3, 5, 7, 9]
    at = api.ok("GET", f"{logs}/{ids[5]}")["result"]["created_at"]
    assert filter_ids(("created_at", "eq", [at])) == [5] and filter_ids(("created_at", "gt", [at])) == [1, 3]
    assert filter_ids(("feedback", "neq", [1])) == [1, 3, 5, 7, 9]  # also those without a value
    for wrong in (
        "filters.key=model&filters.operator=eq",
        "filters.key=model&filters.operator=near&filters.value=1",
        "filters.key=cost&filters.operator=contains&filters.value=1",
        "filters.key=success&filters.operator=eq&filters.value=maybe",
        "filters.key=user_agent&filters.operator=eq&filters.value=1",
        "filters.key=id&filters.operator=neq&filters.value=1",
        "meta_info=true",
    ):
        assert api.expect_error(400, "GET", logs, query=wrong)["code"] == 7001, wrong
    # The two oldest.
    api.ok("DELETE", logs, query="order_by=created_at&order_by_direction=asc&limit=2")
    assert list_ids("") == [1, 3, 5]


def test_cloudflare_custom_providers(api: AdminClient) -> None:
    given = {"name": "Ours", "slug": "ours", "base_url": "https://llm.example", "enable": True}
    assert api.ok("POST", f"{CF}/custom-providers", given)["result"]["id"] == "ours"
    api.expect_error(409, "POST", f"{CF}/custom-providers", given)
    patched = api.ok("PATCH", f"{CF}/custom-providers/ours", {"enable": False})["result"]
    assert (patched["enable"], patched["base_url"]) == (False, "https://llm.example")
    assert api.ok("GET", f"{CF}/custom-providers", query="enable=true")["result"] == []
    assert len(api.ok("GET", f"{CF}/custom-providers", query="search=our")["result"]) == 1
    changes = {"headers": '{"x-team": "a"}', "position": 2}  # Cloudflare's clients send headers as a string
    patched = api.ok("PATCH", f"{CF}/custom-providers/ours", changes)["result"]
    assert (patched["headers"], patched["position"]) == ({"x-team": "a"}, 2)
    for wrong in ("headers", '["x-team"]', '{"x-team": 1}'):
        api.expect_error(400, "PATCH", f"{CF}/custom-providers/ours", {"headers": wrong})
    api.ok("DELETE", f"{CF}/custom-providers/ours")
    made = api.ok("POST", f"{CF}/custom-providers", {**given, "headers": '{"x-team": "b"}'})["result"]
    assert made["headers"] == {"x-team": "b"}


def test_cloudflare_routes(api: AdminClient) -> None:
    api.ok("POST", f"{A}/gateways/main", {})
    api.ok("POST", f"{A}/gateways/side", {})
    routes = f"{CF}/gateways/main/routes"
    limit = {"limitType": "count", "key": "metadata.user", "limit": 100, "window": 60}
    elements = [
        {"id": "s", "type": "start", "outputs": {"next": {"elementId": "c"}}},
        {
            "id": "c",
            "type": "conditional",
            "properties": {"conditions": {"metadata.plan": {"$eq": "free"}}},
            "outputs": {"true": {"elementId": "r"}, "false": {"elementId": "m"}},
        },
        {
            "id": "r",
            "type": "rate",
            "properties": limit,
            "outputs": {"success": {"elementId": "m"}, "fallback": {"elementId": "e"}},
        },
        {
            "id": "m",
            "type": "model",
            "properties": {"provider": "openai", "model": "gpt-4o", "retries": 1, "timeout": 1000},
            "outputs": {"success": {"elementId": "e"}, "fallback": {"elementId": "e"}},
        },
        {"id": "e", "type": "end", "outputs": {}},
    ]
    made = api.ok("POST", routes, {"name": "support", "elements": elements})["result"]
    assert (made["id"], made["name"], made["gateway_id"]) == ("support", "support", "main")
    assert made["version"]["version_id"] == made["deployment"]["version_id"] == "1"
    assert made["version"]["active"] == "true" and msgspec.json.decode(made["version"]["data"]) == made["elements"]
    given = {each["id"]: each for each in made["elements"]}
    assert given["e"] == elements[4] and given["c"] == elements[1] and given["r"]["type"] == "rate"
    assert given["r"]["properties"] == {**limit, "technique": "fixed"}
    stored = api.ok("GET", f"{A}/routes/support/versions/1")
    assert stored["gateways"] == ["main"] and stored["elements"][4] == {"id": "e", "type": "end"}

    api.expect_error(409, "POST", routes, {"name": "support", "elements": elements})
    added = api.ok("POST", f"{routes}/support/versions", {"elements": elements[:1] + elements[1:]})["result"]
    assert added["version"]["version_id"] == "2" and added["version"]["active"] == "false"
    api.expect_error(404, "POST", f"{routes}/support/deployments", {"version_id": "9"})
    assert api.ok("POST", f"{routes}/support/deployments", {"version_id": "2"})["result"]["version"]["active"] == "true"

    versions = api.ok("GET", f"{routes}/support/versions")["data"]["versions"]
    assert [(each["version_id"], each["active"]) for each in versions] == [("2", "true"), ("1", "false")]
    one = api.ok("GET", f"{routes}/support/versions/1")["result"]
    assert (one["version_id"], one["active"], one["name"]) == ("1", "false", "support")
    deployments = api.ok("GET", f"{routes}/support/deployments")["data"]["deployments"]
    assert [(each["deployment_id"], each["version_id"]) for each in deployments] == [("2", "2"), ("1", "1")]
    listed = api.ok("GET", routes, query="page=1&per_page=5")["data"]
    assert [each["name"] for each in listed["routes"]] == ["support"] and listed["per_page"] == 5

    assert api.ok("GET", f"{CF}/gateways/side/routes")["data"]["routes"] == []
    api.expect_error(404, "GET", f"{CF}/gateways/side/routes/support")
    api.expect_error(404, "GET", f"{CF}/gateways/none/routes")

    renamed = api.ok("PATCH", f"{routes}/support", {"name": "help"})
    assert renamed["success"] and renamed["route"]["name"] == "help" and renamed["route"]["version"]["active"] == "true"
    api.expect_error(404, "GET", f"{routes}/support")
    assert api.ok("GET", f"{A}/routes/help")["deployed"] == 2
    wrong = [*elements[:4], {"id": "e", "type": "end", "outputs": {"next": {"elementId": "m"}}}]
    assert "outputs" in api.expect_error(400, "POST", f"{routes}/help/versions", {"elements": wrong})["message"]
    assert api.ok("DELETE", f"{routes}/help")["result"]["id"] == "help"
    api.expect_error(404, "GET", f"{routes}/help")


def test_cloudflare_provider_configs(api: AdminClient) -> None:
    configs = f"{CF}/gateways/filed/provider_configs"
    wish = {"alias": "prod", "default_config": True, "provider_slug": "openai", "secret": "sk-very-secret"}
    made = api.ok("POST", configs, {**wish, "rate_limit": 0})["result"]
    assert (made["alias"], made["default_config"], made["provider_slug"]) == ("prod", True, "openai")
    assert made["gateway_id"] == "filed" and {"id", "modified_at", "secret_id", "secret_preview"} <= made.keys()
    for alias in ("prod", "default"):
        assert api.run(api.vault.get_key("acme", "openai", alias)) == "sk-very-secret"
    api.ok("POST", configs, {**wish, "alias": "test", "default_config": False, "secret": "sk-2"})
    assert api.run(api.vault.get_key("acme", "openai", "default")) == "sk-very-secret"
    listed = api.ok("GET", configs, query="page=1&per_page=2")
    assert listed["result_info"]["total_count"] == 3 and len(listed["result"]) == 2
    assert "sk-" not in str(listed) + str(made) + str(api.ok("GET", f"{A}/audit"))
    for wrong in (
        {"secret_id": "x"},
        {"rate_limit": 5},
        {"secret": None},
        {"alias": "default", "default_config": False},
    ):
        assert api.expect_error(400, "POST", configs, {**wish, **wrong})["code"] == 7001, wrong
    api.expect_error(404, "POST", configs, {**wish, "provider_slug": "nobody"})
    api.expect_error(404, "GET", f"{CF}/gateways/none/provider_configs")


def test_cloudflare_provider_urls(api: AdminClient) -> None:
    def url(provider: str) -> tuple[int, Any]:
        path = f"{CF}/gateways/filed/url/{provider}"
        status, found = api.run(api.admin.handle("GET", path, "", b"", ACME, "https://llm.example"))
        return status, found["result"]

    assert url("openai") == (200, "https://llm.example/v1/acme/filed/openai")
    assert url("compat") == (200, "https://llm.example/v1/acme/filed/compat")
    assert url("nobody")[0] == url("custom-ours")[0] == 404
    given = {"name": "Ours", "slug": "ours", "base_url": "https://ours.example", "enable": True}
    api.ok("POST", f"{CF}/custom-providers", given)
    assert url("custom-ours")[0] == 200


def test_cloudflare_datasets(api: AdminClient) -> None:
    ids = fill(api)
    api.ok("POST", f"{A}/gateways/main", {})
    api.ok("POST", f"{A}/gateways/side", {})
    sets = f"{CF}/gateways/main/datasets"
    filters = [{"key": "model", "operator": "eq", "value": ["m1"]}]
    made = api.ok("POST", sets, {"name": "ones", "enable": True, "filters": filters})["result"]
    assert made["filters"] == filters and (made["name"], made["enable"], made["gateway_id"]) == ("ones", True, "main")
    one = f"{sets}/{made['id']}"
    assert api.ok("GET", one)["result"] == made
    listed = api.ok("GET", sets, query="enable=true&name=ones&search=M1")
    assert listed["result"] == [made] and listed["result_info"]["total_count"] == 1
    assert api.ok("GET", sets, query="enable=false")["result"] == []
    assert api.ok("GET", f"{CF}/gateways/side/datasets")["result"] == []
    api.expect_error(404, "GET", one.replace("main", "side"))

    def rows(query: str) -> list[int]:
        found = api.ok("GET", f"{CF}/gateways/main/logs", query=query)["result"]
        return [ids.index(each["id"]) for each in found]

    assert rows(f"dataset={made['id']}") == [1, 7] and rows(f"dataset={made['id']}&min_cost=0.0005") == [7]
    api.expect_error(400, "GET", f"{CF}/gateways/main/logs", query=f"dataset={made['id']}&model=m0")
    api.expect_error(404, "GET", f"{CF}/gateways/main/logs", query="dataset=none")
    changed = api.ok("PUT", one, {"name": "twos", "enable": False, "filters": []})["result"]
    assert (changed["id"], changed["name"], changed["created_at"]) == (made["id"], "twos", made["created_at"])
    odd = [{"key": "weather", "operator": "eq", "value": ["fine"]}]
    api.expect_error(400, "PUT", one, {"name": "x", "enable": True, "filters": odd})
    api.expect_error(400, "POST", sets, {"name": "x"})
    assert api.ok("DELETE", one)["result"]["id"] == made["id"]
    api.expect_error(404, "GET", one)
    assert [each[1] for each in api.audits()][:3] == ["dataset.delete", "dataset.update", "dataset.create"]


# The document


def test_openapi_document_is_valid_and_complete(api: AdminClient) -> None:
    document = api.ok("GET", "/admin/openapi.json")
    operations = [op for path in document["paths"].values() for op in path.values()]
    assert len(operations) == len({op["operationId"] for op in operations}) == len(api.admin._endpoints)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            inside = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
            assert inside == {part.strip("{}") for part in path.split("/") if part.startswith("{")}
    schemas = document["components"]["schemas"]

    def refs(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            for each in node.values():
                yield from refs(each)
        elif isinstance(node, list):
            for each in node:
                yield from refs(each)

    assert {ref.rpartition("/")[2] for ref in refs(document)} <= schemas.keys()
    assert document["paths"]["/admin/accounts/{account}/prices/{provider}/{model}"]["put"]["requestBody"]


# Known providers and the catalogue


def test_every_known_provider_is_listed(api: AdminClient) -> None:
    api.ok("PUT", f"{A}/provider-keys/openai/default", {"secret": "sk-1"})
    rows = {row["slug"]: row for row in api.ok("GET", f"{A}/providers")["items"]}
    assert set(rows) == set(PROVIDERS_BY_SLUG)
    assert rows["openai"]["has_key"] and not rows["anthropic"]["has_key"]
    assert rows["anthropic"]["base_url"] == "https://api.anthropic.com" and rows["anthropic"]["needs_key"]
    assert not rows["emberline"]["needs_key"]


def test_catalogue_listing_is_paged(api: AdminClient) -> None:
    found, after = [], ""
    while True:
        page = api.ok("GET", f"{A}/catalogue", query=f"limit=7&after={after}")
        found += page["items"]
        if not (after := page["next"]):
            break
    known = Catalogue.load()
    assert [row["id"] for row in found] == sorted(f"{model.provider}/{model.name}" for model in known.models())
    mini = next(row for row in found if row["id"] == "openai/gpt-4o-mini")
    price = known.price("openai", "gpt-4o-mini")
    assert price is not None and (mini["price"]["input"], mini["price"]["output"]) == (price.input, price.output)
    assert mini["kind"] == "chat" and mini["context"] == 128_000 and mini["source"].startswith("https://")
    assert api("GET", f"{A}/catalogue", caller=USER)[0] == 403


def test_new_records_are_streamed_as_they_are_written(api: AdminClient) -> None:
    def write(*records: LogRecord) -> Any:
        return api.store.append_records([(record, None) for record in records])

    old = make_record(NOON - 5000, provider="openai")
    slow, fast = make_record(NOON - 9000, provider="openai"), make_record(NOON - 1, provider="groq")
    steps = [lambda: write(fast), lambda: write(slow, make_record(NOON - 3000, provider="other"))]

    async def sleep(seconds: float) -> None:
        if steps:
            await steps.pop(0)()

    async def tail(query: dict[str, str]) -> list[str]:
        endpoints = LogEndpoints(api.admin_context, sleep)
        lines = endpoints.tail_lines(AdminRequest(ACME, {"account": "acme"}, query, b""))
        found: list[str] = []
        assert await anext(lines) == b"\n", "records that are written from now on follow"
        async for chunk in lines:
            if chunk == b"\n":  # nothing new for a while
                break
            found += [msgspec.json.decode(line)["id"] for line in chunk.splitlines()]
        await lines.aclose()  # type: ignore[attr-defined]
        assert endpoints._open_tails == 0
        return found

    api.run(write(old))
    assert api.run(tail({"provider": "openai,groq"})) == [fast.id, slow.id], "also of a request that began earlier"
    with pytest.raises(InvalidRequest):
        LogEndpoints(api.admin_context).tail_lines(AdminRequest(ACME, {"account": "acme"}, {"status": "x"}, b""))
    assert api.admin.is_export("GET", f"{A}/logs/tail")
    api.expect_error(403, "GET", f"{A}/logs/tail".replace("acme", "other"))


def test_number_of_streams_of_records_is_limited(api: AdminClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_TAILS", 0)
    with pytest.raises(Overloaded):
        LogEndpoints(api.admin_context).tail_lines(AdminRequest(ACME, {"account": "acme"}, {}, b""))


def test_values_of_filters_are_listed_with_the_most_requests_first(api: AdminClient) -> None:
    records = [make_record(NOON - i, provider=f"p{i % 3 // 2}", model="m", user="ann", key_id="k") for i in range(9)]
    failed = make_record(NOON, provider="p0", model="n", status=502, success=False, error="upstream_broken")
    api.run(api.store.append_records([(record, None) for record in [*records, failed]]))
    found = api.ok("GET", f"{A}/logs/values", query="gateway=main")
    assert found["provider"] == [{"value": "p0", "requests": 7}, {"value": "p1", "requests": 3}]
    assert [each["value"] for each in found["model"]] == ["m", "n"]
    assert [each["value"] for each in found["status"]] == ["200", "502"]
    assert found["error"] == [{"value": "upstream_broken", "requests": 1}]
    assert found["user"] == [{"value": "ann", "requests": 9}] and found["key_id"] == [{"value": "k", "requests": 9}]
    assert api.ok("GET", f"{A}/logs/values", query="gateway=none")["model"] == []
