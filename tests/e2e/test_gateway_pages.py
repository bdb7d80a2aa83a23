"""The gateway's dashboard in a real browser, on a real gateway with fake providers behind it."""

from __future__ import annotations

import json
import math
import random
import shlex
import shutil
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium
from gateway_records import DAY, make_record
from local_gateway import LocalGateway

from emberline.gateway.core.log_record import LogRecord
from emberline.gateway.providers.registry import PROVIDERS_BY_SLUG
from emberline.wire.usage import Usage

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "tests" / ".artifacts"
PICTURE = ROOT / "docs" / "gateway.png"  # to renew the file, delete it and run these tests
KEY = "a-key-of-the-tests"
ADMIN = {"authorization": f"Bearer {KEY}"}
HOSTILE = "<img src=x onerror=window.hacked=1>"
TABS = (
    "overview",
    "connect",
    "logs",
    "playground",
    "keys",
    "budgets",
    "routes",
    "gateways",
    "providers",
    "prices",
    "audit",
)
PRICE = {"input": 1_000_000_000, "output": 2_000_000_000}  # a tenth of a cent per token, so that sums are visible


def write_config(urls: dict[str, str]) -> dict[str, Any]:
    return {"oai": {"base_url": urls["fake"]}, "spare": {"base_url": urls["spare"]}}


def write_no_providers(urls: dict[str, str]) -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    with LocalGateway(
        tmp_path_factory.mktemp("pages"),
        ("fake", "spare"),
        write_config,
        default_provider="oai",
        authentication=True,
        prices={"oai/priced": PRICE},
        budgets=[{"name": "house", "limit": 50_000_000, "per": "month", "unpriced": "pass"}],
        fallbacks=[{"model": "500", "to": ["spare/rescuer"]}],
    ) as made:
        yield made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile"), width=1360, height=960) as chromium:
        yield chromium


@pytest.fixture
def page(browser: Chromium, gateway: LocalGateway) -> Iterator[Chromium]:
    """A signed-in page. At the end, no script was injected and the console has no errors but failed requests."""
    browser.complaints.clear()
    sign_out(browser, gateway)
    browser.open(gateway.url)
    sign_in(browser, KEY)
    browser.wait("document.body.dataset.signed === 'in' && document.querySelector('#charts')")
    yield browser
    assert browser.js("window.hacked") is None
    assert [c for c in browser.complaints if not c.startswith("Failed to load resource")] == []


def sign_out(browser: Chromium, gateway: LocalGateway) -> None:
    browser.open(f"{gateway.url}/static/ember.svg")  # a page of the same origin without scripts that keep state
    browser.js("localStorage.clear(); sessionStorage.clear()")


def sign_in(page: Chromium, token: str) -> None:
    page.type("[name=token]", token)
    page.press("Enter")


def open_page(page: Chromium, tab: str, until: str) -> None:
    page.js(f"location.hash = {json.dumps('#/' + tab)}")
    page.wait(f"document.querySelector({json.dumps(until)})")


def fill(page: Chromium, **values: str) -> None:
    for name, text in values.items():
        page.type(f"dialog [name={name}]", text)


def press(page: Chromium, text: str, within: str = "main") -> None:
    """Click the button with this text."""
    buttons = json.dumps(f"{within} button")
    found = f"[...document.querySelectorAll({buttons})].find(b => b.textContent === {json.dumps(text)})"
    page.wait(found)
    page.js(f"{found}.click()")


def chart_total(page: Chromium, title: str) -> str:
    """Return the total of a chart."""
    charts = "[...document.querySelectorAll('.timechart')]"
    found = f"{charts}.find(chart => chart.querySelector('.name').textContent === '{title}')"
    return str(page.js(f"{found}.querySelector('.total').textContent"))


def manage(gateway: LocalGateway, path: str, method: str = "GET", body: Any = None) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    status, _, error = gateway.post(f"/admin/accounts/default/{path}", data, ADMIN, method)
    assert status in (200, 201), error
    return json.loads(error)


def chat(gateway: LocalGateway, model: str, text: str = "hello", **more: Any) -> tuple[int, dict[str, str]]:
    headers = more.pop("headers", ADMIN)
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    status, error, _ = gateway.post("/v1/chat/completions", body, headers)
    return status, error


def send_prompt(gateway: LocalGateway, model: str, text: str = "hello", **more: Any) -> int:
    """Send a prompt and wait until the request is in the log."""
    status, error = chat(gateway, model, text, **more)
    if status != 401:
        gateway.record(error["cf-aig-log-id"])
    return status


def test_sign_in_requires_admin_key(browser: Chromium, gateway: LocalGateway) -> None:
    with urllib.request.urlopen(gateway.url) as reply:
        policy = reply.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    sign_out(browser, gateway)
    browser.open(f"{gateway.url}/#/keys")
    assert "gateway/admin.key" in browser.text("#sign-in"), "the page shows where the key is"
    sign_in(browser, "egt_somebody-elses")
    browser.wait("!document.querySelector('#sign-in-error').hidden")
    wrong = "Wrong admin key: this gateway does not know it, or it is expired or revoked."
    assert browser.text("#sign-in-error") == wrong and browser.js("document.body.dataset.signed") == "out"
    for key in ("not-a-key-at-all", "clé"):
        sign_in(browser, "x")
        sign_in(browser, key)
        browser.wait(f"document.querySelector('#sign-in-error').textContent === {json.dumps(wrong)}")
    user = manage(gateway, "keys", "POST", {"name": "a user's"})["secret"]
    sign_in(browser, user)
    browser.wait("document.querySelector('#sign-in-error').textContent.includes('may not use the management API')")
    assert browser.js("sessionStorage.length") == 0

    sign_in(browser, KEY)
    browser.wait("document.querySelector('#keys-found')")
    everywhere = browser.js("JSON.stringify({...localStorage}) + document.cookie + location.href")
    assert KEY not in everywhere and browser.js(f"JSON.stringify({{...sessionStorage}}).includes('{KEY}')")
    browser.open(f"{gateway.url}/?again#/keys")
    browser.wait("document.querySelector('#keys-found')")
    browser.click("#sign-out")
    browser.wait("document.body.dataset.signed === 'out'")
    assert browser.js("sessionStorage.length") == 0 and browser.text("#main") == ""


def test_sign_in_link_works_once(browser: Chromium, gateway: LocalGateway) -> None:
    link = gateway.app.sign_in.create_link(gateway.url)
    token = link.partition("token=")[2]
    sign_out(browser, gateway)
    browser.open(link)
    browser.wait("document.body.dataset.signed === 'in' && document.querySelector('#charts')")
    assert token not in browser.js("location.href + document.referrer + JSON.stringify({...sessionStorage})")
    made = [each["id"] for each in manage(gateway, "keys")["items"] if each["name"] == "dashboard sign-in"]
    browser.click("#sign-out")
    browser.wait("document.body.dataset.signed === 'out'")
    assert made[0] not in [each["id"] for each in manage(gateway, "keys")["items"]], "the session's key is revoked"
    browser.open(link)
    browser.wait("document.querySelector('#sign-in-error')?.textContent.includes('used already')")
    for body, headers, status in (
        (b"{}", {}, 400),
        (b'{"token": "x"}', {"content-type": "text/plain"}, 415),
        (b'{"token": "x"}', {"x-forwarded-for": "203.0.113.9"}, 403),
        (b'{"token": "x"}', {}, 401),
        (b'{"token": "' + b"x" * 2000 + b'"}', {}, 413),
    ):
        assert gateway.post("/sign-in", body, headers)[0] == status, (body[:20], headers)


def test_charts_show_past_requests(page: Chromium, gateway: LocalGateway) -> None:
    def read_counts() -> dict[str, int]:
        found: list[dict[str, int]] = manage(gateway, "rollups?over_time=false")["items"]
        return found[0] if found else {}

    before = read_counts()
    assert [send_prompt(gateway, "priced") for _ in range(4)] == [200] * 4
    assert send_prompt(gateway, "500") == 200 and gateway.newest().provider == "spare"
    assert send_prompt(gateway, "bad-json") == 502
    expected = {"requests": 6, "errors": 1, "micros": 4 * (11 * 1000 + 8 * 2000), "tokens_out": 5 * 8}
    after = read_counts()
    assert {name: after[name] - before.get(name, 0) for name in expected} == expected

    open_page(page, "overview?range=1h&by=model", "[data-id='oai/priced']")
    page.until(lambda: chart_total(page, "Requests") == str(after["requests"]), "requests")
    assert chart_total(page, "Cost") == f"${after['micros'] / 1e6:.2f}"
    assert chart_total(page, "Tokens") == str(after["tokens_in"] + after["tokens_out"])
    assert chart_total(page, "Latency").endswith((" ms", " s")) and chart_total(page, "Errors").endswith("%")
    assert page.js("document.querySelector('.timechart .column').getAttribute('d').length") > 10
    assert "$0.11" in page.text("[data-id='oai/priced']")
    page.wait("!document.querySelector('#fallback-alert').hidden")
    assert "spare/rescuer" in page.text("#fallback-alert") and after["rescued"] - before.get("rescued", 0) == 1
    page.wait("document.querySelector('#live tbody tr')")
    send_prompt(gateway, "a-late-one")
    page.wait("document.querySelector('#live tbody tr').textContent.includes('a-late-one')")  # by itself
    signs = page.js(
        "Object.fromEntries([...document.querySelectorAll('.timechart')][0].querySelectorAll('.key').values()"
        ".map(key => [key.firstChild.data, getComputedStyle(key, '::before').content]))"
    )
    assert signs == {"answered": '"●"', "cached": '"◆"', "fallback": '"▲"', "failed": '"✕"'}, "not only colours"
    assert "failed-pattern" in page.js("document.querySelector('.column.fail').style.fill")
    red, _, blue = page.js("getComputedStyle(document.querySelector('.column.ok')).fill.match(/\\d+/g).map(Number)")
    assert red < blue, "success is not red"
    assert "✓ 200" in page.text("#live") and "✕ 502" in page.text("#live") and "▲ fallback" in page.text("#live")
    page.js("document.querySelector('.timechart svg').focus()")
    page.press("ArrowLeft")
    page.wait("document.querySelector('.timechart .time-label').textContent")
    SHOTS.mkdir(exist_ok=True)
    page.screenshot(SHOTS / "gateway.png")
    page.click("#fallback-alert a")
    page.wait("document.querySelector('#filters [name=rescued]')?.value === 'true'")
    assert {"rescuer"} == set(page.js("[...document.querySelectorAll('#records .entry b')].map(e => e.textContent)"))


def test_log_explorer_finds_and_opens_records_and_saves_feedback(page: Chromium, gateway: LocalGateway) -> None:
    marked = {**ADMIN, "cf-aig-metadata": json.dumps({"team": "blue"})}
    assert send_prompt(gateway, "priced", f"say {HOSTILE}", headers=marked, stream=True) == 200
    id = gateway.newest().id
    error = [chat(gateway, f"many-{i:02}") for i in range(55)]
    gateway.record(error[-1][1]["cf-aig-log-id"])
    open_page(page, "logs", "#records tbody tr")
    assert page.js("document.querySelectorAll('#records tbody tr').length") == 50
    press(page, "Older")
    page.wait("document.querySelector('#records').textContent.includes('many-04')")
    press(page, "Newer")
    page.wait("document.querySelector('#records').textContent.includes('many-54')")

    send_prompt(gateway, "arrives-late")
    page.wait("document.querySelector('#records tr.new')?.textContent.includes('arrives-late')")  # by itself
    model = "document.querySelector('[data-choices=model] [value=arrives-late]')"
    open_page(page, "overview", "#charts")
    open_page(page, "logs", "#records tbody tr")
    page.wait(model)
    page.js(f"{model}.click(); document.querySelector('[data-choices=provider] [value=oai]').click()")
    press(page, "Find")
    page.wait("document.querySelectorAll('#records tbody tr').length === 1")
    assert page.js("location.hash") == "#/logs?provider=oai&model=arrives-late"
    assert page.text("[data-choices=model] summary") == "arrives-late"

    open_page(page, "logs", "#records tbody tr:nth-child(2)")
    page.js("document.querySelector('#filters > details').open = true")
    page.type("#filters [name=metadata]", "team=blue")
    page.press("Enter")
    page.wait("document.querySelectorAll('#records tbody tr').length === 1")
    assert page.js("location.hash") == "#/logs?metadata=team%3Dblue"
    page.click("#records tbody tr td:nth-child(3)")
    page.wait(f"document.querySelector('#record[data-id=\"{id}\"]')")
    assert HOSTILE in page.text("#conversation") and "word0 word1" in page.text("#conversation")
    assert HOSTILE in page.text("#request pre") and '"stream": true' in page.text("#request pre")
    assert "[DONE]" in page.text("#response pre") and "blue" in page.text("#record")
    assert page.js("document.querySelector('#record img')") is None
    page.click("#feedback [aria-label='Good answer']")
    page.until(lambda: gateway.record(id).feedback == 1, "feedback is kept")
    page.wait("document.querySelector('#feedback [aria-pressed=true]')")
    page.type("#feedback [name=score]", "101")
    page.press("Enter")
    assert gateway.record(id).score is None
    page.type("#feedback [name=score]", "90")
    page.press("Enter")
    page.until(lambda: gateway.record(id).score == 90, "the score is kept")
    page.screenshot(SHOTS / "gateway-record.png")


def test_key_is_created_shown_once_and_disabled(page: Chromium, gateway: LocalGateway) -> None:
    open_page(page, "keys", "#new-key")
    page.click("#new-key")
    fill(page, name=HOSTILE, user="ada", allowed_models="small-*")
    page.js("document.querySelector('#key-form').requestSubmit()")
    secret = page.wait("document.querySelector('#secret')?.textContent")
    key = {"authorization": f"Bearer {secret}"}
    assert send_prompt(gateway, "small-1", headers=key) == 200 and send_prompt(gateway, "large", headers=key) == 403
    press(page, "I have copied it", "dialog")
    page.wait("!document.querySelector('dialog').open")
    assert HOSTILE in page.text("#keys-found")
    open_page(page, "audit", "#changes")
    open_page(page, "keys", "#new-key")
    assert secret not in page.js("document.documentElement.innerHTML")

    made = next(each for each in manage(gateway, "keys")["items"] if each["name"] == HOSTILE)
    row = f"[data-id='{made['id']}']"
    page.click(f"{row} button")
    page.wait(f"document.querySelector({json.dumps(row)}).textContent.includes('disabled')")
    page.until(lambda: send_prompt(gateway, "small-1", headers=key) == 401, "it works no more")
    press(page, "Change", row)
    fill(page, limits="per-user")
    page.js("document.querySelector('dialog form').requestSubmit()")
    page.wait("!document.querySelector('dialog').open")
    assert manage(gateway, f"keys/{made['id']}")["limits"] == ["per-user"]
    press(page, "Change", row)
    revoke = f"[...document.querySelectorAll({json.dumps(row + ' button')})].find(b => b.textContent === 'Revoke')"
    page.js(f"document.querySelector('dialog').close(); {revoke}.click()")  # the next dialog opens before the event
    press(page, "Revoke", "dialog")
    page.wait(f"!document.querySelector({json.dumps(row)})")


def test_keys_page_shows_which_gateways_need_no_key(page: Chromium, gateway: LocalGateway) -> None:
    hidden = "document.querySelector('#keys-warning').hidden"
    open_page(page, "keys", "#keys-found")
    assert page.js(hidden), "every gateway needs a key"
    manage(gateway, "gateways/open-to-all", "PUT", {"authentication": False})
    open_page(page, "overview", "#charts")
    open_page(page, "keys", "#keys-found")
    page.wait(f"!{hidden}")
    error = page.text("#keys-warning")
    assert "Authentication is off for open-to-all" in error and "without a key are answered" in error
    assert "only" not in page.text("#keys-found .empty")
    manage(gateway, "gateways/open-to-all", "DELETE")


def test_budgets_prices_and_provider_keys_are_stored(page: Chromium, gateway: LocalGateway) -> None:
    open_page(page, "budgets", "#new-budget")
    page.click("#new-budget")
    fill(page, name="team", limit="-1", split="metadata.team")
    page.js("document.querySelector('#budget-form').requestSubmit()")
    assert page.js("document.querySelector('dialog').open"), "negative amounts are refused"
    fill(page, limit="12.5", split="nonsense")
    page.js("document.querySelector('#budget-form').requestSubmit()")
    page.wait("document.querySelector('dialog .form-error').textContent.includes('is not an attribute')")
    fill(page, split="metadata.team")
    page.js("document.querySelector('#budget-form').requestSubmit()")
    page.wait("document.querySelector('[data-id=team]')")
    assert "$12.50" in page.text("[data-id=team]")
    rule = manage(gateway, "budgets/team")["value"]["rule"]
    assert rule["limit"] == 12_500_000 and rule["split"] == ["metadata.team"] and rule["per"] == "day"
    press(page, "Turn off", "[data-id=team]")
    page.until(lambda: not manage(gateway, "budgets/team")["value"]["enabled"], "it is off")

    open_page(page, "prices", "#new-price")
    page.click("#new-price")
    fill(page, id="oai/org/own", input="1.25", output="10")
    page.js("document.querySelector('#price-form').requestSubmit()")
    page.wait("document.querySelector('[data-id=\"oai/org/own\"]')")
    assert manage(gateway, "prices/oai/org/own")["value"]["input"] == 1_250_000

    assert "openai/gpt-5" in page.text("#catalogue") and "$1.25" in page.text("#catalogue")
    assert "oai/org/own" not in page.text("#catalogue")
    press(page, "Override", "[data-id='openai/gpt-5']")
    fill(page, output="11")
    page.js("document.querySelector('#price-form').requestSubmit()")
    page.wait("document.querySelector('#prices-found [data-id=\"openai/gpt-5\"]')")
    overridden = manage(gateway, "prices/openai/gpt-5")["value"]
    assert (overridden["input"], overridden["output"]) == (1_250_000, 11_000_000)
    manage(gateway, "prices/openai/gpt-5", "DELETE")

    open_page(page, "providers", "#store-key")
    known = page.text("#known-providers")
    assert all(slug in known for slug in PROVIDERS_BY_SLUG) and "api.anthropic.com" in known
    page.resize(1400, 900)
    assert page.js("(t => t.scrollWidth <= t.clientWidth)(document.querySelector('#known-providers .table'))")
    page.resize(1360, 960)
    page.click("#store-key")
    fill(page, provider="openai", secret="sk-very-secret")
    page.js("document.querySelector('#provider-key-form').requestSubmit()")
    page.wait("document.querySelector('#provider-keys').textContent.includes('openai')")
    assert "sk-very-secret" not in page.js("document.documentElement.innerHTML")
    assert [each["provider"] for each in manage(gateway, "provider-keys")["items"]] == ["openai"]


def test_budgets_page_updates_usage(page: Chromium, gateway: LocalGateway) -> None:
    day = {"name": "day", "limit": 70, "amount": "tokens", "per": "day"}
    team = {"name": "teams", "limit": 10, "per": "hour", "split": ["metadata.team"]}
    for rule in (day, team):
        manage(gateway, f"budgets/{rule['name']}", "PUT", {"rule": rule})
    page.until(lambda: "x-ratelimit-limit-tokens" in chat(gateway, "priced", headers=of("blue"))[1], "they hold")
    open_page(page, "budgets", "[data-spent=day] .meter")
    page.until(lambda: "blue" in page.text("[data-spent=teams]"), "the users of recent requests are shown")
    spent = manage(gateway, "spent")["items"]
    assert {item["budget"] for item in spent} == {"day", "teams", "house"} and "house" in page.text(
        "#budgets-configured"
    )
    used = next(item["used"] for item in spent if item["budget"] == "day")
    send_prompt(gateway, "priced", headers=of("red"))
    assert used > 0
    page.until(lambda: f"{used + 11 + 8} of 70 tokens" in page.text("[data-spent=day]"), "by itself")
    page.until(lambda: "red" in page.text("[data-spent=teams]"), "each team has its own")
    assert "until" in page.text("[data-spent=day]") and "$50.00" in page.text("#budgets-configured")
    page.screenshot(SHOTS / "gateway-budgets.png")
    for rule in (day, team):
        manage(gateway, f"budgets/{rule['name']}", "DELETE")
    page.until(lambda: send_prompt(gateway, "unpriced") == 200, "they hold no more")


def of(team: str) -> dict[str, str]:
    return {**ADMIN, "cf-aig-metadata": json.dumps({"team": team})}


def test_default_gateway_is_changed_without_a_configuration_file(browser: Chromium, tmp_path: Path) -> None:
    models = "/v1/models"
    with LocalGateway(tmp_path, (), write_no_providers, has_config_file=False) as first:
        assert first.post(models, b"", method="GET")[0] == 200
        sign_out(browser, first)
        browser.open(f"{first.url}/#/gateways/default")
        sign_in(browser, KEY)
        browser.wait("document.querySelector('.save-bar')")
        assert browser.js("document.querySelector('#defined-in-file')") is None
        browser.click("[name=authentication]")
        browser.type("[name=cache_ttl]", "300")
        browser.js("document.querySelector('#gateway-settings').requestSubmit()")
        browser.wait("document.querySelector('#toast').textContent.includes('default are saved')")
        browser.until(lambda: first.post(models, b"", method="GET")[0] == 401, "a key is required")
        assert first.post(models, b"", ADMIN, "GET")[0] == 200
    with LocalGateway(tmp_path, (), write_no_providers, has_config_file=False) as second:
        assert second.post(models, b"", method="GET")[0] == 401, "also after a restart"
        assert manage(second, "gateways/default")["value"]["cache_ttl"] == 300
        changes = [(each["actor"], each["action"]) for each in manage(second, "audit")["items"]]
        assert changes == [("configured-0", "gateway.update"), ("gateway", "gateway.create")]


def test_gateway_is_created_changed_and_selected(page: Chromium, gateway: LocalGateway) -> None:
    open_page(page, "gateways/default", "#gateway-settings")
    assert "[gateways.default]" in page.text("#defined-in-file") and page.js("!document.querySelector('.save-bar')")
    assert page.js("document.querySelector('[name=authentication]').matches(':disabled:checked')")
    open_page(page, "gateways", "#new-gateway")
    assert "configuration file" in page.text("[data-id=default]")
    page.click("#new-gateway")
    fill(page, name="team-b")
    page.js("document.querySelector('#gateway-form').requestSubmit()")
    page.wait("document.querySelector('#gateway-page[data-id=team-b] .save-bar')")
    page.type("[name=cache_ttl]", "60")
    page.type("[name='retries.attempts']", "3")
    press(page, "Add a fallback")
    page.type("[name='fallbacks[0].to']", "openai/gpt-5")
    press(page, "Add a limit")
    page.type("[name='limits[0].name']", "each")
    page.type("[name='limits[0].split']", "team")
    save = "document.querySelector('#gateway-settings').requestSubmit()"
    page.js(save)
    page.wait("document.querySelector('label:has([name=\"limits[0].split\"]) .field-error')")
    assert "is not an attribute" in page.text(".field-error") and "is not an attribute" in page.text(".form-error")
    page.type("[name='limits[0].split']", "metadata.team")
    assert page.js("!document.querySelector('.field-error')"), "a change removes the message"
    page.js(save)
    page.wait("document.querySelector('#toast').textContent.includes('team-b are saved')")
    stored = manage(gateway, "gateways/team-b")["value"]
    assert (stored["cache_ttl"], stored["retries"]["attempts"], stored["authentication"]) == (60, 3, True)
    assert stored["fallbacks"] == [{"model": "*", "to": ["openai/gpt-5"]}]
    assert (stored["limits"][0]["split"], stored["limits"][0]["limit"]) == (["metadata.team"], 100)
    page.wait("[...document.querySelector('#gateway').options].some(each => each.value === 'team-b')")
    choose = "const s = document.querySelector('#gateway'); s.value = 'team-b'; s.dispatchEvent(new Event('change'))"
    page.js(f"{{ {choose} }}")
    open_page(page, "logs", "#records .empty")  # no request has been answered yet
    open_page(page, "gateways/team-b", "#gateway-page")
    press(page, "Delete")
    press(page, "Delete", "dialog")
    page.wait("document.querySelector('#gateway').value === ''")


def test_connect_page_creates_a_key_and_shows_working_snippets(page: Chromium, gateway: LocalGateway) -> None:
    open_page(page, "connect", "#snippet pre")
    assert page.text("#base-url") == f"{gateway.url}/v1"
    page.type("#connect-model", "priced")
    page.click("#create-connect-key")
    key = page.wait("document.querySelector('#connect-key').value")
    assert key.startswith("evk_") and f"Authorization: Bearer {key}" in page.text("#snippet")
    page.click("#connect-test")
    page.wait("document.querySelector('#connect-answer').textContent.includes('Answered: word0')")
    assert page.js("document.querySelector('#engine-link').href") == "http://127.0.0.1:1/"
    endpoint = {
        "base": "http://h/v1",
        "anthropic": "http://h",
        "engine": "http://e",
        "key": "it's",
        "headers": {"a": "b"},
    }
    arguments = f"{json.dumps(endpoint)}, 'openai/\\'x\\' \"y\"'"
    made = page.js(f"import('/static/snippets.js').then(found => found.clients({arguments}))")
    code = {each["id"]: each["code"] for each in made}
    assert all("http://h" in text for name, text in code.items() if name != "ollama") and "http://e" in code["ollama"]
    for name in ("openai-python", "anthropic"):
        compile(code[name], name, "exec")
    assert tomllib.loads(code["codex"])["model_providers"]["emberline"]["http_headers"] == {"a": "b"}
    assert json.loads(code["opencode"])["provider"]["emberline"]["options"]["apiKey"] == "it's"
    words = shlex.split(code["curl"].replace("\\\n", " "))
    assert json.loads(words[-1])["model"] == "openai/'x' \"y\"" and "Authorization: Bearer it's" in words
    body = {"model": "m", "messages": [], "top_k": 3, "stream": True, "logprobs": None}
    text = page.js(
        f"import('/static/snippets.js').then(found => found.python({json.dumps(endpoint)}, {json.dumps(body)}))"
    )
    compile(text, "python", "exec")
    assert "extra_body={" in text and "stream=True" in text and "logprobs=None" in text
    page.open(f"{gateway.url}/static/reference.html")
    page.wait("document.querySelectorAll('#reference details').length > 20")
    shown = page.text("#reference")
    assert "/v1/chat/completions" in shown and "/admin/accounts/{account}/gateways/{gateway}" in shown
    page.screenshot(SHOTS / "gateway-reference.png")


def test_route_is_checked_deployed_and_rolled_back(page: Chromium, gateway: LocalGateway) -> None:
    open_page(page, "routes", "#new-route")
    page.click("#new-route")
    fill(page, name="support")
    page.press("Enter")
    page.wait("document.querySelector('#graph .box.model')")
    elements = json.loads(page.js("document.querySelector('#elements').value"))
    page.type("#elements", "[")
    page.wait("document.querySelector('#result').textContent.includes('JSON')")
    wrong = [{**elements[0], "outputs": {"next": {"elementId": HOSTILE}}}, *elements[1:]]
    page.type("#elements", json.dumps(wrong))
    page.wait("document.querySelector('#graph .box.missing')")
    press(page, "Check")
    page.wait("document.querySelector('#result').textContent.includes('does not exist')")
    press(page, "Save and deploy")
    assert manage(gateway, "routes")["items"] == []

    def graph_json(first: str) -> str:
        elements[1]["properties"] = {"provider": "oai", "model": first}
        elements[2]["properties"] = {"provider": "spare", "model": "rescuer"}
        return json.dumps(elements)

    def answers() -> str:
        return gateway.newest().provider if send_prompt(gateway, "dynamic/support") == 200 else ""

    page.type("#elements", graph_json("priced"))
    press(page, "Check")
    page.wait("document.querySelector('#result').dataset.good === 'true'")
    press(page, "Save and deploy")
    page.wait("document.querySelector('.head').textContent.includes('version 1 deployed')")
    page.until(lambda: answers() == "oai", "it is in force")
    page.type("#elements", graph_json("bad-json"))
    press(page, "Save a version")
    page.wait("document.querySelectorAll('#versions tbody tr').length === 2")
    press(page, "Deploy", "#versions tbody tr")
    page.wait("document.querySelector('.head').textContent.includes('version 2 deployed')")
    page.until(lambda: answers() == "spare", "the other version is in force")
    page.screenshot(SHOTS / "gateway-route.png")
    press(page, "Roll back")
    page.wait("document.querySelector('.head').textContent.includes('version 1 deployed')")
    page.until(lambda: answers() == "oai", "the first is in force again")


def test_playground_streams_through_the_gateway(page: Chromium, gateway: LocalGateway) -> None:
    fake = gateway.fakes["fake"]
    fake.pace = 0.05
    last = ".turn.last"
    open_page(page, "playground", "#prompt")
    page.type("[name=max_tokens]", "30")
    page.type("#model", "priced")
    page.type("#prompt", HOSTILE)
    page.press("Enter")
    page.wait(f"document.querySelector('{last} .text')?.innerText.includes('word3')")
    assert "word29" not in page.text("#transcript"), "text is shown while it streams"
    page.wait(f"document.querySelector('{last} .cost')?.textContent === '$0.071'")
    assert page.text(f"{last} .text").strip().endswith("word29") and HOSTILE in page.text("#transcript .user")
    assert "oai/priced" in page.text(f"{last} .foot") and "log" in page.text(f"{last} .foot a")
    assert gateway.newest().ended == "complete" and fake.gone == 0

    page.type("#prompt", "more")
    page.press("Enter")
    page.wait(f"document.querySelector('{last} .text')?.innerText.includes('word2')")
    assert [m["role"] for m in fake.requests[-1].json["messages"]] == ["user", "assistant", "user"]
    page.click("#stop")
    page.wait(f"document.querySelector('{last}').dataset.ending === 'stopped'")
    page.until(lambda: fake.gone == 1, "the provider was left")
    fake.pace = 0.0
    page.type("#model", "cut@3")
    page.type("#prompt", "and again")
    page.press("Enter")
    page.wait(f"document.querySelector('{last}[data-ending=failed] .notice')")
    before = len(fake.requests)
    page.type("#model", "429")
    page.type("#prompt", "refused")
    page.press("Enter")
    page.wait("document.querySelectorAll('[data-ending=failed]').length === 2")
    page.type("#model", "priced")
    page.type("#prompt", "at last")
    page.press("Enter")
    page.until(lambda: len(fake.requests) > before + 1 and fake.requests[-1].json["model"] == "priced", "it is asked")
    sent = "\n\n".join(m["content"] for m in fake.requests[-1].json["messages"] if m["role"] == "user")
    assert sent == "\n\n".join([HOSTILE, "more", "and again", "at last"]), "a failed prompt is not sent again"
    page.click("#code")
    assert "cf-aig-gateway-id" not in page.text("#code-dialog") and f"{gateway.url}/v1" in page.text("#code-dialog")
    assert KEY not in page.text("#code-dialog")
    open_page(page, "overview", "#charts")
    open_page(page, "playground", "#prompt")
    assert HOSTILE in page.text("#transcript"), "conversations are kept"


def test_every_page_fits_small_screens_and_dark_mode(page: Chromium, gateway: LocalGateway) -> None:
    send_prompt(gateway, "a-model-with-a-name-that-is-far-too-long-for-the-width-of-a-telephone-" + "x" * 60)
    page.resize(390, 844, 2)
    page.prefer("dark")
    for tab in TABS:
        page.js("document.querySelector('#main').replaceChildren()")
        open_page(page, tab, "#main :is(h2, .playground)")
        assert page.js("document.documentElement.scrollWidth") == 390, tab
        wide = "[...document.querySelectorAll('#main > *')].every(e => e.getBoundingClientRect().right <= 390)"
        assert page.js(wide), tab
        narrow = "[...document.querySelectorAll('#main .table')].every(e => e.scrollWidth <= e.clientWidth)"
        assert page.js(narrow), f"{tab}: no column is off the screen"
        assert page.js(f"document.querySelector('#pages [data-page={tab}]').ariaCurrent") == "page"
        for width in (320, 390):
            page.resize(width, 844, 2)
            sight = "(r => r.left >= 0 && r.right <= innerWidth && r.top >= 0 && r.bottom <= innerHeight)"
            shown = f"[...document.querySelectorAll('#pages a')].filter(a => {sight}(a.getBoundingClientRect())).length"
            assert page.js(shown) == len(TABS), f"every tab is visible at {width} px"
    open_page(page, "overview", "#charts")
    page.screenshot(SHOTS / "gateway-phone.png")
    page.resize(1360, 960)
    page.prefer("light")


def month(records: int) -> list[LogRecord]:
    """Return records of a month with a daily cycle."""
    chance, now = random.Random(7), round(time.time() * 1e3)
    models = [("openai", "gpt-5-mini"), ("anthropic", "claude-sonnet-4-5"), ("emberline", "smollm2"), ("groq", "llama")]
    found = []
    while len(found) < records:
        at = now - round(chance.random() * 28 * DAY)
        if chance.random() > 0.3 + 0.7 * math.sin(at / DAY * math.pi) ** 2:
            continue
        provider, model = chance.choices(models, (5, 3, 4, 2))[0]
        failed = chance.random() < 0.02
        cached = not failed and chance.random() < 0.25
        fields = {"status": 502, "success": False, "ended": "error", "error": "upstream_failed"} if failed else {}
        found.append(
            make_record(
                at,
                **fields,
                account="default",
                gateway="default",
                provider=provider,
                model=model,
                cached=cached,
                user=chance.choice(["ada", "lin", "tove"]),
                usage=Usage(input=chance.randint(50, 4000), output=chance.randint(10, 900)),
                micros=0 if cached or failed or provider == "emberline" else chance.randint(100, 9000),
                duration_ms=round(chance.lognormvariate(6.5, 0.6)),
                first_byte_ms=round(chance.lognormvariate(5.5, 0.5)),
            )
        )
    return sorted(found, key=lambda record: record.id)


def test_month_is_read_from_rollups_only(page: Chromium, gateway: LocalGateway) -> None:
    assert send_prompt(gateway, "priced") == 200
    before = manage(gateway, "rollups?over_time=false")["items"][0]["requests"]
    gateway.append(month(3000))
    open_page(page, "overview?range=7d&by=model", "[data-id='openai/gpt-5-mini']")
    page.until(lambda: chart_total(page, "Latency").endswith(" ms"), "percentiles are shown")
    assert "local" in page.text("[data-id='emberline/smollm2']") and "$" not in page.text(
        "[data-id='emberline/smollm2']"
    )
    open_page(page, "overview?range=30d&by=model", "[href='#/overview?range=30d&by=model'][aria-current]")
    page.until(lambda: chart_total(page, "Requests") == f"{3000 + before:,}", "a month is counted")
    columns = page.js("document.querySelector('.timechart .column').getAttribute('d')").count("M")
    assert 28 <= columns <= 30, "a column for each day"
    assert page.js("document.querySelectorAll('#breakdown tbody tr').length") >= 4
    sent_request = page.js(
        "performance.getEntriesByType('resource').map(e => e.name).filter(n => n.includes('/admin/'))"
    )
    kinds = {path.partition("?")[0].rpartition("/")[2] for path in sent_request}
    assert kinds == {"gateways", "rollups", "logs"} and all(
        "limit=50" in path for path in sent_request if "/logs" in path
    )
    page.wait("document.querySelector('#live tbody tr')")
    page.screenshot(SHOTS / "gateway-month.png")
    if not PICTURE.exists():
        shutil.copyfile(SHOTS / "gateway-month.png", PICTURE)
