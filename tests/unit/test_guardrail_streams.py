"""Streamed replies: no character of a match is sent, however the stream is split, and the rest passes unchanged."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from gateway_requests import Pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.gateway.core.guardrail_finding import GuardrailFinding
from emberline.gateway.core.guardrail_policy import PatternRule
from emberline.gateway.guardrails.patterns import FINDERS
from emberline.gateway.guardrails.scanner import PatternScanner, redact_text
from emberline.gateway.guardrails.stream import GuardedStream
from emberline.gateway.guardrails.text_window import TextWindow, WindowPiece
from emberline.gateway.guardrails.texts import JsonText
from emberline.wire import sse

CARD = "4111 1111 1111 1111"
PEM = "-----BEGIN PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7bq8\nZk3v9Qw8Lp2Xr7Tn\n-----END PRIVATE KEY-----"
ALL = tuple(FINDERS)
SECRETS = [
    CARD,
    "378282246310005",
    "DE89 3704 0044 0532 0130 00",
    "sk-Zk3v9Qw8Lp2Xr7Tn5Yb1Hc6Md4",
    PEM,
    "a.b@example.co.uk",
    "+1 (415) 555 2671",
    "(415) 555-2671",
    "10.0.0.1",
    "2001:db8::1",
    "123-45-6789",
    "123 45 6789",
]
NOISE = [
    " ",
    "  ",
    "\n",
    ".",
    ",",
    "-",
    "1",
    "12 ",
    "4111 ",
    "DE89",
    " DE89 ",
    "word ",
    "is ",
    "@",
    "x",
    ":",
    "(",
    "\\n",
    "-----",
    "-----BEGIN ",
    "+1 ",
    "中文",
    "é",
    "::",
    "sk-",
    "\\",
]

words = st.lists(st.sampled_from(SECRETS + NOISE * 2), max_size=14).map("".join)


class RecordingGuard:
    def __init__(self) -> None:
        self.findings: list[GuardrailFinding] = []
        self.judged_texts: list[str] = []
        self.stop: GuardrailFinding | None = None

    def record_finding(self, finding: GuardrailFinding) -> None:
        self.findings.append(finding)

    async def judge_reply(self, text: str) -> GuardrailFinding | None:
        self.judged_texts.append(text)
        return self.stop

    def end_with_error_event(self, finding: GuardrailFinding) -> bytes:
        return b"data: blocked %b\n\n" % finding.entry.encode()


def scanner(action: Any = "redact", find: Any = ALL) -> PatternScanner:
    return PatternScanner([PatternRule(name="rule", find=find, action=action)], "RESPONSE")


def split_text(text: str, positions: list[int]) -> list[str]:
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in positions)})
    return [text[a:b] for a, b in itertools.pairwise(at)]


@settings(max_examples=300, deadline=None)
@given(words, st.lists(st.integers(0, 400), max_size=40))
def test_split_text_is_redacted_like_the_whole(text: str, positions: list[int]) -> None:
    assert_redacts_like_whole(text, positions)


@pytest.mark.parametrize("secret", SECRETS)
def test_every_split_position_redacts_like_the_whole(secret: str) -> None:
    for text in (f"It is {secret}, see?", f"no {secret}\nthen", f"12 {secret} 34"):
        for place in range(len(text) + 1):
            assert_redacts_like_whole(text, [place])
            assert_redacts_like_whole(text, [place, place + 1, place + 5])


def assert_redacts_like_whole(text: str, positions: list[int]) -> None:
    whole = scanner()
    expected = redact_text(text, whole.find_matches(text))
    window = TextWindow(whole)
    holders: list[dict[str, str]] = []
    pieces = []
    released = 0
    for part in split_text(text, positions):
        holders.append({"text": part})
        pieces.append(WindowPiece(JsonText(holders[-1], "text", part, ())))
        window.add_piece(pieces[-1])
        window.scan()
        assert window.releasable_end >= released, "released text is final"
        released = window.releasable_end
    window.scan(is_last=True)
    assert window.releasable_end == len(text)
    for piece in pieces:
        piece.apply_redactions()
    assert "".join(holder["text"] for holder in holders) == expected


def chat(text: str, index: int = 0, field: str = "content") -> bytes:
    return sse.encode_data_event(
        {"id": "c", "choices": [{"index": index, "delta": {field: text}, "finish_reason": None}]}
    )


def message(text: str, index: int = 0, kind: str = "text") -> bytes:
    delta = {"type": "text_delta", "text": text} if kind == "text" else {"type": "input_json_delta", kind: text}
    return sse.encode_named_event(
        "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
    )


def response(text: str) -> bytes:
    event = {"type": "response.output_text.delta", "item_id": "i", "output_index": 0, "content_index": 0, "delta": text}
    return sse.encode_named_event("response.output_text.delta", event)


def response_done(text: str) -> bytes:
    event = {"type": "response.output_text.done", "item_id": "i", "output_index": 0, "content_index": 0, "text": text}
    return sse.encode_named_event("response.output_text.done", event)


def gemini(text: str) -> bytes:
    return sse.encode_data_event(
        {"candidates": [{"content": {"parts": [{"text": text}], "role": "model"}, "index": 0}]}
    )


def tool(arguments: str) -> bytes:
    call = {"index": 0, "function": {"arguments": arguments}}
    return sse.encode_data_event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})


EVENTS: dict[str, Any] = {
    "openai-chat": chat,
    "anthropic": message,
    "openai-responses": response,
    "gemini": gemini,
    "thinking": lambda text: chat(text, field="reasoning_content"),
    "tool of openai": tool,
    "tool of anthropic": lambda text: message(text, 1, "partial_json"),
}


def run(chunks: list[bytes], action: Any = "redact", guard: RecordingGuard | None = None, **more: Any) -> list[bytes]:
    stream = Pieces(*chunks)
    guarded = GuardedStream(stream, scanner(action), guard or RecordingGuard(), **more)

    async def read() -> list[bytes]:
        return [chunk async for chunk in guarded]

    return asyncio.run(read())


@pytest.mark.parametrize("dialect", EVENTS)
def test_one_character_per_event(dialect: str) -> None:
    event = EVENTS[dialect]
    text = f"My card is {CARD}, my mail a@example.com."
    sent = b"".join(run([event(c) for c in text]))
    expected = "My card is [payment_card], my mail [email]."
    events = [json.loads(line[6:]) for line in sent.split(b"\n") if line.startswith(b"data: ")]
    assert "".join(event_text(each) for each in events) == expected
    assert len(events) == len(text), "events stay, only their text changes"


def event_text(value: Any) -> str:
    if isinstance(value, dict):
        keys = ("content", "reasoning_content", "text", "arguments", "partial_json", "delta", "choices", "parts")
        inner = [value[key] for key in (*keys, "candidates", "tool_calls", "function") if key in value]
        return "".join(map(event_text, inner))
    return "".join(map(event_text, value)) if isinstance(value, list) else value if isinstance(value, str) else ""


@pytest.mark.parametrize("dialect", EVENTS)
def test_text_without_a_match_passes_unchanged(dialect: str) -> None:
    event = EVENTS[dialect]
    pieces = [
        "Hel",
        "lo, ",
        "call 4111 1111 ",
        "1111 1112",
        " or ",
        "a@b",
        " now",
        ".\n",
        "中文没有空格",
        "也一样",
        "done",
    ]
    chunks = [event(piece) for piece in pieces] + [b": ping\n\n", sse.DONE_EVENT]
    sent = run(chunks)
    assert b"".join(sent) == b"".join(chunks)
    assert len(sent) > 4, "and not only at the end"


@pytest.mark.parametrize("dialect", EVENTS)
def test_block_before_the_first_event_of_the_match(dialect: str) -> None:
    event = EVENTS[dialect]
    guard = RecordingGuard()
    chunks = [event(piece) for piece in ("It is ", "your ", "card: 41", "11 1111 11", "11 1111", ", and ", "more")]
    assert b"".join(run([*chunks, sse.DONE_EVENT], "block", guard)) == chunks[0] + chunks[1] + (
        b"data: blocked payment_card\n\n"
    )
    assert [finding.entry for finding in guard.findings] == ["payment_card"]


def test_block_closes_the_provider_stream() -> None:
    stream = Pieces(chat(f"{CARD} "), chat("x"))
    guarded = GuardedStream(stream, scanner("block"), RecordingGuard())
    assert asyncio.run(anext(guarded)) == b"data: blocked payment_card\n\n"
    assert stream.closed


def test_flagged_text_passes_and_is_recorded() -> None:
    guard = RecordingGuard()
    chunks = [chat("mail a@exam"), chat("ple.com"), sse.DONE_EVENT]
    assert b"".join(run(chunks, "flag", guard)) == b"".join(chunks)
    assert list(map(str, guard.findings)) == ["response:email:flag"]


def test_choices_are_scanned_separately() -> None:
    """Two choices, each with half a card number at a time, are not joined."""
    halves = [chat("4111 1111 ", 0), chat("4111 1111 ", 1), chat("1111 1111.", 0), chat("1111 1112.", 1)]
    events = [json.loads(part[6:]) for part in b"".join(run(halves)).strip().split(b"\n\n")]
    texts = {0: "", 1: ""}
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    assert texts == {0: "[payment_card].", 1: "4111 1111 1111 1112."}


def response_part(text: str, part: int, kind: str = "delta") -> bytes:
    field = "delta" if kind == "delta" else "text"
    event = {"type": f"response.output_text.{kind}", "output_index": 0, "content_index": part, field: text}
    return sse.encode_named_event(event["type"], event)


def response_completed(*parts: str) -> bytes:
    content = [{"type": "output_text", "text": text} for text in parts]
    event = {"type": "response.completed", "response": {"output": [{"type": "message", "content": content}]}}
    return sse.encode_named_event("response.completed", event)


def gemini_parts(*parts: str) -> bytes:
    return sse.encode_data_event(
        {"candidates": [{"content": {"parts": [{"text": text} for text in parts]}, "index": 0}]}
    )


def block_edge(kind: str, index: int) -> bytes:
    edge = {"type": kind, "index": index}
    return sse.encode_named_event(
        kind, {**edge, "content_block": {"type": "text", "text": ""}} if kind.endswith("start") else edge
    )


@pytest.mark.parametrize(("first", "second"), [("4111 1111 ", "1111 1111."), ("41111111", "11111111."),
                                               ("4111 1111", "1111 1111."), ("411", "1111111111111.")])  # fmt: skip
def test_match_across_parts_of_a_message_is_found(first: str, second: str) -> None:
    """As in a whole reply, with or without a line break between the parts."""
    streams = [
        [message(f"It is {first}", 0), block_edge("content_block_stop", 0), block_edge("content_block_start", 1),
         message(second, 1)],
        [response_part(f"It is {first}", 0), response_part(second, 1)],
        [gemini_parts(f"It is {first}", second)],
        [gemini_parts(f"It is {first}"), gemini_parts("", second)],
    ]  # fmt: skip
    for chunks in streams:
        guard = RecordingGuard()
        sent = b"".join(run(chunks, "redact", guard)).decode()
        assert "11" not in sent and sent.count("[payment_card]") == 1, sent
        assert {finding.entry for finding in guard.findings} == {"payment_card"}
        blocked = b"".join(run(chunks, "block"))
        assert b"11" not in blocked and blocked.endswith(b"data: blocked payment_card\n\n")


def test_repeated_parts_are_redacted_too() -> None:
    parts = ("It is 4111 1111 ", "1111 1111.")
    chunks = [response_part(parts[0], 0), response_part(parts[0], 0, "done"), response_part(parts[1], 1)]
    sent = b"".join(run([*chunks, response_part(parts[1], 1, "done"), response_completed(*parts)])).decode()
    events = [json.loads(line[6:]) for line in sent.split("\n") if line.startswith("data: ")]
    assert [each.get("delta") for each in events if "delta" in each] == ["It is [payment_card]", "."]
    assert events[-2]["text"] == "[payment_card]."  # its first half had been released
    texts = [part["text"] for part in events[-1]["response"]["output"][0]["content"]]
    assert texts == ["It is [payment_card]", "."]


def test_parts_without_a_joint_match_pass_unchanged() -> None:
    chunks = [message("In 2024", 0), block_edge("content_block_stop", 0), message("1111 of 4111 1111", 1)]
    assert b"".join(run(chunks)) == b"".join(chunks)


def tool_at(index: int, arguments: str) -> bytes:
    call = {"index": index, "function": {"arguments": arguments}}
    return sse.encode_data_event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})


@pytest.mark.parametrize(
    "event",
    [lambda i, text: tool_at(i, text), lambda i, text: message(text, i, "partial_json")],
    ids=["openai", "anthropic"],
)
def test_interleaved_tool_arguments_never_contain_a_whole_match(event: Any) -> None:
    """They do not delay each other, but the second half of an interrupted match is not sent."""
    chunks = [event(0, '{"card": "4111 1111'), event(1, '{"a": "x'), event(0, ' 1111 1111"}'), event(1, 'y"}')]
    guard = RecordingGuard()
    sent = run(chunks, "redact", guard)
    assert b"".join(sent).startswith(chunks[0])
    assert b"".join(sent).count(b"1111") == 1 and b"[payment_card]" in b"".join(sent)
    assert [finding.entry for finding in guard.findings] == ["payment_card"]
    blocked = b"".join(run(chunks, "block"))
    assert blocked.count(b"1111") == 1 and blocked.endswith(b"data: blocked payment_card\n\n")


def test_held_text_is_bounded() -> None:
    """At most a word of 512 characters or a private key is held back."""
    chunks = [message("9" * 100, 0) for _ in range(30)]
    sent = run(chunks)
    assert b"".join(sent) == b"".join(chunks)
    held = [len(b"".join(chunks[: i + 6])) - len(b"".join(sent[: i + 1])) for i in range(len(sent) - 1)]
    assert len(sent) > 20 and max(held) < 8 * len(chunks[0])


def test_reasoning_does_not_delay_content() -> None:
    chunks = [chat("It was 2024", field="reasoning_content"), chat("Hello "), chat("there ")]
    sent = run(chunks)
    assert sent == [chunks[0] + chunks[1], chunks[2]]


def test_repeated_text_at_the_end_is_redacted_too() -> None:
    text = f"It is {CARD}."
    sent = b"".join(run([response(text[:10]), response(text[10:]), response_done(text)])).decode()
    assert "1111" not in sent and sent.count("[payment_card]") == 2


def test_logprobs_of_redacted_text_are_removed() -> None:
    choice = {"index": 0, "delta": {"content": f"{CARD} "}, "logprobs": {"content": [{"token": "4111"}]}}
    assert b"4111" not in b"".join(run([sse.encode_data_event({"choices": [choice]})]))


def test_reply_too_large_for_a_judge_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberline.gateway.guardrails.stream.MAX_HELD_BYTES", 200)
    guard = RecordingGuard()
    assert run([chat("Hello ")] * 9, "flag", guard, is_judged=True, hold_all=True) == [b"data: blocked unchecked\n\n"]
    assert not guard.judged_texts


@pytest.mark.parametrize("stop", [None, GuardrailFinding("judge", "S1", "RESPONSE", "block")])
def test_blocking_judge_reads_everything_before_release(stop: GuardrailFinding | None) -> None:
    guard = RecordingGuard()
    guard.stop = stop
    chunks = [chat("Hello "), chat("there."), sse.DONE_EVENT]
    sent = run(chunks, "flag", guard, is_judged=True, hold_all=True)
    assert guard.judged_texts == ["Hello there."]
    assert sent == ([b"".join(chunks)] if stop is None else [b"data: blocked S1\n\n"])
