"""Translation of streams between all wire formats: content, event order and errors."""

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
from emberline.gateway.core.errors import UpstreamBroken, UpstreamFailed
from emberline.gateway.dialects.canonical import ReasoningContent, TextContent, ToolCallContent
from emberline.gateway.dialects.change_report import ChangeReport
from emberline.gateway.dialects.gemini.content import decode_gemini_signature
from emberline.gateway.dialects.translate import CODECS, ReplyContext, StreamTranslator, translate_reply
from emberline.wire import deltas, signatures
from emberline.wire.deltas import ChatDialect
from emberline.wire.usage import Usage

CONTEXT = ReplyContext(model="asked", created=1700000000, id="made-1")


def translate_stream(stream: bytes, source: ChatDialect, target: ChatDialect, context: ReplyContext = CONTEXT) -> bytes:
    translator = StreamTranslator(source, target, context)
    return translator.push(stream) + translator.end()


@pytest.mark.parametrize("line_end", [b"\r", b"\r\n"])
def test_lines_may_end_with_cr(line_end: bytes) -> None:
    pairs: list[tuple[ChatDialect, ChatDialect]] = [("openai-chat", "anthropic"), ("anthropic", "openai-chat")]
    for source, target in pairs:
        stream = STREAMS[source]
        assert translate_stream(stream.replace(b"\n", line_end), source, target) == translate_stream(
            stream, source, target
        )


def payloads(stream: bytes) -> list[Any]:
    rows = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(row) if row != b"[DONE]" else "[DONE]" for row in rows]


def read_deltas(stream: bytes, dialect: ChatDialect) -> list[deltas.Delta]:
    """Parse a stream with the event reader of its own wire format."""
    reader = CODECS[dialect].make_reader()
    rows = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    return [delta for row in rows for delta in reader.read(row)] + list(reader.end())


def fold(stream: bytes, dialect: ChatDialect) -> dict[str, Any]:
    """Return the whole content of a stream, in the same form for all wire formats."""
    content: dict[str, Any] = {"text": "", "thinking": "", "refusal": "", "calls": {}}
    for delta in read_deltas(stream, dialect):
        match delta:
            case deltas.TextDelta():
                content["text"] += delta.text
            case deltas.ReasoningDelta():
                content["thinking"] += delta.text
            case deltas.RefusalDelta():
                content["refusal"] += delta.text
            case deltas.ToolCallStart():
                content["calls"][delta.slot] = [delta.id, delta.name, ""]
            case deltas.ToolCallArguments():
                content["calls"][delta.slot][2] += delta.text
            case deltas.Finish():
                content["reason"] = delta.reason
            case deltas.UsageUpdate():
                content["usage"] = delta.usage
            case deltas.StreamEnd():
                content["ended"] = True
    content["calls"] = [(id, name, json.loads(text)) for id, name, text in content["calls"].values()]
    return content


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_translation_keeps_content(source: ChatDialect, target: ChatDialect) -> None:
    got = fold(translate_stream(STREAMS[source], source, target), target)
    assert got["text"] == "Hé!" and got["thinking"] == "Hmm." and got["ended"] and got["reason"] == "tool_calls"
    assert got["calls"] == [("c1", "weather", {"city": "Oslo"}), ("c2", "now", {})]
    usage = got["usage"]
    assert (usage.input, usage.cached_read, usage.output, usage.reasoning) == (30, 10, 20, 5)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_translated_streams_match_goldens(source: ChatDialect, target: ChatDialect) -> None:
    goldens.check(f"dialects/{source}_to_{target}.sse", translate_stream(STREAMS[source], source, target))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_stream_equals_unstreamed_reply(source: ChatDialect, target: ChatDialect) -> None:
    plain, _ = translate_reply(json.dumps(REPLIES[source]).encode(), source, target, CONTEXT)
    answer = CODECS[target].parse_reply(json.loads(plain), ChangeReport(target))
    got = fold(translate_stream(STREAMS[source], source, target), target)
    parts = answer.choices[0].parts
    text = "".join(part.text for part in parts if isinstance(part, TextContent))
    thinking = "".join(part.text for part in parts if isinstance(part, ReasoningContent))
    assert (text, thinking) == (got["text"], got["thinking"])
    assert answer.choices[0].finish_reason == got["reason"] and answer.usage == got["usage"]
    calls = [(part.id, part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCallContent)]
    assert calls == got["calls"]


@given(st.sampled_from(PAIRS), st.data())
@settings(max_examples=60, deadline=None)
def test_output_is_independent_of_chunk_boundaries(pair: tuple[ChatDialect, ChatDialect], draw: st.DataObject) -> None:
    source, target = pair
    stream = STREAMS[source]
    if draw.draw(st.booleans()):
        stream = stream.replace(b"\n", b"\r\n")
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
    translator = StreamTranslator(source, target, CONTEXT)
    edges = [0, *cuts, len(stream)]
    output = b"".join(translator.push(stream[a:b]) for a, b in itertools.pairwise(edges)) + translator.end()
    assert output == translate_stream(STREAMS[source], source, target)


pieces = st.one_of(
    st.builds(deltas.TextDelta, st.text(min_size=1, max_size=5)),
    st.sampled_from(["think", "call", "refuse", "seal", "cite"]),
)


@given(
    st.lists(pieces, max_size=12), st.sampled_from(["stop", "length", "filter", "pause", "stop_sequence", "context"])
)
@settings(max_examples=80, deadline=None)
def test_writers_keep_event_order(pieces: list[Any], reason: Any) -> None:
    """Any sequence of deltas gives one start, blocks that close before the next opens, and one end."""
    sequence: list[deltas.Delta] = [deltas.StreamStart("i", "m", 1)]
    slot = 0
    for piece in pieces:
        match piece:
            case "think":
                sequence.append(deltas.ReasoningDelta("t"))
            case "refuse":
                sequence.append(deltas.RefusalDelta("no"))
            case "seal":
                sequence.append(deltas.SignatureDelta("s", "gemini"))
            case "cite":
                begin = sum(len(before.text) for before in sequence if isinstance(before, deltas.TextDelta))
                sequence += [
                    deltas.TextDelta("c"),
                    deltas.CitationDelta(deltas.Citation("https://x", start=begin, end=begin + 1)),
                ]
            case "call":
                sequence += [
                    deltas.ToolCallStart(slot, f"c{slot}", "f"),
                    deltas.ToolCallArguments(slot, '{"a":'),
                    deltas.ToolCallArguments(slot, "1}"),
                ]
                slot += 1
            case _:
                sequence.append(piece)
    sequence += [deltas.Finish(reason), deltas.UsageUpdate(Usage(3, output=2)), deltas.StreamEnd()]
    for dialect in DIALECTS:
        writer = CODECS[dialect].make_writer(CONTEXT)
        stream = b"".join(writer.write(delta) for delta in sequence)
        _check_order(dialect, payloads(stream))
        again = fold(stream, dialect)
        assert again["ended"] and len(again["calls"]) == slot
        want = "".join(piece.text for piece in sequence if isinstance(piece, deltas.TextDelta))
        if dialect in ("openai-chat", "openai-responses"):
            assert again["text"] == want
        else:  # these formats have refusals as text
            assert again["text"] == "".join(
                p.text for p in sequence if isinstance(p, deltas.TextDelta | deltas.RefusalDelta)
            )


def _check_order(dialect: ChatDialect, events: list[Any]) -> None:
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


STOPS = [  # equivalent reasons in chat, Responses, Anthropic, Gemini
    ("stop", None, "end_turn", "STOP"),
    ("length", "max_output_tokens", "max_tokens", "MAX_TOKENS"),
    ("content_filter", "content_filter", "refusal", "SAFETY"),
]


def stream_ending_with(dialect: ChatDialect, row: tuple[str, str | None, str, str]) -> bytes:
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
def test_finish_reasons(source: ChatDialect, target: ChatDialect, row: tuple[str, str | None, str, str]) -> None:
    events = payloads(translate_stream(stream_ending_with(source, row), source, target))
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


def test_stop_sequence_is_kept() -> None:
    stream = STREAMS["anthropic"].replace(b'"stop_reason": "tool_use", "stop_sequence": null',
                                          b'"stop_reason": "stop_sequence", "stop_sequence": "END"')  # fmt: skip
    again = translate_stream(stream, "anthropic", "anthropic")
    assert payloads(again)[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert fold(translate_stream(stream, "anthropic", "openai-chat"), "openai-chat")["reason"] == "tool_calls"


@pytest.mark.parametrize("target", DIALECTS)
@pytest.mark.parametrize("source", DIALECTS)
def test_cut_stream_is_never_complete(source: ChatDialect, target: ChatDialect) -> None:
    events = STREAMS[source].split(b"\n\n")[:-1]
    for count in range(len(events)):
        translator = StreamTranslator(source, target, CONTEXT)
        translator.push(b"\n\n".join(events[:count]) + b"\n\n")
        with pytest.raises(UpstreamBroken, match="was cut off"):
            translator.end()
        output = translator.write_error(UpstreamBroken("the provider left"))
        assert b"the provider left" in output and not translator.has_ended


@pytest.mark.parametrize("source", DIALECTS)
@pytest.mark.parametrize(
    "bad", [b'{"choices": [', b"[]", b"\xff", b'"text"', b'{"type": 5, "candidates": 3, "choices": 3}']
)
def test_malformed_event_raises(source: ChatDialect, bad: bytes) -> None:
    translator = StreamTranslator(source, "anthropic", CONTEXT)
    before = translator.push(b"\n\n".join(STREAMS[source].split(b"\n\n")[:3]) + b"\n\n")
    good = STREAMS[source].split(b"\n\n")[3] + b"\n\n"
    before += translator.push(good)
    with pytest.raises(UpstreamBroken):
        translator.push(good + b"data: " + bad + b"\n\n" + good)
    after = translator.write_error(UpstreamBroken("x"))
    assert after.count(b"event: error") == 1 and b"message_stop" not in before + after


ERRORS: dict[ChatDialect, Any] = {
    "openai-chat": {"error": {"message": "too many", "type": "rate_limit_error", "code": "rate_limit_exceeded"}},
    "openai-responses": {
        "type": "response.failed",
        "response": {"error": {"code": "rate_limit_exceeded", "message": "too many"}},
    },
    "anthropic": {"type": "error", "error": {"type": "rate_limit_error", "message": "too many"}},
    "gemini": {"error": {"code": 429, "message": "too many", "status": "RESOURCE_EXHAUSTED"}},
}


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_error_event_within_stream(source: ChatDialect, target: ChatDialect) -> None:
    translator = StreamTranslator(source, target, CONTEXT)
    translator.push(STREAMS[source].split(b"\n\n")[0] + b"\n\n")
    with pytest.raises(UpstreamFailed, match="too many") as raised:
        translator.push(data(ERRORS[source]))
    assert raised.value.status == 429
    events = payloads(translator.write_error(raised.value))
    match target:
        case "openai-chat":
            assert events[0]["error"]["type"] == "rate_limit_error" and events[1] == "[DONE]"
        case "openai-responses":
            assert events[0]["response"]["error"] == {"code": "rate_limit_exceeded", "message": "too many"}
            assert events[0]["type"] == "response.failed" and events[0]["response"]["status"] == "failed"
        case "anthropic":
            assert events == [{"type": "error", "error": {"type": "rate_limit_error", "message": "too many"}}]
        case "gemini":
            assert events == [{"error": {"code": 429, "message": "too many", "status": "RESOURCE_EXHAUSTED"}}]


@pytest.mark.parametrize("target", DIALECTS)
def test_error_before_any_content(target: ChatDialect) -> None:
    output = payloads(StreamTranslator("openai-chat", target, CONTEXT).write_error(Overloaded("full")))
    assert "full" in json.dumps(output)


@pytest.mark.parametrize("source", DIALECTS)
def test_stream_signature_returns_to_its_origin(source: ChatDialect) -> None:
    """A signature that a client in another wire format returns unchanged is recognised as its origin's."""
    if source == "openai-chat":
        return  # chat has no signatures
    stream = STREAMS[source]
    if source == "openai-responses":
        stream = stream.replace(b'"summary": []}}', b'"summary": [], "encrypted_content": "c2lnbmVk"}}')
    for target in DIALECTS:
        if target == source or (target == "openai-chat" and source != "gemini"):
            continue
        events = payloads(translate_stream(stream, source, target))
        text = json.dumps(events)
        match target:
            case "anthropic":
                seal = next(e["delta"]["signature"] for e in events if "signature" in e.get("delta", {}))
                assert signatures.decode_signature(seal, target) == ("c2lnbmVk", source)
            case "openai-responses":
                items = events[-1]["response"]["output"]
                seal = next(item["encrypted_content"] for item in items if item.get("encrypted_content"))
                assert signatures.decode_signature(seal, target) == ("c2lnbmVk", source)
            case "gemini":
                parts = [part for e in events for part in e["candidates"][0]["content"]["parts"]]
                seal = next(part["thoughtSignature"] for part in parts if "thoughtSignature" in part)
                assert decode_gemini_signature(seal) == ("c2lnbmVk", source)
            case "openai-chat":
                assert '"extra_content": {"google": {"thought_signature": "c2lnbmVk"}}' in text


def test_several_choices_between_chat_and_gemini() -> None:
    rows = [{"index": at, "delta": {"content": text}} for at, text in enumerate("ab")]
    ends = [{"index": at, "delta": {}, "finish_reason": "stop"} for at in range(2)]
    stream = data(chunk({}) | {"choices": rows}, chunk({}) | {"choices": ends}, b"[DONE]")
    output = translate_stream(stream, "openai-chat", "gemini")
    last = payloads(output)[-1]["candidates"]
    assert [(row["index"], row["finishReason"]) for row in last] == [(0, "STOP"), (1, "STOP")]
    assert [d.choice for d in read_deltas(output, "gemini") if isinstance(d, deltas.TextDelta)] == [0, 1]


def test_tool_calls_that_all_have_index_0() -> None:
    calls = [{"index": 0, "id": id, "function": {"name": "f", "arguments": "{}"}} for id in ("x", "y")]
    stream = data(chunk({"tool_calls": calls[:1]}), chunk({"tool_calls": calls[1:]}), chunk({}, "stop"), b"[DONE]")
    got = fold(translate_stream(stream, "openai-chat", "anthropic"), "anthropic")
    assert got["calls"] == [("x", "f", {}), ("y", "f", {})] and got["reason"] == "tool_calls"


@pytest.mark.parametrize("target", DIALECTS)
def test_content_after_finish_raises(target: ChatDialect) -> None:
    stream = data(chunk({"content": "a"}), chunk({}, "stop"), chunk({"content": "b"}), b"[DONE]")
    with pytest.raises(UpstreamBroken, match="after its finish reason"):
        StreamTranslator("openai-chat", target, CONTEXT).push(stream)


def test_interleaved_tool_calls_raise() -> None:
    mixed = [(0, "a", "f"), (1, "b", "f"), (0, None, None)]
    rows = [{"index": at, "id": id, "function": {"name": name, "arguments": "{"}} for at, id, name in mixed]
    stream = data(*(chunk({"tool_calls": [row]}) for row in rows))
    for target in ("anthropic", "openai-responses"):
        with pytest.raises(UpstreamBroken, match="interleaves"):
            StreamTranslator("openai-chat", target, CONTEXT).push(stream)  # type: ignore[arg-type]


def test_reasoning_summary_parts_are_separated() -> None:
    kind = "response.reasoning_summary_text.delta"
    second = {"type": kind, "output_index": 0, "summary_index": 1, "delta": "So."}
    done = b"event: response.output_item.done"
    stream = STREAMS["openai-responses"].replace(done, named(second) + done, 1)
    assert fold(translate_stream(stream, "openai-responses", "anthropic"), "anthropic")["thinking"] == "Hmm.\n\nSo."


def test_prompt_blocked_by_gemini() -> None:
    stream = data({"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, "usageMetadata": {"promptTokenCount": 4}})
    got = fold(translate_stream(stream, "gemini", "openai-chat"), "openai-chat")
    assert got["reason"] == "filter" and "PROHIBITED_CONTENT" in got["refusal"]


def test_malformed_gemini_function_call_raises() -> None:
    stream = data({"candidates": [{"content": {}, "finishReason": "MALFORMED_FUNCTION_CALL"}]})
    with pytest.raises(UpstreamBroken, match="MALFORMED_FUNCTION_CALL"):
        StreamTranslator("gemini", "openai-chat", CONTEXT).push(stream)


def test_usage_only_if_requested() -> None:
    silent = ReplyContext(include_usage=False)
    assert b"usage" not in translate_stream(STREAMS["anthropic"], "anthropic", "openai-chat", silent)


@given(st.sampled_from(DIALECTS), st.data())
@settings(max_examples=150, deadline=None)
def test_corrupted_stream_is_translated_or_raises(source: ChatDialect, draw: st.DataObject) -> None:
    """Duplicated, lost, swapped or corrupted events raise nothing but UpstreamFailed."""
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
                events[at] = _corrupt(events[at], draw)
    for target in DIALECTS:
        translator = StreamTranslator(source, target, CONTEXT)
        try:
            translator.push(b"\n\n".join(events) + b"\n\n")
            translator.end()
            assert translator.has_ended
        except UpstreamFailed as error:
            assert translator.write_error(error) and not translator.has_ended


def _corrupt(event: bytes, draw: st.DataObject) -> bytes:
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
