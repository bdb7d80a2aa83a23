"""The fault table: every way a provider fails, with a fallback and without, streamed and whole, for clients of two
dialects, who wish a broken stream to be continued or not. Each is rescued or told as it is; the log and the cost say
what happened. Many cases run at once."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gateways import Gateways
from routers import until

from emberline.gateway.fakes.provider import FAULTS
from emberline.gateway.logs.record import LogRecord

WORDS = 8
SOON = 2  # seconds after which who is silent is given up
TEXT = "".join(f"word{i} " for i in range(WORDS))
COST = 11 * 3 + WORDS * 7  # micro-dollars of a whole reply, at the prices below
PRICES = {"cf-aig-custom-cost": '{"per_token_in": 0.000003, "per_token_out": 0.000007}'}
PATHS = {"openai-chat": "/v1/chat/completions", "anthropic": "/v1/messages"}

# What a client hears if nobody can help: the status, and the code of the log.
TOLD: dict[str, tuple[int, str]] = {
    "429": (429, "upstream_refused"),
    "500": (500, "upstream_refused"),
    "503": (503, "upstream_refused"),
    "refused": (502, "upstream_unreached"),
    "tls": (502, "upstream_unreached"),
    "silent": (504, "upstream_timeout"),
    "stall": (504, "upstream_timeout"),
    "stall-later": (504, "upstream_timeout"),
    "cut": (502, "upstream_broken"),
    "bad-json": (502, "upstream_broken"),
    "bad-event": (502, "upstream_broken"),
    "error-event": (502, "upstream_broken"),
    "empty": (502, "upstream_broken"),
    "no-ending": (502, "upstream_broken"),
    "wrong-type": (502, "upstream_broken"),
    "drip": (504, "upstream_timeout"),
}
LATER = ("stall-later", "cut", "bad-json", "bad-event", "error-event", "no-ending", "drip")  # can happen after content


@dataclass(frozen=True, slots=True)
class Case:
    fault: str
    dialect: str
    stream: bool
    fallback: bool
    late: bool = False  # after content has gone out
    wish: bool = False  # that it is continued

    @property
    def model(self) -> str:
        provider = {"tls": "secure", "refused": "nobody"}.get(self.fault, "first")
        return f"{'safe-' if self.fallback else ''}{provider}/{self.fault}@{3 if self.late else 0}"

    def __str__(self) -> str:
        parts = (
            self.fault,
            self.dialect,
            "stream" if self.stream else "whole",
            "fallback" if self.fallback else "alone",
        )
        return "-".join([*parts, *(["late"] if self.late else []), *(["continued"] if self.wish else [])])


@dataclass(frozen=True, slots=True)
class Heard:
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool  # the connection ended as it should
    record: LogRecord


def cases() -> list[Case]:
    made = []
    for fault in FAULTS:
        for dialect in PATHS:
            for fallback in (True, False):
                made.append(Case(fault, dialect, False, fallback))
                for wish in (False, True):
                    if fault != "no-ending":  # of a stream: that is known only when all has gone out
                        made.append(Case(fault, dialect, True, fallback, wish=wish))
                    if fault in LATER:
                        made.append(Case(fault, dialect, True, fallback, late=True, wish=wish))
    return made


def places(urls: dict[str, str]) -> dict[str, Any]:
    at = {**urls, "nobody": "http://127.0.0.1:1", "secure": urls["first"].replace("http:", "https:")}
    return {
        prefix + name: {"base_url": url, "speaks": ["openai-chat", "anthropic"]}
        for name, url in at.items()
        for prefix in ("", "safe-")
    }


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Heard]:
    home = tmp_path_factory.mktemp("faults")
    return all_heard(home / "told", 10, [case for case in cases() if not silent(case)]) | all_heard(
        home / "silent", SOON, [case for case in cases() if silent(case)]
    )


def all_heard(home: Path, patience: int, wanted: list[Case]) -> dict[Case, Heard]:
    """`patience`: seconds without a byte that are borne."""
    fallbacks = [{"model": "safe-*", "to": ["second/well"]}]
    timeouts = {"connect": 10.0, "first_byte": patience, "between_events": patience, "total": 30.0}
    more: Any = {"fallbacks": fallbacks, "timeouts": timeouts, "breaker": {"failures": 1_000_000}}
    with Gateways(home, ("first", "second"), places, **more) as made, ThreadPoolExecutor(24) as pool:
        found = dict(zip(wanted, pool.map(lambda case: ask(made, case, patience), wanted), strict=True))
        until(lambda: not any(fake.running for fake in made.fakes.values()))  # nothing is left open at a provider
        return found


def ask(made: Gateways, case: Case, patience: int) -> Heard:
    connection = http.client.HTTPConnection(made.url.removeprefix("http://"), timeout=30)
    body = {"model": case.model, "messages": [{"role": "user", "content": "hello"}], "stream": case.stream}
    body["max_tokens"] = WORDS
    wishes = {"cf-aig-request-timeout": str(1000 * patience), "x-emberline-continue": str(case.wish).lower()}
    connection.request(
        "POST", PATHS[case.dialect], json.dumps(body), {"content-type": "application/json", **PRICES, **wishes}
    )
    reply = connection.getresponse()
    try:
        text, whole = reply.read(), True
    except http.client.IncompleteRead as e:
        text, whole = e.partial, False
    connection.close()
    headers = {name.lower(): value for name, value in reply.getheaders()}
    assert "cf-aig-log-id" in headers, (case, reply.status, headers, text)
    return Heard(reply.status, headers, text, whole, made.record(headers["cf-aig-log-id"]))


def said(case: Case, body: bytes) -> str:
    """All text in a reply."""
    if not case.stream:
        found = json.loads(body)
        return str(
            found["content"][0]["text"] if case.dialect == "anthropic" else found["choices"][0]["message"]["content"]
        )
    text = ""
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if case.dialect == "anthropic":
                text += event.get("delta", {}).get("text", "")
            else:
                text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    return text


def ending(case: Case) -> bytes:
    return b"event: message_stop" if case.dialect == "anthropic" else b"data: [DONE]"


@pytest.mark.parametrize("case", [c for c in cases() if c.fallback and not c.late], ids=str)
def test_before_any_content_the_fallback_answers(heard: dict[Case, Heard], case: Case) -> None:
    got = heard[case]
    assert got.status == 200 and got.whole and said(case, got.body) == TEXT
    assert (got.headers["cf-aig-step"], got.headers["cf-aig-provider"]) == ("1", "second")
    assert ending(case) in got.body or not case.stream
    row = got.record
    assert row.success and row.ended == "complete" and row.error == "" and row.step == 1 and row.provider == "second"
    assert row.attempts > 1 and not row.estimated
    assert (row.usage.input, row.usage.output, row.micros) == (11, WORDS, COST), "and only who answered is paid"


@pytest.mark.parametrize("case", [c for c in cases() if not c.fallback and not c.late], ids=str)
def test_before_any_content_and_alone_it_is_told(heard: dict[Case, Heard], case: Case) -> None:
    got = heard[case]
    status, code = TOLD[case.fault]
    assert got.status == status and got.whole and got.headers["content-type"] == "application/json"
    error = json.loads(got.body)["error"]
    assert error["message"] and (json.loads(got.body).get("type") == "error") == (case.dialect == "anthropic")
    if case.fault == "503":
        assert got.headers["retry-after"] == "1"
    row = got.record
    assert not row.success and row.ended == "error" and row.error == code and row.status == status
    assert row.micros == 0 and row.usage.total == 0
    timed_out = code == "upstream_timeout"
    assert row.attempts == (1 if timed_out else 2), "who was silent is not asked again"


def silent(case: Case) -> bool:
    return TOLD[case.fault][1] == "upstream_timeout"


def rescued(case: Case) -> bool:
    """Who was silent is not asked again, but by that all others are."""
    return case.late and case.wish and (case.fallback or not silent(case))


def complete(case: Case) -> bool:
    """Whether all was there but `[DONE]`: OpenAI's finish reason and usage came before."""
    return case.late and case.dialect == "openai-chat" and case.fault == "no-ending"


@pytest.mark.parametrize("case", [c for c in cases() if complete(c)], ids=str)
def test_stream_with_all_but_done_is_complete(heard: dict[Case, Heard], case: Case) -> None:
    got = heard[case]
    assert got.status == 200 and said(case, got.body) == "".join(f"word{i} " for i in range(WORDS))
    assert got.body.count(ending(case)) == 1 and b'"error"' not in got.body
    row = got.record
    assert row.success and row.ended == "complete" and row.error == "" and row.attempts == 1 and not row.estimated


@pytest.mark.parametrize("case", [c for c in cases() if rescued(c) and not complete(c)], ids=str)
def test_after_content_another_goes_on_where_that_is_wished(heard: dict[Case, Heard], case: Case) -> None:
    got = heard[case]
    whole = case.fault == "no-ending"
    words = WORDS if whole else 6  # three, and the three that are left of the limit when those are estimated
    assert got.status == 200 and got.whole and said(case, got.body) == "".join(f"word{i} " for i in range(words))
    assert got.body.count(ending(case)) == 1 and b'"error"' not in got.body
    row = got.record
    assert row.success and row.ended == "complete" and row.error == "" and row.step == 0 and row.estimated
    onward = "second/well" if case.fallback else case.model
    assert row.metadata["continued"] == ("ended here" if whole else onward) and row.attempts == (1 if whole else 2)
    assert row.usage.input >= (11 if whole else 22) and row.usage.output >= words
    assert row.micros == row.usage.input * 3 + row.usage.output * 7, "both are paid"


@pytest.mark.parametrize("case", [c for c in cases() if c.late and not rescued(c) and not complete(c)], ids=str)
def test_after_content_the_client_is_told_in_its_dialect(heard: dict[Case, Heard], case: Case) -> None:
    got = heard[case]
    words = WORDS if case.fault == "no-ending" else 3
    assert got.status == 200 and said(case, got.body) == "".join(f"word{i} " for i in range(words))
    assert ending(case) not in got.body, "a broken stream must not look whole"
    last = [line for line in got.body.split(b"\n") if line.startswith(b"data: ")][-1]
    message = json.loads(last[6:])["error"]["message"]
    assert f"sent no event for {SOON} s" in message if case.fault in ("stall-later", "drip") else message
    row = got.record
    assert not row.success and row.ended == "cut" and row.error == TOLD[case.fault][1] and row.step == 0
    assert row.usage.output >= words and row.micros == row.usage.input * 3 + row.usage.output * 7
    assert row.estimated


def test_the_table_is_whole() -> None:
    assert len(FAULTS) == 16 and set(TOLD) == set(FAULTS)
    assert {(c.fault, c.fallback, c.dialect) for c in cases()} == {
        (fault, fallback, dialect) for fault in FAULTS for fallback in (True, False) for dialect in PATHS
    }
