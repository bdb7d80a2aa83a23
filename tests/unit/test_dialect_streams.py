"""Streams translated between all dialects: what they say, how they are made, what breaks them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import goldens
import pytest
from dialect_cases import DIALECTS, PAIRS, REPLIES, STREAMS, chunk, data, named
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.core.errors import Overloaded
from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects import seals
from emberline.gateway.dialects.changes import Changes
from emberline.gateway.dialects.deltas import (
    Cited,
    Counted,
    Delta,
    Ended,
    Finished,
    Opened,
    RefusalPiece,
    Sealed,
    TextPiece,
    ThinkingPiece,
    ToolOpened,
    ToolPiece,
)
from emberline.gateway.dialects.gemini.content import found_seal
from emberline.gateway.dialects.inner import Citation, Spoken
from emberline.gateway.dialects.translate import GRAMMARS, Asked, StreamTranslator, translate_reply
from emberline.gateway.errors import Broken, UpstreamFailed

ASKED = Asked(model="asked", created=1700000000, id="made-1")


def translated(stream: bytes, source: Spoken, target: Spoken, asked: Asked = ASKED) -> bytes:
    translator = StreamTranslator(source, target, asked)
    return translator.push(stream) + translator.end()


def payloads(stream: bytes) -> list[Any]:
    rows = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(row) if row != b"[DONE]" else "[DONE]" for row in rows]


def deltas(stream: bytes, dialect: Spoken) -> list[Delta]:
    """Read again by the dialect's own reader."""
    reader = GRAMMARS[dialect].reader()
    rows = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    return [delta for row in rows for delta in reader.read(row)] + list(reader.end())


def folded(stream: bytes, dialect: Spoken) -> dict[str, Any]:
    """What a stream adds up to, told the same way for all."""
    made: dict[str, Any] = {"text": "", "thinking": "", "refusal": "", "calls": {}, "seal": ""}
    for delta in deltas(stream, dialect):
        match delta.__class__.__name__:
            case "TextPiece":
                made["text"] += delta.text  # type: ignore[union-attr]
            case "ThinkingPiece":
                made["thinking"] += delta.text  # type: ignore[union-attr]
            case "RefusalPiece":
                made["refusal"] += delta.text  # type: ignore[union-attr]
            case "ToolOpened":
                made["calls"][delta.slot] = [delta.id, delta.name, ""]  # type: ignore[union-attr]
            case "ToolPiece":
                made["calls"][delta.slot][2] += delta.text  # type: ignore[union-attr]
            case "Finished":
                made["reason"] = delta.reason  # type: ignore[union-attr]
            case "Counted":
                made["usage"] = delta.usage  # type: ignore[union-attr]
            case "Ended":
                made["ended"] = True
    made["calls"] = [(id, name, json.loads(text)) for id, name, text in made["calls"].values()]
    return made


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_pair_says_the_same(source: Spoken, target: Spoken) -> None:
    got = folded(translated(STREAMS[source], source, target), target)
    assert got["text"] == "Hé!" and got["thinking"] == "Hmm." and got["ended"] and got["reason"] == "tool_calls"
    assert got["calls"] == [("c1", "weather", {"city": "Oslo"}), ("c2", "now", {})]
    usage = got["usage"]
    assert (usage.input, usage.cached_read, usage.output, usage.reasoning) == (30, 10, 20, 5)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_goldens(source: Spoken, target: Spoken) -> None:
    goldens.check(f"dialects/{source}_to_{target}.sse", translated(STREAMS[source], source, target))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_stream_adds_up_to_the_plain_reply(source: Spoken, target: Spoken) -> None:
    plain, _ = translate_reply(json.dumps(REPLIES[source]).encode(), source, target, ASKED)
    answer = GRAMMARS[target].parse_reply(json.loads(plain), Changes(target))
    got = folded(translated(STREAMS[source], source, target), target)
    parts = answer.choices[0].parts
    kinds: dict[str, str] = {"Text": "", "Thinking": ""}
    for part in parts:
        if (kind := type(part).__name__) in kinds:
            kinds[kind] += part.text  # type: ignore[union-attr]
    assert (kinds["Text"], kinds["Thinking"]) == (got["text"], got["thinking"])
    assert answer.choices[0].reason == got["reason"] and answer.usage == got["usage"]
    calls = [(p.id, p.name, json.loads(p.arguments)) for p in parts if type(p).__name__ == "ToolCall"]  # type: ignore[union-attr]
    assert calls == got["calls"]


@given(st.sampled_from(PAIRS), st.data())
@settings(max_examples=60, deadline=None)
def test_any_cut_of_the_bytes_gives_the_same(pair: tuple[Spoken, Spoken], draw: st.DataObject) -> None:
    source, target = pair
    stream = STREAMS[source]
    if draw.draw(st.booleans()):
        stream = stream.replace(b"\n", b"\r\n")
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
    translator = StreamTranslator(source, target, ASKED)
    edges = [0, *cuts, len(stream)]
    made = b"".join(translator.push(stream[a:b]) for a, b in itertools.pairwise(edges)) + translator.end()
    assert made == translated(STREAMS[source], source, target)


pieces = st.one_of(
    st.builds(TextPiece, st.text(min_size=1, max_size=5)),
    st.sampled_from(["think", "call", "refuse", "seal", "cite"]),
)


@given(
    st.lists(pieces, max_size=12), st.sampled_from(["stop", "length", "filter", "pause", "stop_sequence", "context"])
)
@settings(max_examples=80, deadline=None)
def test_writers_keep_their_order(pieces: list[Any], reason: Any) -> None:
    """One beginning, every block closed before the next opens, one end: whatever comes."""
    said: list[Delta] = [Opened("i", "m", 1)]
    slot = 0
    for piece in pieces:
        match piece:
            case "think":
                said.append(ThinkingPiece("t"))
            case "refuse":
                said.append(RefusalPiece("no"))
            case "seal":
                said.append(Sealed("s", "gemini"))
            case "cite":
                begin = sum(len(before.text) for before in said if isinstance(before, TextPiece))
                said += [TextPiece("c"), Cited(Citation("https://x", start=begin, end=begin + 1))]
            case "call":
                said += [ToolOpened(slot, f"c{slot}", "f"), ToolPiece(slot, '{"a":'), ToolPiece(slot, "1}")]
                slot += 1
            case _:
                said.append(piece)
    said += [Finished(reason), Counted(Usage(3, output=2)), Ended()]
    for dialect in DIALECTS:
        writer = GRAMMARS[dialect].writer(ASKED)
        stream = b"".join(writer.push(delta) for delta in said)
        _check_order(dialect, payloads(stream))
        again = folded(stream, dialect)
        assert again["ended"] and len(again["calls"]) == slot
        want = "".join(piece.text for piece in said if isinstance(piece, TextPiece))
        if dialect in ("openai-chat", "openai-responses"):
            assert again["text"] == want
        else:  # which tell refusals as text
            assert again["text"] == "".join(p.text for p in said if isinstance(p, TextPiece | RefusalPiece))


def _check_order(dialect: Spoken, events: list[Any]) -> None:
    if dialect == "openai-chat":
        assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
        finishes = [e for e in events[:-1] if e["choices"] and e["choices"][0]["finish_reason"]]
        assert len(finishes) == 1 and events[-3] == finishes[0] and events[-2]["usage"]
        assert [e["choices"][0]["delta"].get("role") for e in events[:1]] == ["assistant"]
    elif dialect == "anthropic":
        kinds = [event["type"] for event in events]
        assert kinds[0] == "message_start" and kinds.count("message_start") == 1
        assert kinds[-2:] == ["message_delta", "message_stop"] and kinds.count("message_delta") == 1
        opened = None
        for event in events[1:-2]:
            if event["type"] == "content_block_start":
                assert opened is None
                opened = event["index"]
            else:
                assert event["index"] == opened
                if event["type"] == "content_block_stop":
                    opened = None
        assert opened is None
    elif dialect == "openai-responses":
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds.count("response.created") == 1
        assert kinds[-1] in ("response.completed", "response.incomplete")
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == done
    else:
        assert all(event["candidates"][0].get("finishReason") is None for event in events[:-1])
        assert events[-1]["candidates"][0]["finishReason"] and events[-1]["usageMetadata"]["promptTokenCount"] == 3


STOPS = [  # chat, responses, anthropic, gemini: all of one row mean the same
    ("stop", None, "end_turn", "STOP"),
    ("length", "max_output_tokens", "max_tokens", "MAX_TOKENS"),
    ("content_filter", "content_filter", "refusal", "SAFETY"),
]


def ended_so(dialect: Spoken, row: tuple[str, str | None, str, str]) -> bytes:
    chat, responses, anthropic, gemini = row
    if dialect == "openai-chat":
        return data(chunk({"content": "a"}), chunk({}, chat), b"[DONE]")
    if dialect == "anthropic":
        message = {**REPLIES["anthropic"], "content": []}
        return named(
            {"type": "message_start", "message": message},
            {"type": "message_delta", "delta": {"stop_reason": anthropic}, "usage": {"output_tokens": 1}},
            {"type": "message_stop"},
        )
    if dialect == "gemini":
        return data({"candidates": [{"content": {"parts": [{"text": "a"}]}, "finishReason": gemini}]})
    response = {**REPLIES["openai-responses"], "output": [], "status": "incomplete" if responses else "completed"}
    response["incomplete_details"] = {"reason": responses} if responses else None
    kind = f"response.{response['status']}"
    return named({"type": "response.created", "response": response}, {"type": kind, "response": response})


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("row", STOPS)
def test_why_it_ended(source: Spoken, target: Spoken, row: tuple[str, str | None, str, str]) -> None:
    events = payloads(translated(ended_so(source, row), source, target))
    match target:
        case "openai-chat":
            got: Any = [e["choices"][0]["finish_reason"] for e in events if e != "[DONE]" and e["choices"]][-1]
        case "anthropic":
            got = events[-2]["delta"]["stop_reason"]
        case "gemini":
            got = events[-1]["candidates"][0]["finishReason"]
        case "openai-responses":
            details = events[-1]["response"]["incomplete_details"]
            got = details["reason"] if details else None
    assert got == row[DIALECTS.index(target)]


def test_a_stop_sequence_is_told_where_it_is_known() -> None:
    stream = STREAMS["anthropic"].replace(b'"stop_reason": "tool_use", "stop_sequence": null',
                                          b'"stop_reason": "stop_sequence", "stop_sequence": "END"')  # fmt: skip
    again = translated(stream, "anthropic", "anthropic")
    assert payloads(again)[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert folded(translated(stream, "anthropic", "openai-chat"), "openai-chat")["reason"] == "tool_calls"


@pytest.mark.parametrize("target", DIALECTS)
@pytest.mark.parametrize("source", DIALECTS)
def test_a_cut_stream_is_never_whole(source: Spoken, target: Spoken) -> None:
    events = STREAMS[source].split(b"\n\n")[:-1]
    for count in range(len(events)):
        translator = StreamTranslator(source, target, ASKED)
        translator.push(b"\n\n".join(events[:count]) + b"\n\n")
        with pytest.raises(Broken, match="was cut off"):
            translator.end()
        said = translator.fail(Broken("the provider left"))
        assert b"the provider left" in said and not translator.ended


@pytest.mark.parametrize("source", DIALECTS)
@pytest.mark.parametrize(
    "bad", [b'{"choices": [', b"[]", b"\xff", b'"text"', b'{"type": 5, "candidates": 3, "choices": 3}']
)
def test_what_is_no_event_breaks(source: Spoken, bad: bytes) -> None:
    translator = StreamTranslator(source, "anthropic", ASKED)
    before = translator.push(b"\n\n".join(STREAMS[source].split(b"\n\n")[:3]) + b"\n\n")
    good = STREAMS[source].split(b"\n\n")[3] + b"\n\n"
    before += translator.push(good)
    with pytest.raises(Broken):
        translator.push(good + b"data: " + bad + b"\n\n" + good)
    after = translator.fail(Broken("x"))
    assert after.count(b"event: error") == 1 and b"message_stop" not in before + after


ERRORS: dict[Spoken, Any] = {
    "openai-chat": {"error": {"message": "too many", "type": "rate_limit_error", "code": "rate_limit_exceeded"}},
    "openai-responses": {
        "type": "response.failed",
        "response": {"error": {"code": "rate_limit_exceeded", "message": "too many"}},
    },
    "anthropic": {"type": "error", "error": {"type": "rate_limit_error", "message": "too many"}},
    "gemini": {"error": {"code": 429, "message": "too many", "status": "RESOURCE_EXHAUSTED"}},
}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_an_error_inside_a_stream(source: Spoken, target: Spoken) -> None:
    translator = StreamTranslator(source, target, ASKED)
    translator.push(STREAMS[source].split(b"\n\n")[0] + b"\n\n")
    with pytest.raises(UpstreamFailed, match="too many") as raised:
        translator.push(data(ERRORS[source]))
    assert raised.value.status == 429
    told = payloads(translator.fail(raised.value))
    match target:
        case "openai-chat":
            assert told[0]["error"]["type"] == "rate_limit_error" and told[1] == "[DONE]"
        case "openai-responses":
            assert told[0]["response"]["error"] == {"code": "rate_limit_exceeded", "message": "too many"}
            assert told[0]["type"] == "response.failed" and told[0]["response"]["status"] == "failed"
        case "anthropic":
            assert told == [{"type": "error", "error": {"type": "rate_limit_error", "message": "too many"}}]
        case "gemini":
            assert told == [{"error": {"code": 429, "message": "too many", "status": "RESOURCE_EXHAUSTED"}}]


@pytest.mark.parametrize("target", DIALECTS)
def test_failing_before_anything_was_said(target: Spoken) -> None:
    said = payloads(StreamTranslator("openai-chat", target, ASKED).fail(Overloaded("full")))
    assert "full" in json.dumps(said)


@pytest.mark.parametrize("source", DIALECTS)
def test_a_seal_comes_back_to_its_family(source: Spoken) -> None:
    """Through a client of every other dialect that keeps what it got, a signature finds its way home."""
    if source == "openai-chat":
        return  # which has none
    stream = STREAMS[source]
    if source == "openai-responses":
        stream = stream.replace(b'"summary": []}}', b'"summary": [], "encrypted_content": "c2lnbmVk"}}')
    for target in DIALECTS:
        if target == source or (target == "openai-chat" and source != "gemini"):
            continue
        events = payloads(translated(stream, source, target))
        text = json.dumps(events)
        match target:
            case "anthropic":
                seal = next(e["delta"]["signature"] for e in events if "signature" in e.get("delta", {}))
                assert seals.found(seal, target) == ("c2lnbmVk", source)
            case "openai-responses":
                items = events[-1]["response"]["output"]
                seal = next(item["encrypted_content"] for item in items if item.get("encrypted_content"))
                assert seals.found(seal, target) == ("c2lnbmVk", source)
            case "gemini":
                parts = [part for e in events for part in e["candidates"][0]["content"]["parts"]]
                seal = next(part["thoughtSignature"] for part in parts if "thoughtSignature" in part)
                assert found_seal(seal) == ("c2lnbmVk", source)
            case "openai-chat":
                assert '"extra_content": {"google": {"thought_signature": "c2lnbmVk"}}' in text


def test_several_answers_between_chat_and_gemini() -> None:
    rows = [{"index": at, "delta": {"content": text}} for at, text in enumerate("ab")]
    ends = [{"index": at, "delta": {}, "finish_reason": "stop"} for at in range(2)]
    stream = data(chunk({}) | {"choices": rows}, chunk({}) | {"choices": ends}, b"[DONE]")
    made = translated(stream, "openai-chat", "gemini")
    last = payloads(made)[-1]["candidates"]
    assert [(row["index"], row["finishReason"]) for row in last] == [(0, "STOP"), (1, "STOP")]
    assert [d.choice for d in deltas(made, "gemini") if isinstance(d, TextPiece)] == [0, 1]


def test_calls_that_all_have_the_index_0() -> None:
    calls = [{"index": 0, "id": id, "function": {"name": "f", "arguments": "{}"}} for id in ("x", "y")]
    stream = data(chunk({"tool_calls": calls[:1]}), chunk({"tool_calls": calls[1:]}), chunk({}, "stop"), b"[DONE]")
    got = folded(translated(stream, "openai-chat", "anthropic"), "anthropic")
    assert got["calls"] == [("x", "f", {}), ("y", "f", {})] and got["reason"] == "tool_calls"


@pytest.mark.parametrize("target", DIALECTS)
def test_nothing_follows_the_finish(target: Spoken) -> None:
    stream = data(chunk({"content": "a"}), chunk({}, "stop"), chunk({"content": "b"}), b"[DONE]")
    with pytest.raises(Broken, match="after its finish reason"):
        StreamTranslator("openai-chat", target, ASKED).push(stream)


def test_mixed_calls_break() -> None:
    mixed = [(0, "a", "f"), (1, "b", "f"), (0, None, None)]
    rows = [{"index": at, "id": id, "function": {"name": name, "arguments": "{"}} for at, id, name in mixed]
    stream = data(*(chunk({"tool_calls": [row]}) for row in rows))
    for target in ("anthropic", "openai-responses"):
        with pytest.raises(Broken, match="interleaves"):
            StreamTranslator("openai-chat", target, ASKED).push(stream)  # type: ignore[arg-type]


def test_parts_of_a_summary_stand_apart() -> None:
    kind = "response.reasoning_summary_text.delta"
    second = {"type": kind, "output_index": 0, "summary_index": 1, "delta": "So."}
    done = b"event: response.output_item.done"
    stream = STREAMS["openai-responses"].replace(done, named(second) + done, 1)
    assert folded(translated(stream, "openai-responses", "anthropic"), "anthropic")["thinking"] == "Hmm.\n\nSo."


def test_a_refused_prompt_of_gemini() -> None:
    stream = data({"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, "usageMetadata": {"promptTokenCount": 4}})
    got = folded(translated(stream, "gemini", "openai-chat"), "openai-chat")
    assert got["reason"] == "filter" and "PROHIBITED_CONTENT" in got["refusal"]


def test_a_call_gemini_could_not_write() -> None:
    stream = data({"candidates": [{"content": {}, "finishReason": "MALFORMED_FUNCTION_CALL"}]})
    with pytest.raises(Broken, match="MALFORMED_FUNCTION_CALL"):
        StreamTranslator("gemini", "openai-chat", ASKED).push(stream)


def test_usage_only_when_asked() -> None:
    silent = Asked(include_usage=False)
    assert b"usage" not in translated(STREAMS["anthropic"], "anthropic", "openai-chat", silent)


@given(st.sampled_from(DIALECTS), st.data())
@settings(max_examples=150, deadline=None)
def test_any_disorder_is_translated_or_broken(source: Spoken, draw: st.DataObject) -> None:
    """Events doubled, lost, swapped, or with anything in them: no other fault than a provider's."""
    events = STREAMS[source].split(b"\n\n")[:-1]
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(events) - 1))
        match draw.draw(st.sampled_from(["double", "lose", "swap", "spoil"])):
            case "double":
                events.insert(draw.draw(st.integers(0, len(events))), events[at])
            case "lose" if len(events) > 1:
                del events[at]
            case "swap":
                other = draw.draw(st.integers(0, len(events) - 1))
                events[at], events[other] = events[other], events[at]
            case "spoil":
                events[at] = _spoiled(events[at], draw)
    for target in DIALECTS:
        translator = StreamTranslator(source, target, ASKED)
        try:
            translator.push(b"\n\n".join(events) + b"\n\n")
            translator.end()
            assert translator.ended
        except UpstreamFailed as error:
            assert translator.fail(error) and not translator.ended


def _spoiled(event: bytes, draw: st.DataObject) -> bytes:
    head, mark, payload = event.partition(b"data: ")
    if payload == b"[DONE]":
        return event
    value = place = json.loads(payload)
    while True:
        rows = list(place) if isinstance(place, dict) else list(range(len(place)))
        name = draw.draw(st.sampled_from(rows))
        if isinstance(place[name], dict | list) and place[name] and draw.draw(st.booleans()):
            place = place[name]
            continue
        place[name] = draw.draw(st.sampled_from([None, True, 5, -1, 1.5, "", "x", [], [1], [{}], {}, {"a": 1}]))
        return head + mark + json.dumps(value).encode()
