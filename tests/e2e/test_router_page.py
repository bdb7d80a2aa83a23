"""The router's page in a real browser: workers come, work, drain and die before one's eyes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chromium import Chromium
from routers import Fakes, get

SHOTS = Path(__file__).parents[2] / "tests" / ".artifacts"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    made = Fakes(tmp_path, "--lost-after", "2")
    yield made
    made.close()


def health(name: str) -> str:
    return f"document.querySelector('[data-name={name}]')?.dataset.health"


def number(page: Chromium, label: str, within: str = "#counts") -> str:
    found = f"[...document.querySelectorAll('{within} dt')].find(dt => dt.textContent === '{label}')"
    return str(page.js(f"{found}?.nextSibling.textContent"))


def test_status_page_shows_worker_states(browser: Chromium, fakes: Fakes) -> None:
    browser.complaints.clear()
    browser.open(fakes.url)
    browser.wait("!document.querySelector('#empty').hidden")
    fakes.start("a", "b", pace=0.02)
    browser.wait(f"{health('a')} === 'ready' && {health('b')} === 'ready'")
    browser.wait("document.querySelector('#state').textContent === '2 of 2 ready'")

    hostile = "<img src=x onerror=window.hacked=1>"
    card = {"name": hostile, "incarnation": "1", "url": "http://127.0.0.1:1", "models": [{"name": "<b>m</b>"}]}
    get(f"{fakes.url}/cluster/register", card)
    browser.wait("document.querySelectorAll('.worker').length === 3")
    assert browser.js("window.hacked") is None and hostile in browser.text("#workers")

    body = {"model": "fake", "messages": [{"role": "user", "content": "x" * 2000}], "max_tokens": 150, "stream": True}
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(get, f"{fakes.url}/v1/chat/completions", body) for _ in range(6)]
        browser.wait("document.documentElement.dataset.busy === 'true'")
        browser.wait("[...document.querySelectorAll('.fill i')].some(bar => parseFloat(bar.style.width) > 0)")
        SHOTS.mkdir(exist_ok=True)
        browser.screenshot(SHOTS / "router.png")
        assert all("[DONE]" in reply.result() for reply in asked)
    browser.wait("document.documentElement.dataset.busy === 'false'")
    kinds = ("by load only", "by prefix cache", "moved off a loaded worker")
    browser.until(lambda: sum(int(number(browser, kind)) for kind in kinds) == 6, "every request is counted")
    # The first has nothing to go by; whether the others go to the same worker depends on how much work it got since.
    assert number(browser, "by load only") == "1"
    assert int(number(browser, "by prefix cache")) + int(number(browser, "moved off a loaded worker")) == 5
    assert browser.js("document.querySelector('.chart .line').getAttribute('d')").count("L") > 2

    get(f"{fakes.url}/cluster/drain", {"name": "b"})
    browser.wait(f"{health('b')} === 'draining'")
    fakes.workers["a"].kill()
    browser.wait(f"{health('a')} === 'lost'")
    browser.wait("document.querySelector('#state').textContent.startsWith('0 of')")
    fakes.router.process.kill()
    browser.wait("document.querySelector('#state').dataset.state === 'offline'")
    assert [c for c in browser.complaints if not c.startswith("Failed to load resource")] == []


def test_status_page_shows_migrations(browser: Chromium, fakes: Fakes) -> None:
    browser.complaints.clear()
    browser.open(fakes.url)
    fakes.start("p", role="prefill")
    fakes.start("d", "e", role="decode", pace=0.01)
    browser.wait("document.querySelector('[data-name=p] .role')?.textContent === 'prefill'")
    browser.until(lambda: number(browser, "KV from", "[data-name=d]") == "p", "pairs are shown")
    fakes.tell("d", "break", after=5, times=1, calls="/cluster/resume")
    fakes.tell("e", "break", after=5, times=1, calls="/cluster/resume")
    body = {"model": "fake", "messages": [{"role": "user", "content": "x" * 4000}], "max_tokens": 20, "stream": True}
    assert "error" not in get(f"{fakes.url}/v1/chat/completions", body)
    browser.until(lambda: number(browser, "prompts split", "#moves") == "2", "d and e each asked for it")
    browser.until(lambda: int(number(browser, "streams moved", "#moves")) >= 1, "moves are counted")
    assert int(number(browser, "moved: broken", "#moves")) >= 1 and number(browser, "prefilled", "#moves") == "2"
    browser.until(lambda: number(browser, "KV published", "[data-name=p]") == "2", "transfers are shown")
    browser.until(
        lambda: any("MB at" in number(browser, "KV received", f"[data-name={n}]") for n in "de"), "and how much"
    )
    browser.screenshot(SHOTS / "router-roles.png")
    assert [c for c in browser.complaints if not c.startswith("Failed to load resource")] == []
    assert fakes.status()["decisions"] == {"load": 1, "split": 2, "again": 2}


def test_status_page_asks_for_the_key(browser: Chromium, tmp_path: Path) -> None:
    router = Fakes(tmp_path, "--api-key", "a-key-of-the-tests")
    try:
        browser.open(router.url)
        browser.wait("!document.querySelector('#key-form').hidden && document.querySelector('#key-error').hidden")
        assert browser.text("#state") == "locked"
        browser.type("[name=key]", "another-key-of-the-tests")
        browser.press("Enter")
        browser.wait("!document.querySelector('#key-error').hidden")
        browser.type("[name=key]", "a-key-of-the-tests")
        browser.press("Enter")
        browser.wait("document.querySelector('#state').textContent === '0 of 0 ready'")
        assert browser.js("document.querySelector('#key-form').hidden")
        browser.resize(390, 844)
        assert browser.js("document.documentElement.scrollWidth") == 390
        tiles = "[...document.querySelectorAll('.chart')].every(tile => tile.scrollWidth <= tile.clientWidth)"
        assert browser.js(tiles), "no text runs over its tile"
    finally:
        browser.js("sessionStorage.clear()")
        browser.resize(1280, 860)
        router.close()
