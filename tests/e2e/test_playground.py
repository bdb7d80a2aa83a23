"""The playground in a real browser: the ordinary ways against the real server, the rare endings against a fake one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Chromium
from fake_server import HOSTILE, FakeServer

ROOT = Path(__file__).parents[2]
WEB = ROOT / "src" / "emberline" / "web"
SHOTS = ROOT / "tests" / ".artifacts"
PICTURE = ROOT / "docs" / "playground.png"  # to renew it, delete it and run this file
IDLE = "document.querySelector('#stop').hidden"
LAST = ".turn.last"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture
def page(browser: Chromium) -> Iterator[Chromium]:
    """The browser, quiet before and after: nothing in the console but what the network panel says of refusals."""
    browser.resize(1280, 860)
    browser.prefer("light")
    browser.complaints.clear()
    yield browser
    assert [c for c in browser.complaints if not c.startswith("Failed to load resource")] == []


@pytest.fixture
def fake(page: Chromium) -> Iterator[FakeServer]:
    with FakeServer(WEB, token_seconds=0.001) as server:
        open_page(page, server.url)
        yield server


def open_page(page: Chromium, url: str) -> None:
    page.open(url)
    page.js("localStorage.clear(); sessionStorage.clear(); document.querySelector('#clear').click()")
    page.open(url)
    page.wait("document.querySelector('#engine').dataset.state === 'ready'")
    page.wait("document.querySelector('#model-name').textContent")


def ask(page: Chromium, question: str) -> None:
    page.wait(IDLE)
    page.type("#prompt", question)
    page.press("Enter")
    page.wait(f"document.querySelector('.turn:nth-last-child(2)')?.innerText.includes({json.dumps(question)})")


def answer(page: Chromium) -> str:
    page.wait(IDLE, 120)
    return page.text(f"{LAST} .text")


def regenerate(page: Chromium) -> str:
    page.js(f"document.querySelector('{LAST}').classList.add('old')")
    page.click(f"{LAST} [aria-label^=Regenerate]")
    page.wait(f"!document.querySelector('{LAST}.old')")
    return answer(page)


def metric(page: Chromium, name: str) -> float:
    text = page.text(f"{LAST} [data-metric={name}]")
    found = re.search(r"\d+(\.\d+)?", text)
    assert found, f"no {name} shown: {text!r}"
    return float(found.group())


def wait_for_end(page: Chromium) -> str:
    return str(page.js(f"document.querySelector('{LAST}').dataset.ending"))


def set_range(page: Chromium, name: str, value: float) -> None:
    page.js(
        f"(i => {{ i.value = {value}; i.dispatchEvent(new Event('input', {{bubbles: true}})) }})"
        f"(document.querySelector('#settings [name={name}]'))"
    )


def stats(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/stats", timeout=10) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


# The real server


def test_conversation_shows_usage_and_charts(page: Chromium, server: str) -> None:
    open_page(page, server)
    assert page.complaints == []
    set_range(page, "temperature", 0)
    page.type("#settings [name=max_tokens]", "120")
    ask(page, "Name the capital of France.")
    assert "Paris" in answer(page)
    assert metric(page, "ttft") > 0
    assert metric(page, "rate") > 0
    assert metric(page, "prompt") > 16

    ask(page, "Write a Python function that adds two numbers.")
    lengths = set()
    while not page.js(IDLE):
        lengths.add(len(page.text(f"{LAST} .text")))
    assert len(lengths) > 3, f"the answer came at once, not as a stream: {lengths}"
    assert 0 < metric(page, "cached") < metric(page, "prompt")
    assert metric(page, "completion") > 3
    page.wait("[...document.querySelectorAll('.chart')].every(c => c.querySelector('.line').getTotalLength() > 0)")
    save_screenshot(page, "playground-light")

    page.prefer("dark")
    ask(page, "Explain in simple words why the sky is blue.")
    page.wait(f"document.querySelector('{LAST} .text').innerText.length > 200 || {IDLE}", 120)
    save_screenshot(page, "playground-dark", settle=0)
    if not PICTURE.exists():
        PICTURE.parent.mkdir(exist_ok=True)
        shutil.copyfile(SHOTS / "playground-dark.png", PICTURE)
    answer(page)
    assert page.complaints == []


def test_settings_change_request(page: Chromium, server: str) -> None:
    open_page(page, server)
    set_range(page, "temperature", 1.5)
    page.type("#settings [name=max_tokens]", "12")
    page.type("#settings [name=seed]", "7")
    ask(page, "Tell me a story about the sea.")
    first = answer(page)
    assert metric(page, "completion") == 12
    assert wait_for_end(page) == "length"
    assert regenerate(page) == first, "one seed, one answer, the prompt cached or not"
    page.type("#settings [name=seed]", "8")
    assert regenerate(page) != first
    page.type("#settings [name=max_tokens]", "60")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    page.type("#settings [name=schema]", json.dumps(schema))
    ask(page, "Give me a number.")
    assert answer(page) and list(json.loads(page.text(f"{LAST} .text pre"))) == ["n"], "JSON is in a code block"


def test_stop_button_aborts_request(page: Chromium, server: str) -> None:
    open_page(page, server)
    page.type("#settings [name=max_tokens]", "4000")
    page.type("#settings [name=schema]", '{"type": "array", "items": {"type": "integer"}, "minItems": 1500}')
    ask(page, "Count for a long time.")
    page.wait(f"document.querySelector('{LAST} .text pre')?.innerText.length > 5")
    page.click("#stop")
    assert answer(page) and len(page.text(f"{LAST} .text pre")) > 5
    assert wait_for_end(page) == "stopped"
    assert "stopped here" in page.text(LAST)
    page.until(lambda: stats(server)["running"] == 0, "the server to be idle")


def test_error_reply_is_shown(page: Chromium, server: str) -> None:
    open_page(page, server)
    page.type("#settings [name=schema]", '{"type": "no such type"}')
    ask(page, "Hello?")
    page.wait(IDLE)
    notice = page.text(f"{LAST} .notice")
    assert "(400)" in notice
    assert "Try again" in notice


# The fake server: endings that are hard to come by


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("fail-400", ["rejected the request: temperature (400)", "it must be in [0, 2]"]),
        ("fail-401", ["requires an API key (401)"]),
        ("fail-429", ["busy (429)", "the queue is full", "wait 7 s"]),
        ("fail-503", ["not ready (503)", "the engine is restarting"]),
    ],
)
def test_error_codes_are_shown(page: Chromium, fake: FakeServer, question: str, told: list[str]) -> None:
    ask(page, question)
    page.wait(f"document.querySelector('{LAST} .notice p')")
    for words in told:
        page.wait(f"document.querySelector('{LAST} .notice').innerText.includes({json.dumps(words)})")
    page.click(f"{LAST} .retry")
    page.until(lambda: len(fake.requests) == 2, "a second try")
    assert fake.requests[0] == fake.requests[1]
    page.wait(f"document.querySelector('{LAST} .notice p')")
    ask(page, "hello")
    answer(page)
    sent = [message["content"] for message in fake.requests[-1]["messages"]]
    assert sent == ["hello"], "a question that failed is not sent again with the next"
    assert question in page.text("#transcript"), "it stays on the page"


def test_only_chat_models_are_listed(page: Chromium, fake: FakeServer) -> None:
    fake.models[:0] = [{"id": "an-embedder", "owned_by": "emberline", "kind": "embedding"}, {"id": "foreign"}]
    page.open(fake.url)
    page.wait("document.querySelector('#settings [name=model]').options.length")
    offered = page.js("[...document.querySelector('#settings [name=model]').options].map(o => o.value)")
    assert offered == ["foreign", "fake"]


def test_accepted_drafts_are_shown_if_there_are_any(page: Chromium, fake: FakeServer) -> None:
    shown = f"document.querySelector('{LAST} [data-metric=accepted]')"
    ask(page, "hello")
    assert answer(page) and metric(page, "completion") > 3 and page.js(f"{shown} === null")
    ask(page, "drafts")
    assert answer(page) and page.js(f"{shown}.textContent") == "3 / 4"


@pytest.mark.parametrize("width", [320, 360, 390, 430])
def test_start_page_fits_phone_screen(page: Chromium, fake: FakeServer, width: int) -> None:
    page.resize(width, 700)
    page.wait("document.documentElement.dataset.panel === 'closed'")
    assert page.js("(s => s.scrollWidth <= s.clientWidth)(document.querySelector('#scroll'))")
    assert page.js("document.querySelector('#theme').getBoundingClientRect().right") <= width
    right = "Math.max(...[...document.querySelectorAll('#welcome *')].map(e => e.getBoundingClientRect().right))"
    assert page.js(right) <= width
    save_screenshot(page, f"start-{width}")


@pytest.mark.parametrize(
    ("question", "told"), [("fail-drop", "connection was lost"), ("fail-engine", "The engine failed")]
)
def test_incomplete_answer_stays_and_is_marked(page: Chromium, fake: FakeServer, question: str, told: str) -> None:
    ask(page, question)
    assert answer(page).startswith("The prefix cache keeps")
    assert wait_for_end(page) == "failed"
    assert told in page.text(f"{LAST} .notice")
    assert "incomplete" in page.text(LAST)
    page.open(fake.url)
    assert "incomplete" in page.text(LAST), "also after a reload"


def test_unreachable_server_is_shown(page: Chromium) -> None:
    with FakeServer(WEB) as fake:
        open_page(page, fake.url)
    page.wait("document.querySelector('#engine').dataset.state === 'offline'")
    ask(page, "anyone?")
    page.wait(f"document.querySelector('{LAST} .notice p')")
    assert "emberline serve" in page.text(f"{LAST} .notice")


def test_model_output_is_never_html(page: Chromium, fake: FakeServer) -> None:
    ask(page, "hostile")
    shown = answer(page)
    assert "<script>window.hacked=1</script><img src=x" in shown
    assert "<svg onload=window.hacked=1>" in shown
    assert page.js(f"document.querySelectorAll('{LAST} .text :is(script, img, svg[onload], a, b)').length") == 0
    assert page.js("window.hacked") is None
    ask(page, f"echoed by me: {HOSTILE}")
    assert page.js("window.hacked") is None
    refused = "(() => { try { document.body.innerHTML = '<b>'; return false } catch { return true } })()"
    assert page.complaints == []
    assert page.js(refused), "the policy in index.html makes innerHTML throw"
    page.complaints.clear()


def test_markdown_and_copy(page: Chromium, fake: FakeServer) -> None:
    ask(page, "think about it")
    answer(page)
    assert page.text(f"{LAST} .text strong") == "finished blocks"
    assert page.text(f"{LAST} .text em") == "new"
    assert page.js(f"document.querySelectorAll('{LAST} .text li').length") == 2
    assert "def lookup" in page.text(f"{LAST} .code pre")
    assert page.text(f"{LAST} .code .t-comment") == "# blocks found, in order"
    assert "prefix cache." in page.js(f"document.querySelector('{LAST} .thinking p').textContent")
    page.js("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve() }")
    page.click(f"{LAST} .code-bar button")
    assert page.wait("window.copied").startswith("def lookup")
    page.click(f"{LAST} .actions button")
    assert page.wait("window.copied.startsWith('The prefix')")


def test_request_contains_settings(page: Chromium, fake: FakeServer) -> None:
    ask(page, "one")
    answer(page)
    assert "top_k" not in fake.requests[0] and "seed" not in fake.requests[0]
    for name, text in {"system": "Be kind.", "top_k": "40", "max_tokens": "33", "seed": "5", "key": "secret"}.items():
        page.type(f"#settings [name={name}]", text)
    set_range(page, "temperature", 1.25)
    set_range(page, "top_p", 0.5)
    ask(page, "two")
    answer(page)
    sent = fake.requests[1]
    expected = {"model": "fake", "temperature": 1.25, "top_p": 0.5, "top_k": 40, "max_tokens": 33, "seed": 5}
    assert {name: sent[name] for name in expected} == expected
    assert [m["role"] for m in sent["messages"]] == ["system", "user", "assistant", "user"]
    assert "secret" not in page.js("JSON.stringify(localStorage)"), "a key is not kept beyond the tab"
    page.type("#settings [name=schema]", "{not json")
    page.type("#prompt", "three")
    page.press("Enter")
    assert "Not sent. The JSON schema is not valid JSON" in page.text("#composer-problem"), "where the user looks"
    beside = "document.querySelector('label:has([name=schema]) + #settings-error').getBoundingClientRect().bottom"
    assert page.js(f"{beside} <= innerHeight") and page.js("document.activeElement.name") == "schema"
    assert len(fake.requests) == 2, "nothing is sent while a field is wrong"
    page.type("#settings [name=schema]", '{"type": "string"}')
    ask(page, "three")
    answer(page)
    assert fake.requests[2]["response_format"]["json_schema"]["schema"] == {"type": "string"}
    page.click("#settings [type=reset]")
    ask(page, "four")
    answer(page)
    assert "seed" not in fake.requests[3] and fake.requests[3]["temperature"] == 0.7


def test_keyboard_shortcuts_and_saved_conversation(page: Chromium, fake: FakeServer) -> None:
    fake.token_seconds = 0.02
    ask(page, "forever")
    page.wait(f"document.querySelector('{LAST} .text').innerText.length > 20")
    page.press("Escape")
    page.wait(IDLE)
    assert wait_for_end(page) == "stopped"
    page.until(lambda: fake.gone == 1, "the server to notice")
    page.js("document.activeElement.blur()")
    page.press("/")
    assert page.js("document.activeElement.id") == "prompt"
    page.press("ArrowUp")
    assert page.js("document.querySelector('#prompt').value") == "forever"
    kept = page.text(f"{LAST} .text")
    page.open(fake.url)
    assert page.text(f"{LAST} .text") == kept, "the conversation outlives the page"
    page.click("#clear")
    assert page.js("document.querySelectorAll('.turn').length") == 0
    page.click("#toast button")
    assert page.text(f"{LAST} .text") == kept, "clearing can be undone"


def test_several_conversations_are_kept_and_messages_are_edited(page: Chromium, fake: FakeServer) -> None:
    ask(page, "first question")
    answer(page)
    page.click("#new")
    page.wait("document.querySelectorAll('.turn').length === 0")
    ask(page, "second question")
    answer(page)
    ask(page, "third question")
    answer(page)
    assert [m["content"] for m in fake.requests[-1]["messages"] if m["role"] == "user"] == [
        "second question",
        "third question",
    ]
    page.open(fake.url)
    titles = "[...document.querySelector('#conversation').options].map(each => each.text)"
    assert page.js(titles) == ["second question", "first question"], "they outlive the page"
    page.click(".turn.user .icon")
    page.type(".edited", "json")
    page.press("Enter")
    answer(page)
    assert [m["content"] for m in fake.requests[-1]["messages"]] == ["json"], "the edited message and nothing after it"
    assert json.loads(page.text(f"{LAST} .text pre")) == {"n": [1, 2]} and page.text(f"{LAST} .code-bar") == "json"
    page.js(
        "(s => { s.value = s.options[1].value; s.dispatchEvent(new Event('change')) })"
        "(document.querySelector('#conversation'))"
    )
    assert "first question" in page.text("#transcript") and "json" not in page.text("#transcript")


def test_tools_run_in_a_sandbox_or_wait_for_a_result(page: Chromium, fake: FakeServer) -> None:
    page.click("#settings [name=example_tools]")
    ask(page, 'call calculate {"expression":"2*(3+4)^2-sqrt(16)/8"}')
    page.wait(f"document.querySelector('{LAST} .text').innerText.includes('The result is 97.5.')")
    assert [t["function"]["name"] for t in fake.requests[0]["tools"]] == ["calculate", "current_time"]
    call, result = fake.requests[1]["messages"][1:]
    assert call["tool_calls"][0]["function"]["name"] == "calculate" and call["tool_calls"][0]["id"] == "c1"
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "97.5"}
    run = "import('/static/tools.js').then(tools => Promise.all({}.map(each => tools.runExampleTool(...each))))"
    calls = [
        ["calculate", json.dumps({"expression": "fetch(1)"})],
        ["calculate", json.dumps({"expression": "1;close()"})],
        ["calculate", "{"],
        ["calculate", json.dumps({"expression": "(" * 999})],
        ["constructor", "{}"],
        ["current_time", '{"timezone": "nowhere"}'],
    ]
    results = page.js(run.format(json.dumps(calls)))
    assert all(each.startswith("error: ") for each in results), results

    own = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    page.type("#settings [name=tools]", json.dumps(own))
    ask(page, 'call weather {"city":"Oslo"}')
    page.wait(f"document.querySelector('{LAST} .tool-result input')")
    page.type(f"{LAST} .tool-result input", "rain")
    page.press("Enter")
    page.wait(f"document.querySelector('{LAST} .text').innerText.includes('The result is rain.')")
    assert fake.requests[-1]["tools"][2] == own[0]


def test_request_is_shown_as_program_text(page: Chromium, fake: FakeServer) -> None:
    assert page.text(".bar").split("\n")[-2:] == ["Dashboard", "API"]
    assert page.js("document.querySelector('#dashboard').href") == "http://127.0.0.1:8080/"
    page.type("#settings [name=key]", "a-secret")
    page.type("#prompt", "it's a draft")
    page.click("#code")
    text = page.text("[data-snippet=curl] pre")
    words = shlex.split(text.replace("\\\n", " "))
    body = json.loads(words[-1])
    assert words[1] == f"{fake.url}/v1/chat/completions" and body["messages"][-1]["content"] == "it's a draft"
    assert "a-secret" not in text and "YOUR_KEY" in text
    compile(page.text("[data-snippet=python] pre"), "python", "exec")


def test_models_are_pulled_loaded_unloaded_and_removed(page: Chromium, fake: FakeServer) -> None:
    assert "fake (7.0B)" in page.text("#settings [name=model]") and "7.0B parameters" in page.text("#model-note")
    page.click("#models-open")
    page.wait("document.querySelector('#models-notice').innerText.includes('EMBERLINE_ADMIN_KEY')")
    fake.admin_key = "admin"
    for key, words in {"": "Enter the admin key", "wrong": "Wrong admin key"}.items():
        page.type("#admin-key input", key)
        page.click("#admin-key button")
        page.wait(f"document.querySelector('#models-notice').innerText.includes({json.dumps(words)})")
    page.type("#admin-key input", "admin")
    page.press("Enter")
    page.wait("document.querySelectorAll('[data-models=catalogue] tbody tr').length === 1")
    assert "small" in page.text("[data-models=catalogue]"), "the large model does not fit into 9 GB"
    page.js("(s => { s.value = '80000000000'; s.onchange() })(document.querySelector('.models [name=memory]'))")
    assert page.text("[data-models=catalogue] tbody td") == "large", "the largest that fits is first"
    assert "admin" not in page.js("JSON.stringify(localStorage)"), "the key is not kept beyond the tab"
    assert page.text("[data-models=cached] td").startswith("large"), "the catalogue's name of the file on the disk"
    save_screenshot(page, "models")
    page.resize(390, 844)
    assert page.js("[...document.querySelectorAll('.models .rows')].every(e => e.scrollWidth <= e.clientWidth)")
    save_screenshot(page, "models-phone")
    page.resize(1280, 860)

    page.type(".models [name=model]", "missing")
    page.press("Enter")
    page.wait("document.querySelector('[data-work=missing][data-state=failed]')")
    assert "no such model on the hub" in page.text("[data-work=missing]")
    page.click("[data-models=catalogue] tbody tr:last-child button")
    page.wait("document.querySelector('[data-work=small][data-state=done]')")
    page.wait("document.querySelector('[data-models=served]').innerText.includes('small')")
    names = "[...document.querySelector('#settings [name=model]').options].map(each => each.value)"
    page.until(lambda: "small" in page.js(names), "chats can use the model")
    page.click("[data-models=served] button")
    page.until(lambda: page.js(names) == ["fake"], "chats cannot use the model any more")
    page.click("[data-models=cached] button:last-child")
    assert len(fake.cached) == 1, "the user has to confirm it"
    page.click("[data-models=cached] button.dangerous")
    page.until(lambda: not fake.cached, "the model is removed")
    page.wait("document.querySelector('[data-models=cached]').innerText.includes('No model is on the disk')")


def test_scrolling_up_stops_following_answer(page: Chromium, fake: FakeServer) -> None:
    page.type("#settings [name=max_tokens]", "")
    fake.token_seconds = 0.002
    ask(page, "forever")
    page.wait("document.querySelector('#scroll').scrollHeight > 1600")
    page.js("document.querySelector('#scroll').scrollTop = 100")
    page.wait("!document.querySelector('#latest').hidden")
    grown = page.js("document.querySelector('#scroll').scrollHeight")
    page.wait(f"document.querySelector('#scroll').scrollHeight > {grown} + 100")
    assert page.js("document.querySelector('#scroll').scrollTop") == 100
    page.click("#latest")
    page.wait("document.querySelector('#latest').hidden")
    page.press("Escape")


def test_narrow_screens_and_themes(page: Chromium, fake: FakeServer) -> None:
    ask(page, "one")
    answer(page)
    page.resize(360, 700)
    page.wait("document.documentElement.dataset.panel === 'closed'")
    assert page.js("document.documentElement.scrollWidth") <= 360, "nothing sticks out sideways"
    save_screenshot(page, "narrow")
    page.click("#panel-toggle")
    page.wait("document.querySelector('#panel').getBoundingClientRect().left < 40")
    save_screenshot(page, "narrow-panel")
    page.press("Escape")
    page.wait("document.querySelector('#panel').inert")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.js(paper)
    page.prefer("dark")
    assert page.js(paper) != light, "the system's theme is followed"
    page.click("#theme")
    assert page.js(paper) == light, "until one is chosen"


def save_screenshot(page: Chromium, name: str, settle: float = 0.5) -> None:
    page.js("document.querySelector('#panel').scrollTop = 0")
    time.sleep(settle)  # transitions end
    page.screenshot(SHOTS / f"{name}.png")
