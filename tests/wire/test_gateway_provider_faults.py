"""The fault table: every way a provider fails, whole and streamed, in two dialects, with and without fallback and
continuation. Each call succeeds elsewhere or fails with the right error, and log and cost are right. Cases run in
parallel."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local_gateway import LocalGateway
from routers import until

from emberline.gateway.core.log_record import LogRecord
from emberline.gateway.fakes.provider import FAULTS

WORDS = 8
SILENCE_TIMEOUT_S = 2  # without a byte from a provider
TEXT = "".join(f"word{i} " for i in range(WORDS))
COST = 11 * 3 + WORDS * 7  # micro-dollars of a whole reply, at the prices below
PRICES = {
    "cf-aig-custom-cost": '{"per_token_in": 0.000003, "per_token_out": 0.000007}',
    "cf-aig-authorization": "Bearer a-key-of-the-tests",
}
PATHS = {"openai-chat": "/v1/chat/completions", "anthropic": "/v1/messages"}

# The status of the reply and the error code in the log, if there is no fallback.
EXPECTED_ERRORS: dict[str, tuple[int, str]] = {
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
FAULTS_AFTER_CONTENT = (
    "stall-later",
    "cut",
    "bad-json",
    "bad-event",
    "error-event",
    "no-ending",
    "drip",
)  # can happen after content


@dataclass(frozen=True, slots=True)
class Case:
    fault: str
    dialect: str
    stream: bool
    fallback: bool
    late: bool = False  # after content has been sent
    continued: bool = False  # continuation is enabled

    @property
    def model(self) -> str:
        provider = {"tls": "secure", "refused": "unreachable"}.get(self.fault, "first")
        return f"{'safe-' if self.fallback else ''}{provider}/{self.fault}@{3 if self.late else 0}"

    def __str__(self) -> str:
        parts = (
            self.fault,
            self.dialect,
            "stream" if self.stream else "whole",
            "fallback" if self.fallback else "alone",
        )
        return "-".join([*parts, *(["late"] if self.late else []), *(["continued"] if self.continued else [])])


@dataclass(frozen=True, slots=True)
class ObservedReply:
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool  # the body ended regularly
    record: LogRecord


def cases() -> list[Case]:
    made = []
    for fault in FAULTS:
        for dialect in PATHS:
            for fallback in (True, False):
                made.append(Case(fault, dialect, False, fallback))
                for continued in (False, True):
                    if fault != "no-ending":  # of a stream: known only after everything has been sent
                        made.append(Case(fault, dialect, True, fallback, continued=continued))
                    if fault in FAULTS_AFTER_CONTENT:
                        made.append(Case(fault, dialect, True, fallback, late=True, continued=continued))
    return made


def provider_settings(urls: dict[str, str]) -> dict[str, Any]:
    at = {**urls, "unreachable": "http://127.0.0.1:1", "secure": urls["first"].replace("http:", "https:")}
    return {
        prefix + name: {"base_url": url, "speaks": ["openai-chat", "anthropic"]}
        for name, url in at.items()
        for prefix in ("", "safe-")
    }


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, ObservedReply]:
    directory = tmp_path_factory.mktemp("faults")
    return run_cases(directory / "errors", 10, [case for case in cases() if not times_out(case)]) | run_cases(
        directory / "timeouts", SILENCE_TIMEOUT_S, [case for case in cases() if times_out(case)]
    )


def run_cases(directory: Path, timeout_s: int, selected: list[Case]) -> dict[Case, ObservedReply]:
    """Run the cases in parallel; `timeout_s` applies to the first byte and between events."""
    fallbacks = [{"model": "safe-*", "to": ["second/well"]}]
    timeouts = {"connect": 10.0, "first_byte": timeout_s, "between_events": timeout_s, "total": 30.0}
    more: Any = {"fallbacks": fallbacks, "timeouts": timeouts, "breaker": {"failures": 1_000_000}}
    with (
        LocalGateway(directory, ("first", "second"), provider_settings, **more) as made,
        ThreadPoolExecutor(24) as pool,
    ):
        found = dict(zip(selected, pool.map(lambda case: ask(made, case, timeout_s), selected), strict=True))
        until(lambda: not any(fake.running for fake in made.fakes.values()))  # no connection to a provider stays open
        return found


def ask(made: LocalGateway, case: Case, timeout_s: int) -> ObservedReply:
    connection = http.client.HTTPConnection(made.url.removeprefix("http://"), timeout=30)
    body = {"model": case.model, "messages": [{"role": "user", "content": "hello"}], "stream": case.stream}
    body["max_tokens"] = WORDS
    option_headers = {
        "cf-aig-request-timeout": str(1000 * timeout_s),
        "x-emberline-continue": str(case.continued).lower(),
    }
    connection.request(
        "POST", PATHS[case.dialect], json.dumps(body), {"content-type": "application/json", **PRICES, **option_headers}
    )
    reply = connection.getresponse()
    try:
        text, whole = reply.read(), True
    except http.client.IncompleteRead as e:
        text, whole = e.partial, False
    connection.close()
    headers = {name.lower(): value for name, value in reply.getheaders()}
    assert "cf-aig-log-id" in headers, (case, reply.status, headers, text)
    return ObservedReply(reply.status, headers, text, whole, made.record(headers["cf-aig-log-id"]))


def reply_text(case: Case, body: bytes) -> str:
    """Return all text of a reply."""
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
def test_fault_before_content_falls_back(replies: dict[Case, ObservedReply], case: Case) -> None:
    reply = replies[case]
    assert reply.status == 200 and reply.whole and reply_text(case, reply.body) == TEXT
    assert (reply.headers["cf-aig-step"], reply.headers["cf-aig-provider"]) == ("1", "second")
    assert ending(case) in reply.body or not case.stream
    row = reply.record
    assert row.success and row.ended == "complete" and row.error == "" and row.step == 1 and row.provider == "second"
    assert row.attempts > 1 and not row.estimated
    assert (row.usage.input, row.usage.output, row.micros) == (11, WORDS, COST), (
        "only the provider that answered is billed"
    )


@pytest.mark.parametrize("case", [c for c in cases() if not c.fallback and not c.late], ids=str)
def test_fault_before_content_without_fallback_is_an_error(replies: dict[Case, ObservedReply], case: Case) -> None:
    reply = replies[case]
    status, code = EXPECTED_ERRORS[case.fault]
    assert reply.status == status and reply.whole and reply.headers["content-type"] == "application/json"
    error = json.loads(reply.body)["error"]
    assert error["message"] and (json.loads(reply.body).get("type") == "error") == (case.dialect == "anthropic")
    if case.fault == "503":
        assert reply.headers["retry-after"] == "1"
    row = reply.record
    assert not row.success and row.ended == "error" and row.error == code and row.status == status
    assert row.micros == 0 and row.usage.total == 0
    timed_out = code == "upstream_timeout"
    assert row.attempts == (1 if timed_out else 2), "no retry after a timeout"


def times_out(case: Case) -> bool:
    return EXPECTED_ERRORS[case.fault][1] == "upstream_timeout"


def is_continued(case: Case) -> bool:
    """Return whether the stream is continued; a provider that timed out is not tried again."""
    return case.late and case.continued and (case.fallback or not times_out(case))


def is_complete(case: Case) -> bool:
    """Return whether only `[DONE]` is missing: finish reason and usage were sent before."""
    return case.late and case.dialect == "openai-chat" and case.fault == "no-ending"


@pytest.mark.parametrize("case", [c for c in cases() if is_complete(c)], ids=str)
def test_stream_with_all_but_done_is_complete(replies: dict[Case, ObservedReply], case: Case) -> None:
    reply = replies[case]
    assert reply.status == 200 and reply_text(case, reply.body) == "".join(f"word{i} " for i in range(WORDS))
    assert reply.body.count(ending(case)) == 1 and b'"error"' not in reply.body
    row = reply.record
    assert row.success and row.ended == "complete" and row.error == "" and row.attempts == 1 and not row.estimated


@pytest.mark.parametrize("case", [c for c in cases() if is_continued(c) and not is_complete(c)], ids=str)
def test_fault_after_content_is_continued_if_enabled(replies: dict[Case, ObservedReply], case: Case) -> None:
    reply = replies[case]
    whole = case.fault == "no-ending"
    words = WORDS if whole else 6  # three, and three that the estimated rest of the limit allows
    assert (
        reply.status == 200
        and reply.whole
        and reply_text(case, reply.body) == "".join(f"word{i} " for i in range(words))
    )
    assert reply.body.count(ending(case)) == 1 and b'"error"' not in reply.body
    row = reply.record
    assert row.success and row.ended == "complete" and row.error == "" and row.step == 0 and row.estimated
    continued_by = "second/well" if case.fallback else case.model
    assert row.metadata["continued"] == ("ended here" if whole else continued_by) and row.attempts == (
        1 if whole else 2
    )
    assert row.usage.input >= (11 if whole else 22) and row.usage.output >= words
    assert row.micros == row.usage.input * 3 + row.usage.output * 7, "both attempts are billed"


@pytest.mark.parametrize("case", [c for c in cases() if c.late and not is_continued(c) and not is_complete(c)], ids=str)
def test_fault_after_content_is_an_error_event(replies: dict[Case, ObservedReply], case: Case) -> None:
    reply = replies[case]
    words = WORDS if case.fault == "no-ending" else 3
    assert reply.status == 200 and reply_text(case, reply.body) == "".join(f"word{i} " for i in range(words))
    assert ending(case) not in reply.body, "a broken stream must not look complete"
    last = [line for line in reply.body.split(b"\n") if line.startswith(b"data: ")][-1]
    message = json.loads(last[6:])["error"]["message"]
    assert f"sent no event for {SILENCE_TIMEOUT_S} s" in message if case.fault in ("stall-later", "drip") else message
    row = reply.record
    assert not row.success and row.ended == "cut" and row.error == EXPECTED_ERRORS[case.fault][1] and row.step == 0
    assert row.usage.output >= words and row.micros == row.usage.input * 3 + row.usage.output * 7
    assert row.estimated


def test_fault_table_is_complete() -> None:
    assert len(FAULTS) == 16 and set(EXPECTED_ERRORS) == set(FAULTS)
    assert {(c.fault, c.fallback, c.dialect) for c in cases()} == {
        (fault, fallback, dialect) for fault in FAULTS for fallback in (True, False) for dialect in PATHS
    }
