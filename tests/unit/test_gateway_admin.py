"""The management API: who may, what is taken and refused, and that every change leaves its trace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
from gateway_records import DAY, NOON, made

from emberline.core.clock import ManualClock
from emberline.core.errors import EmberlineError, InvalidRequest
from emberline.gateway.admin.admin import AdminAPI
from emberline.gateway.admin.admin_context import AdminContext
from emberline.gateway.costs.catalogue import Catalogue
from emberline.gateway.costs.usage import Usage
from emberline.gateway.keys.identity import ANONYMOUS, Identity
from emberline.gateway.keys.key_store import KeyStore
from emberline.gateway.keys.master_keys import MasterKeyFile
from emberline.gateway.keys.provider_key_vault import ProviderKeyVault
from emberline.gateway.limits.local import LocalLimiter
from emberline.gateway.limits.rule import LimitRule
from emberline.gateway.logs.record import LogPayload, new_record_id
from emberline.gateway.providers.registry import PROVIDERS_BY_SLUG
from emberline.gateway.settings import GatewaySettings, ProviderSettings
from emberline.gateway.store.sqlite import SQLiteStore
from emberline.gateway.store.version_watch import StoreVersionWatch

ROOT = Identity("root", "root", "token", is_admin=True)
ACME = Identity("a1", "acme's", "token", is_admin=True, account="acme")
USER = Identity("u1", "a user", "virtual", account="acme")
A = "/admin/accounts/acme"
CF = "/client/v4/accounts/acme/ai-gateway"


class World:
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
        self.admin = AdminAPI(AdminContext(self.store, self.vault, self.wall, self.limiter, configured=fixed), "1.0")

    def __call__(
        self, method: str, path: str, body: Any = None, query: str = "", who: Identity = ACME
    ) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
        status, found = self.run(self.admin.handle(method, path, query, raw, who))
        return status, msgspec.json.decode(msgspec.json.encode(found))

    def ok(self, method: str, path: str, body: Any = None, query: str = "") -> Any:
        status, found = self(method, path, body, query)
        assert status in (200, 201), found
        return found

    def refused(self, status: int, method: str, path: str, body: Any = None, query: str = "") -> dict[str, Any]:
        got, found = self(method, path, body, query)
        assert got == status, found
        return found["error"] if "error" in found else found["errors"][0]

    def audits(self) -> list[tuple[str, str, str]]:
        return [(each["actor"], each["action"], each["target"]) for each in self.ok("GET", f"{A}/audit")["items"]]

    def close(self) -> None:
        self.run(self.store.close())
        self._runner.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    opened = World(tmp_path)
    yield opened
    opened.close()


# Who may


def test_only_admins_of_the_account_may(world: World) -> None:
    for path in (f"{A}/keys", f"{CF}/gateways"):
        assert world("GET", path, who=ANONYMOUS)[0] == 401
        assert world("GET", path, who=USER)[0] == 403
        assert world("GET", path.replace("acme", "other"), who=ACME)[0] == 403
        assert world("GET", path, who=ACME)[0] == 200
        assert world("GET", path.replace("acme", "other"), who=ROOT)[0] == 200
    for who in (ANONYMOUS, USER):
        with pytest.raises(EmberlineError):
            world.admin.export("GET", f"{A}/logs/export", "", who)
    assert world("GET", "/admin/openapi.json", who=ANONYMOUS)[0] == 200


def test_an_account_is_a_name_not_a_pattern(world: World) -> None:
    for account in ("*", "a*", "..", "a%2Fb", "a" * 65, "%ff"):
        assert world("GET", f"/admin/accounts/{account}/keys", who=ROOT)[0] in (400, 404), account


def test_what_is_not_there_and_what_is_not_taken(world: World) -> None:
    world.refused(404, "GET", f"{A}/nothing")
    assert "takes GET" in world.refused(405, "POST", f"{A}/audit")["message"]
    assert world.refused(400, "GET", f"{A}/keys", query="x=1")["param"] == "x"
    assert "twice" in world.refused(400, "GET", f"{A}/keys", query="limit=1&limit=2")["message"]
    world.refused(400, "GET", f"{A}/keys", query="limit=0")
    world.refused(400, "GET", f"{A}/keys", b"{}")
    world.refused(400, "POST", f"{A}/keys", b"{")
    world.refused(400, "POST", f"{A}/keys", b"\xff")
    world.refused(400, "GET", f"{A}/logs/export")  # by export alone


def test_which_paths_are_its_own() -> None:
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


def test_a_key_is_shown_once_works_and_is_revoked(world: World) -> None:
    wish = {"name": "ci", "user": "bot", "allowed_models": ["gpt-*"], "metadata": {"team": "x"}, "limits": ["small"]}
    key = world.ok("POST", f"{A}/keys", wish)
    secret, id = key["secret"], key["id"]
    assert secret.startswith(key["shown"]) and len(secret) > 40
    shown = [world.ok("GET", f"{A}/keys/{id}"), world.ok("GET", f"{A}/keys"), world.ok("GET", f"{A}/audit")]
    assert secret not in str(shown) and "hash" not in str(shown)
    keys = KeyStore(world.store, world.watch, world.wall)
    who = world.run(keys.identify(secret))
    assert (who.account, who.user, who.limits, who.admin) == ("acme", "bot", ("small",), False)
    patched = world.ok("PATCH", f"{A}/keys/{id}", {"disabled": True, "metadata": {"team": None, "x": "y"}})
    assert patched["disabled"] and patched["metadata"] == {"x": "y"} and patched["user"] == "bot"
    world.clock.advance(1.0)
    assert world.run(keys.identify(secret)) is None
    world.ok("PATCH", f"{A}/keys/{id}", {"disabled": False})
    world.clock.advance(1.0)
    assert world.run(keys.identify(secret)) is not None
    world.ok("DELETE", f"{A}/keys/{id}")
    world.clock.advance(1.0)
    assert world.run(keys.identify(secret)) is None
    world.refused(404, "GET", f"{A}/keys/{id}")
    actions = [("a1", f"key.{action}", id) for action in ("delete", "update", "update", "create")]
    assert world.audits() == actions


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
def test_a_key_that_cannot_be(world: World, wish: Any, param: str | None) -> None:
    assert world.refused(400, "POST", f"{A}/keys", wish)["param"] == param
    assert world.audits() == []


def test_what_of_a_key_cannot_be_changed(world: World) -> None:
    id = world.ok("POST", f"{A}/keys", {"name": "a"})["id"]
    for patch in ({"kind": "token"}, {"hash": "0"}, {"account": "other"}, {"created": 1}):
        world.refused(400, "PATCH", f"{A}/keys/{id}", patch)
    world.refused(400, "PATCH", f"{A}/keys/{id}", {"name": None})  # it cannot be without


def test_another_accounts_key_is_not_there(world: World) -> None:
    id = world.ok("POST", f"{A}/keys", {"name": "a"})["id"]
    for method in ("GET", "DELETE"):
        assert world(method, f"/admin/accounts/other/keys/{id}", who=ROOT)[0] == 404


# Provider keys


def test_a_providers_key_goes_in_and_never_out(world: World) -> None:
    path = f"{A}/provider-keys/openai/default"
    world.ok("PUT", path, {"secret": "sk-one"})
    assert world.run(world.vault.get_key("acme", "openai", "default")) == "sk-one"
    world.ok("PUT", path, {"secret": "sk-two"})
    world.clock.advance(1.0)
    assert world.run(world.vault.get_key("acme", "openai", "default")) == "sk-two"
    everything = str([world.ok("GET", f"{A}/provider-keys"), world.ok("GET", f"{A}/audit")])
    assert "sk-" not in everything and "'openai'" in everything
    for wrong in ("", " sk", "sk\n", "sk-ü"):
        world.refused(400, "PUT", path, {"secret": wrong})
    world.ok("DELETE", path)
    world.clock.advance(1.0)
    assert world.run(world.vault.get_key("acme", "openai", "default")) is None
    assert [action for _, action, _ in world.audits()] == [f"provider_key.{a}" for a in ("delete", "update", "create")]


# Gateways, prices, budgets, custom providers


def test_a_gateways_life(world: World) -> None:
    path = f"{A}/gateways/main"
    made = world.ok("POST", path, {"cache_ttl": 60, "logs": {"days": 7}})
    assert (made["version"], made["value"]["account"], made["value"]["gateway"]) == (1, "acme", "main")
    world.refused(409, "POST", path, {})
    patched = world.ok("PATCH", path, {"cache_ttl": None, "logs": {"payloads": False}})
    assert (patched["version"], patched["value"]["cache_ttl"]) == (2, 0)
    assert patched["value"]["logs"] == {"collect": True, "payloads": False, "days": 7}
    world.refused(409, "PUT", path, {}, query="version=1")
    assert world.ok("PUT", path, {}, query="version=2")["value"]["logs"]["days"] == 30
    world.refused(409, "DELETE", path, query="version=2")
    world.ok("DELETE", path, query="version=3")
    world.refused(404, "GET", path)
    assert len(world.audits()) == 4


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
def test_settings_that_cannot_be(world: World, settings: Any) -> None:
    error = world.refused(400, "POST", f"{A}/gateways/main", settings)
    assert error["message"] and "sk-secret" not in str(error)
    assert world.audits() == []


def test_a_gateway_of_the_file_is_shown_without_its_key_and_not_changed(world: World) -> None:
    shown = world.ok("GET", f"{A}/gateways")["items"]
    assert [each["id"] for each in shown] == ["filed"] and "sk-in-the-file" not in str(shown)
    assert "sk-in-the-file" not in str(world.ok("GET", f"{A}/gateways/filed"))
    assert "sk-in-the-file" not in str(world.ok("GET", f"{CF}/gateways/filed"))
    for method, body in (("POST", {}), ("PUT", {}), ("PATCH", {}), ("DELETE", None)):
        assert "configuration file" in world.refused(409, method, f"{A}/gateways/filed", body)["message"]


def test_prices_have_names_with_slashes(world: World) -> None:
    path = f"{A}/prices/huggingface/meta-llama%2FLlama-3/x"
    made = world.ok("PUT", path, {"input": 150_000, "output": 600_000, "cached_read": 75_000})
    assert made["id"] == "huggingface/meta-llama/Llama-3/x"
    assert world.ok("GET", path)["value"]["output"] == 600_000
    for wrong in (
        {"input": 1.5, "output": 1},
        {"input": -1, "output": 1},
        {"input": 1},
        {"input": 1, "output": 10**13},
    ):
        world.refused(400, "PUT", path, wrong)
    assert [each["id"] for each in world.ok("GET", f"{A}/prices")["items"]] == [made["id"]]


def test_budgets(world: World) -> None:
    rule = {"name": "month", "limit": 5_000_000, "amount": "micros", "per": "month", "split": ["key"]}
    made = world.ok("PUT", f"{A}/budgets/month", {"rule": rule, "gateways": ["main"]})
    assert made["value"]["rule"]["limit"] == 5_000_000
    world.refused(400, "PUT", f"{A}/budgets/other", {"rule": rule})
    twice = {"limits": [{"name": "month", "limit": 1}]}
    world.refused(400, "PUT", f"{A}/gateways/main", twice)  # both hold there
    world.ok("PUT", f"{A}/gateways/side", twice)
    world.refused(400, "PATCH", f"{A}/budgets/month", {"gateways": ["*"]})
    world.refused(400, "PUT", f"{A}/budgets/month", {"rule": {**rule, "limit": "much"}})


def test_what_budgets_have_spent(world: World) -> None:
    whole = {"name": "whole", "limit": 1000, "amount": "micros", "per": "day"}
    each = {
        "name": "each",
        "limit": 500,
        "amount": "tokens",
        "per": 60,
        "technique": "sliding",
        "split": ["metadata.n"],
    }
    world.ok("PUT", f"{A}/gateways/main", {"budgets": [whole]})
    world.ok("PUT", f"{A}/gateways/side", {})
    world.ok("PUT", f"{A}/budgets/each", {"rule": each, "gateways": ["main"]})
    world.ok("PUT", f"{A}/budgets/off", {"rule": {"name": "off", "limit": 1}, "enabled": False})
    rules = LimitRule.parse([whole, each])

    async def use(metadata: str, micros: int, tokens: int) -> None:
        facts = {"gateway": "acme/main", "metadata.n": metadata}
        claims = [rule.make_claim(facts, 100) for rule in rules]
        made = await world.limiter.reserve(claims, NOON / 1e3, 9)
        world.limiter.settle(made, {"micros": micros, "tokens": tokens})

    metadata: list[dict[str, Any]] = [{"n": 1}, {"n": True}, {"n": "quiet"}, {}]
    records = [made(NOON + i, gateway="main", metadata=said) for i, said in enumerate(metadata)]
    world.run(world.store.append([(record, None) for record in [*records, made(gateway="side")]]))
    for said, micros, tokens in (("1", 70, 400), ("true", 30, 20), ("unseen", 5, 10)):
        world.run(use(said, micros, tokens))
    found = world.ok("GET", f"{A}/spent")["items"]
    shown = [(each["budget"], each["gateway"], each["split"], each["used"], each["limit"]) for each in found]
    assert shown == [
        ("each", "main", {"metadata.n": "1"}, 400, 500),
        ("whole", "main", {}, 105, 1000),
        ("each", "main", {"metadata.n": "true"}, 20, 500),
    ]
    assert [each["ends"] for each in found] == [None, NOON + DAY // 2, None]  # days end at midnight
    assert world.ok("GET", f"{A}/spent", query="gateway=side")["items"] == []


def test_custom_providers_are_public(world: World) -> None:
    given = {"name": "Ours", "slug": "ours", "base_url": "https://llm.example/v1/"}
    assert world.ok("POST", f"{A}/custom-providers/ours", given)["value"]["base_url"] == "https://llm.example/v1"
    for url in ("http://llm.example", "https://10.0.0.1", "https://u:p@llm.example", "https://localhost"):
        error = world.refused(400, "PATCH", f"{A}/custom-providers/ours", {"base_url": url})
        assert error["param"] == "base_url"
    world.refused(400, "POST", f"{A}/custom-providers/other", given)
    world.refused(400, "PATCH", f"{A}/custom-providers/ours", {"headers": {"x": "a\r\nb: c"}})


def test_listings_go_page_by_page(world: World) -> None:
    for i in range(5):
        world.ok("PUT", f"{A}/prices/p/m{i}", {"input": i, "output": i})
    seen, after = [], ""
    while True:
        page = world.ok("GET", f"{A}/prices", query=f"limit=2&after={after}" if after else "limit=2")
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


def test_routes_are_versioned_deployed_and_rolled_back(world: World) -> None:
    path = f"{A}/routes/support"
    assert world.ok("POST", f"{path}/check", {"elements": ELEMENTS})["valid"]
    world.refused(404, "GET", path)
    for number in (1, 2, 3):
        assert (
            world.ok("POST", f"{path}/versions", {"elements": ELEMENTS, "description": str(number)})["number"] == number
        )
    assert world.ok("GET", path)["deployed"] is None
    world.refused(409, "POST", f"{path}/rollback")
    world.refused(404, "POST", f"{path}/deploy", {"version": 9})
    for number in (1, 3):
        assert world.ok("POST", f"{path}/deploy", {"version": number})["deployed"] == number
    assert world.ok("POST", f"{path}/rollback")["deployed"] == 1
    assert world.ok("GET", f"{path}/versions/2")["description"] == "2"
    assert [each["number"] for each in world.ok("GET", f"{path}/versions")["items"]] == [1, 2, 3]
    world.ok("POST", f"{A}/routes/support2/versions", {"elements": ELEMENTS})
    world.ok("DELETE", path)
    world.refused(404, "GET", f"{path}/versions/1")
    assert [each["name"] for each in world.ok("GET", f"{A}/routes")["items"]] == ["support2"]
    assert world.audits()[-4][1] == "route.deploy"


def _without(*ids: str) -> list[dict[str, Any]]:
    return [each for each in ELEMENTS if each["id"] not in ids]


def _with(id: str, **fields: Any) -> list[dict[str, Any]]:
    return [{**each, **fields} if each["id"] == id else each for each in ELEMENTS]


def test_a_route_leads_to_who_can_be_there(world: World) -> None:
    path = f"{A}/routes/support/check"
    own = {"elements": _with("m", properties={"provider": "own", "model": "m"})}
    assert "unknown provider 'own'" in world.refused(400, "POST", path, own)["message"]
    world.ok("POST", f"{A}/gateways/team", {"providers": {"own": {"base_url": "https://own.example"}}})
    for provider in ("own", "pool", "custom-later"):
        there = _with("m", properties={"provider": provider, "model": "m"})
        assert world.ok("POST", path, {"elements": there})["valid"]


@pytest.mark.parametrize(
    ("elements", "why"),
    [
        ([], "1 to 100"),
        (_without("s"), "one start"),
        (_without("e"), "does not exist"),
        ([*ELEMENTS, {"id": "e", "type": "end"}], "same id"),
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
def test_graphs_that_lead_nowhere(world: World, elements: Any, why: str) -> None:
    for where in ("check", "versions"):
        assert why in world.refused(400, "POST", f"{A}/routes/r/{where}", {"elements": elements})["message"]


# Logs


def fill(world: World) -> list[str]:
    records = [
        made(
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
    world.run(world.store.append([(each, payloads.get(i)) for i, each in enumerate(records)]))
    return [each.id for each in records]


def test_logs_are_paged_filtered_and_exported(world: World) -> None:
    ids = fill(world)

    def found(query: str) -> list[int]:
        return [ids.index(each["id"]) for each in world.ok("GET", f"{A}/logs", query=query)["items"]]

    page = world.ok("GET", f"{A}/logs", query="limit=4")
    assert [each["id"] for each in page["items"]] == ids[:4] and page["has_more"] and page["complete"]
    assert found(f"limit=4&before={page['cursor']}") == [4, 5, 6, 7]
    assert found("gateway=main") == [1, 3, 5, 7, 9]
    assert found("model=m0,m1&success=true") == [0, 1, 3, 6, 7, 9]
    assert found("status=500") == found("success=false") == [4]
    assert found("min_cost=0.0003&max_cost=0.0005") == [3, 4, 5]
    assert found("min_duration=80") == [8, 9] and found("max_tokens_in=20") == [0, 1, 2]
    assert found("metadata.n=1&gateway=main") == [1, 3, 5, 7, 9]
    assert found(f"id={ids[2]},{ids[5]}") == [2, 5]
    assert found(f"since={NOON - 2000}") == [0, 1, 2]
    filters = (
        '[{"key":"cost","operator":"gt","value":0.0007},{"key":"created_at","operator":"lt","value":"2100-01-01"}]'
    )
    assert found(f"filters={filters}") == [8, 9]
    filters = '[{"key":"metadata.key","operator":"eq","value":"n"},{"key":"metadata.value","operator":"eq","value":0}]'
    assert found(f"filters={filters}") == [0, 2, 4, 6, 8]

    async def lines() -> list[bytes]:
        return [part async for part in world.admin.export("GET", f"{A}/logs/export", "model=m1", ACME)]

    exported = b"".join(world.run(lines())).splitlines()
    assert [msgspec.json.decode(each)["id"] for each in exported] == [ids[1], ids[4], ids[7]]
    with pytest.raises(InvalidRequest, match="since"):  # while it can still be told
        world.admin.export("GET", f"{A}/logs/export", "since=yesterday", ACME)


def test_logs_are_deleted_by_filter(world: World) -> None:
    fill(world)
    assert world.ok("DELETE", f"{A}/logs", query="model=m0") == {"deleted": 4, "has_more": False}
    assert world.ok("DELETE", f"{CF}/gateways/main/logs")["result"]["deleted"] == 3
    assert len(world.ok("GET", f"{A}/logs")["items"]) == 3
    assert world.audits() == [("a1", "log.delete", "main"), ("a1", "log.delete", "*")]


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
def test_questions_that_make_no_sense(world: World, query: str) -> None:
    fill(world)
    world.refused(400, "GET", f"{A}/logs", query=query)


def test_one_record_its_payload_and_feedback(world: World) -> None:
    ids = fill(world)
    one = world.ok("GET", f"{A}/logs/{ids[1]}")
    assert (one["cost"], one["micros"], one["tokens_in"], one["status_code"]) == (0.0001, 100, 10, 200)
    assert one["usage_metadata"] == {"input_cached_tokens": 1} and one["created_at"].startswith("2026-")
    assert world.ok("GET", f"{A}/logs/{ids[1]}/request") == {"messages": []}
    assert world.ok("GET", f"{A}/logs/{ids[1]}/response") == "data: [DONE]\n\n"
    assert "\ufffd" in world.ok("GET", f"{A}/logs/{ids[3]}/request"), "what is neither is shown as far as it goes"
    world.refused(404, "GET", f"{A}/logs/{ids[2]}/request")
    for id in (new_record_id(NOON), "7", "g" * 32):
        world.refused(404, "GET", f"{A}/logs/{id}")
    assert world.ok("PATCH", f"{A}/logs/{ids[1]}", {"feedback": -1, "score": 20})["feedback"] == -1
    assert world.ok("PATCH", f"{A}/logs/{ids[1]}", {"metadata": {"good": True}})["metadata"] == {"n": 1, "good": True}
    for wrong in ({}, {"feedback": 2}, {"score": 101}, {"nothing": 1}):
        world.refused(400, "PATCH", f"{A}/logs/{ids[1]}", wrong)
    assert [e["id"] for e in world.ok("GET", f"{A}/logs", query="feedback=-1")["items"]] == [ids[1]]


def test_rollups(world: World) -> None:
    fill(world)
    (total,) = world.ok("GET", f"{A}/rollups", query="unit=day&over_time=false")["items"]
    assert (total["requests"], total["errors"], total["micros"]) == (10, 1, 4500)
    assert 40 <= total["duration_p50"] <= 63
    by_model = world.ok("GET", f"{A}/rollups", query="dimension=model&over_time=false&gateway=main")["items"]
    assert {each["value"]: each["requests"] for each in by_model} == {"openai/m0": 2, "openai/m1": 2, "openai/m2": 1}
    for wrong in ("unit=minute&dimension=user", "dimension=weather", "unit=year"):
        world.refused(400, "GET", f"{A}/rollups", query=wrong)


# Cloudflare's face


def test_cloudflares_gateways(world: World) -> None:
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
    made = world.ok("POST", f"{CF}/gateways", wish)
    assert made["success"] and made["errors"] == [] and wish.items() <= made["result"].items()
    settings = world.ok("GET", f"{A}/gateways/cf")["value"]
    assert settings["limits"] == [{"name": "rate_limiting", "limit": 50, "per": 60, "technique": "sliding"}]
    assert (settings["authentication"], settings["retries"]["delay"]) == (True, 0.5)
    world.ok("PATCH", f"{A}/gateways/cf", {"zdr": True})
    changed = world.ok("PUT", f"{CF}/gateways/cf", {"rate_limiting_interval": 0, "rate_limiting_limit": 0})["result"]
    assert (changed["zdr"], changed["cache_ttl"], changed["rate_limiting_limit"]) == (True, 300, 0)
    listed = world.ok("GET", f"{CF}/gateways", query="page=1&per_page=1")
    assert listed["result_info"] == {"count": 1, "page": 1, "per_page": 1, "total_count": 2}
    for wrong in ({"logpush": True}, {"rate_limiting_limit": 5}, {"log_management": 10000}, {"id": "other"}, {"x": 1}):
        refused = world.refused(400, "PUT", f"{CF}/gateways/cf", wrong)
        assert refused["code"] == 7001 and (next(iter(wrong)) in refused["message"]), wrong
    world.ok("DELETE", f"{CF}/gateways/cf")
    status, gone = world("GET", f"{CF}/gateways/cf")
    assert status == 404 and not gone["success"] and gone["errors"][0]["code"] == 7002 and gone["result"] is None


def test_cloudflares_logs(world: World) -> None:
    ids = fill(world)
    logs = f"{CF}/gateways/main/logs"
    seen, page = [], 1
    while True:
        found = world.ok("GET", logs, query=f"page={page}&per_page=2&order_by=created_at&order_by_direction=desc")
        seen += [ids.index(each["id"]) for each in found["result"]]
        if not found["result_info"]["has_more"]:
            break
        page += 1
    assert seen == [1, 3, 5, 7, 9] and page == 3
    world.refused(400, "GET", logs, query="order_by=colour")
    world.refused(400, "GET", logs, query="order_by_direction=up")
    world.refused(400, "GET", logs, query="page=1001&per_page=10")
    assert world.ok("GET", f"{logs}/{ids[1]}/request")["result"] == {"messages": []}
    assert world.ok("PATCH", f"{logs}/{ids[1]}", {"feedback": 1})["result"]["feedback"] == 1
    assert world.ok("PATCH", f"{logs}/{ids[1]}", {})["result"]["feedback"] == 1  # nothing to change is no error there
    assert world("PATCH", f"{logs}/{'0' * 32}", {})[0] == 404
    assert world("GET", f"{CF}/gateways/side/logs/{ids[1]}")[0] == 404


def test_cloudflares_logs_are_sorted_searched_and_filtered(world: World) -> None:
    ids = fill(world)
    logs = f"{CF}/gateways/main/logs"

    def found(query: str) -> list[int]:
        return [ids.index(each["id"]) for each in world.ok("GET", logs, query=query)["result"]]

    assert found("order_by_direction=asc") == found("direction=asc") == [9, 7, 5, 3, 1]
    assert found("order_by=cost&order_by_direction=desc&per_page=2&page=2") == [5, 3]
    assert found("order_by=model&order_by_direction=asc") == [9, 3, 7, 1, 5]
    assert found("search=M1") == [1, 7] and found("search=%25") == found("search=m_") == []
    assert found("min_total_tokens=55&max_total_tokens=77") == [5, 7]

    def filtered(*filters: tuple[str, str, Any]) -> list[int]:
        """As the SDK writes them: parts with dots, repeated."""
        pairs = []
        for key, operator, values in filters:
            pairs += [("filters.key", key), ("filters.operator", operator)]
            pairs += [("filters.value", str(value)) for value in values]
        return found(urlencode(pairs))

    assert filtered(("model", "eq", ["m0", "m2"])) == [3, 5, 9]
    assert filtered(("model", "neq", ["m0", "m2"])) == [1, 7]
    assert filtered(("model", "contains", ["M1", "2"])) == [1, 5, 7]
    assert filtered(("tokens", "gt", [33]), ("duration", "lt", [90])) == [5, 7]
    assert filtered(("cost", "neq", [0.0003]), ("id", "neq", [ids[1]])) == [5, 7, 9]
    assert filtered(("success", "neq", ["false"]), ("cached", "eq", ["false"])) == [1, 3, 5, 7, 9]
    at = world.ok("GET", f"{logs}/{ids[5]}")["result"]["created_at"]
    assert filtered(("created_at", "eq", [at])) == [5] and filtered(("created_at", "gt", [at])) == [1, 3]
    assert filtered(("feedback", "neq", [1])) == [1, 3, 5, 7, 9]  # those without any too
    for wrong in (
        "filters.key=model&filters.operator=eq",
        "filters.key=model&filters.operator=near&filters.value=1",
        "filters.key=cost&filters.operator=contains&filters.value=1",
        "filters.key=success&filters.operator=eq&filters.value=maybe",
        "filters.key=user_agent&filters.operator=eq&filters.value=1",
        "filters.key=id&filters.operator=neq&filters.value=1",
        "meta_info=true",
    ):
        assert world.refused(400, "GET", logs, query=wrong)["code"] == 7001, wrong
    # The two oldest.
    world.ok("DELETE", logs, query="order_by=created_at&order_by_direction=asc&limit=2")
    assert found("") == [1, 3, 5]


def test_cloudflares_custom_providers(world: World) -> None:
    given = {"name": "Ours", "slug": "ours", "base_url": "https://llm.example", "enable": True}
    assert world.ok("POST", f"{CF}/custom-providers", given)["result"]["id"] == "ours"
    world.refused(409, "POST", f"{CF}/custom-providers", given)
    patched = world.ok("PATCH", f"{CF}/custom-providers/ours", {"enable": False})["result"]
    assert (patched["enable"], patched["base_url"]) == (False, "https://llm.example")
    assert world.ok("GET", f"{CF}/custom-providers", query="enable=true")["result"] == []
    assert len(world.ok("GET", f"{CF}/custom-providers", query="search=our")["result"]) == 1
    changes = {"headers": '{"x-team": "a"}', "position": 2}  # headers are a string there
    patched = world.ok("PATCH", f"{CF}/custom-providers/ours", changes)["result"]
    assert (patched["headers"], patched["position"]) == ({"x-team": "a"}, 2)
    for wrong in ("headers", '["x-team"]', '{"x-team": 1}'):
        world.refused(400, "PATCH", f"{CF}/custom-providers/ours", {"headers": wrong})
    world.ok("DELETE", f"{CF}/custom-providers/ours")
    made = world.ok("POST", f"{CF}/custom-providers", {**given, "headers": '{"x-team": "b"}'})["result"]
    assert made["headers"] == {"x-team": "b"}


def test_cloudflares_routes(world: World) -> None:
    world.ok("POST", f"{A}/gateways/main", {})
    world.ok("POST", f"{A}/gateways/side", {})
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
    made = world.ok("POST", routes, {"name": "support", "elements": elements})["result"]
    assert (made["id"], made["name"], made["gateway_id"]) == ("support", "support", "main")
    assert made["version"]["version_id"] == made["deployment"]["version_id"] == "1"
    assert made["version"]["active"] == "true" and msgspec.json.decode(made["version"]["data"]) == made["elements"]
    given = {each["id"]: each for each in made["elements"]}
    assert given["e"] == elements[4] and given["c"] == elements[1] and given["r"]["type"] == "rate"
    assert given["r"]["properties"] == {**limit, "technique": "fixed"}
    stored = world.ok("GET", f"{A}/routes/support/versions/1")
    assert stored["gateways"] == ["main"] and stored["elements"][4] == {"id": "e", "type": "end"}

    world.refused(409, "POST", routes, {"name": "support", "elements": elements})
    added = world.ok("POST", f"{routes}/support/versions", {"elements": elements[:1] + elements[1:]})["result"]
    assert added["version"]["version_id"] == "2" and added["version"]["active"] == "false"
    world.refused(404, "POST", f"{routes}/support/deployments", {"version_id": "9"})
    assert (
        world.ok("POST", f"{routes}/support/deployments", {"version_id": "2"})["result"]["version"]["active"] == "true"
    )

    versions = world.ok("GET", f"{routes}/support/versions")["data"]["versions"]
    assert [(each["version_id"], each["active"]) for each in versions] == [("2", "true"), ("1", "false")]
    one = world.ok("GET", f"{routes}/support/versions/1")["result"]
    assert (one["version_id"], one["active"], one["name"]) == ("1", "false", "support")
    deployments = world.ok("GET", f"{routes}/support/deployments")["data"]["deployments"]
    assert [(each["deployment_id"], each["version_id"]) for each in deployments] == [("2", "2"), ("1", "1")]
    listed = world.ok("GET", routes, query="page=1&per_page=5")["data"]
    assert [each["name"] for each in listed["routes"]] == ["support"] and listed["per_page"] == 5

    assert world.ok("GET", f"{CF}/gateways/side/routes")["data"]["routes"] == []
    world.refused(404, "GET", f"{CF}/gateways/side/routes/support")
    world.refused(404, "GET", f"{CF}/gateways/none/routes")

    renamed = world.ok("PATCH", f"{routes}/support", {"name": "help"})
    assert renamed["success"] and renamed["route"]["name"] == "help" and renamed["route"]["version"]["active"] == "true"
    world.refused(404, "GET", f"{routes}/support")
    assert world.ok("GET", f"{A}/routes/help")["deployed"] == 2
    wrong = [*elements[:4], {"id": "e", "type": "end", "outputs": {"next": {"elementId": "m"}}}]
    assert "outputs" in world.refused(400, "POST", f"{routes}/help/versions", {"elements": wrong})["message"]
    assert world.ok("DELETE", f"{routes}/help")["result"]["id"] == "help"
    world.refused(404, "GET", f"{routes}/help")


def test_cloudflares_provider_configs(world: World) -> None:
    configs = f"{CF}/gateways/filed/provider_configs"
    wish = {"alias": "prod", "default_config": True, "provider_slug": "openai", "secret": "sk-very-secret"}
    made = world.ok("POST", configs, {**wish, "rate_limit": 0})["result"]
    assert (made["alias"], made["default_config"], made["provider_slug"]) == ("prod", True, "openai")
    assert made["gateway_id"] == "filed" and {"id", "modified_at", "secret_id", "secret_preview"} <= made.keys()
    for alias in ("prod", "default"):
        assert world.run(world.vault.get_key("acme", "openai", alias)) == "sk-very-secret"
    world.ok("POST", configs, {**wish, "alias": "test", "default_config": False, "secret": "sk-2"})
    assert world.run(world.vault.get_key("acme", "openai", "default")) == "sk-very-secret"
    listed = world.ok("GET", configs, query="page=1&per_page=2")
    assert listed["result_info"]["total_count"] == 3 and len(listed["result"]) == 2
    assert "sk-" not in str(listed) + str(made) + str(world.ok("GET", f"{A}/audit"))
    for wrong in (
        {"secret_id": "x"},
        {"rate_limit": 5},
        {"secret": None},
        {"alias": "default", "default_config": False},
    ):
        assert world.refused(400, "POST", configs, {**wish, **wrong})["code"] == 7001, wrong
    world.refused(404, "POST", configs, {**wish, "provider_slug": "nobody"})
    world.refused(404, "GET", f"{CF}/gateways/none/provider_configs")


def test_cloudflares_urls(world: World) -> None:
    def url(provider: str) -> tuple[int, Any]:
        path = f"{CF}/gateways/filed/url/{provider}"
        status, found = world.run(world.admin.handle("GET", path, "", b"", ACME, "https://llm.example"))
        return status, found["result"]

    assert url("openai") == (200, "https://llm.example/v1/acme/filed/openai")
    assert url("compat") == (200, "https://llm.example/v1/acme/filed/compat")
    assert url("nobody")[0] == url("custom-ours")[0] == 404
    given = {"name": "Ours", "slug": "ours", "base_url": "https://ours.example", "enable": True}
    world.ok("POST", f"{CF}/custom-providers", given)
    assert url("custom-ours")[0] == 200


def test_cloudflares_datasets(world: World) -> None:
    ids = fill(world)
    world.ok("POST", f"{A}/gateways/main", {})
    world.ok("POST", f"{A}/gateways/side", {})
    sets = f"{CF}/gateways/main/datasets"
    filters = [{"key": "model", "operator": "eq", "value": ["m1"]}]
    made = world.ok("POST", sets, {"name": "ones", "enable": True, "filters": filters})["result"]
    assert made["filters"] == filters and (made["name"], made["enable"], made["gateway_id"]) == ("ones", True, "main")
    one = f"{sets}/{made['id']}"
    assert world.ok("GET", one)["result"] == made
    listed = world.ok("GET", sets, query="enable=true&name=ones&search=M1")
    assert listed["result"] == [made] and listed["result_info"]["total_count"] == 1
    assert world.ok("GET", sets, query="enable=false")["result"] == []
    assert world.ok("GET", f"{CF}/gateways/side/datasets")["result"] == []
    world.refused(404, "GET", one.replace("main", "side"))

    def rows(query: str) -> list[int]:
        found = world.ok("GET", f"{CF}/gateways/main/logs", query=query)["result"]
        return [ids.index(each["id"]) for each in found]

    assert rows(f"dataset={made['id']}") == [1, 7] and rows(f"dataset={made['id']}&min_cost=0.0005") == [7]
    world.refused(400, "GET", f"{CF}/gateways/main/logs", query=f"dataset={made['id']}&model=m0")
    world.refused(404, "GET", f"{CF}/gateways/main/logs", query="dataset=none")
    changed = world.ok("PUT", one, {"name": "twos", "enable": False, "filters": []})["result"]
    assert (changed["id"], changed["name"], changed["created_at"]) == (made["id"], "twos", made["created_at"])
    odd = [{"key": "weather", "operator": "eq", "value": ["fine"]}]
    world.refused(400, "PUT", one, {"name": "x", "enable": True, "filters": odd})
    world.refused(400, "POST", sets, {"name": "x"})
    assert world.ok("DELETE", one)["result"]["id"] == made["id"]
    world.refused(404, "GET", one)
    assert [each[1] for each in world.audits()][:3] == ["dataset.delete", "dataset.update", "dataset.create"]


# The document


def test_every_endpoint_is_in_the_document_and_it_is_sound(world: World) -> None:
    document = world.ok("GET", "/admin/openapi.json")
    operations = [op for path in document["paths"].values() for op in path.values()]
    assert len(operations) == len({op["operationId"] for op in operations}) == len(world.admin._endpoints)
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


# What is known without being configured


def test_every_provider_that_exists_is_listed(world: World) -> None:
    world.ok("PUT", f"{A}/provider-keys/openai/default", {"secret": "sk-1"})
    rows = {row["slug"]: row for row in world.ok("GET", f"{A}/providers")["items"]}
    assert set(rows) == set(PROVIDERS_BY_SLUG)
    assert rows["openai"]["has_key"] and not rows["anthropic"]["has_key"]
    assert rows["anthropic"]["base_url"] == "https://api.anthropic.com" and rows["anthropic"]["needs_key"]
    assert not rows["emberline"]["needs_key"]


def test_the_catalogue_is_listed_page_by_page(world: World) -> None:
    found, after = [], ""
    while True:
        page = world.ok("GET", f"{A}/catalogue", query=f"limit=7&after={after}")
        found += page["items"]
        if not (after := page["next"]):
            break
    known = Catalogue.load()
    assert [row["id"] for row in found] == sorted(f"{model.provider}/{model.name}" for model in known.models())
    mini = next(row for row in found if row["id"] == "openai/gpt-4o-mini")
    price = known.price("openai", "gpt-4o-mini")
    assert price is not None and (mini["price"]["input"], mini["price"]["output"]) == (price.input, price.output)
    assert mini["kind"] == "chat" and mini["context"] == 128_000 and mini["source"].startswith("https://")
    assert world("GET", f"{A}/catalogue", who=USER)[0] == 403
