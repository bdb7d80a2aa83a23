"""Which steps of a large request run in a child process, or in pieces between which the event loop runs.

`used` counts the calls to children; nothing is timed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from gateway_calls import call

from emberline.core.clock import ManualClock
from emberline.core.errors import InvalidRequest, WorkTooLarge
from emberline.core.offload import HUGE, LARGE, NICENESS, Child, offload
from emberline.core.weight import check_weight
from emberline.gateway import body as bodies
from emberline.gateway.call import Reply
from emberline.gateway.dialects.translate import StreamTranslator
from emberline.gateway.guardrails.finding import Finding
from emberline.gateway.guardrails.policy import PatternRule
from emberline.gateway.guardrails.scanner import Scanner
from emberline.gateway.guardrails.stream import GuardedStream
from emberline.gateway.guardrails.texts import Text
from emberline.gateway.guardrails.window import AT_ONCE, Piece, Window
from emberline.gateway.layers.balanced import _seed
from emberline.gateway.layers.continued import _continuable
from emberline.gateway.layers.routed import at_step
from emberline.gateway.options import Options
from emberline.gateway.providers.cohere_reply import Chatted
from emberline.gateway.providers.registry import Registry
from emberline.gateway.routes.facts import CallFacts, answers_about_body
from emberline.gateway.routes.graph import Graph
from emberline.gateway.routes.universal import read_steps
from emberline.gateway.routes.walk import Plan, Walk
from emberline.gateway.run.answer import answered
from emberline.gateway.run.question import WrittenQuestion
from emberline.gateway.run.runs import read_batch, read_native, read_outline, read_question
from emberline.gateway.settings import Settings
from emberline.gateway.streams import splitter
from emberline.gateway.streams.meter import Meter, RawMeter
from emberline.gateway.streams.passage import Passage
from emberline.gateway.survey import survey
from emberline.gateway.upstream.decoder import Decoded, Given
from emberline.router.call import Call as RouterCall
from emberline.router.native import Native
from emberline.router.vllm import VLLM
from emberline.server.gateway.gateway_socket import GatewaySocket, read_message, shown_message
from emberline.server.routing.trip import Trip
from emberline.server.worker.cluster_calls import open_envelope
from emberline.server.worker.protocol import parse_large, parse_light
from emberline.server.worker.response_store import ResponseStore
from emberline.server.worker.stored_responses import StoredResponses

TEXT = "word " * (LARGE // 4)
HUGE_TEXT = "word " * (HUGE // 4)


def chat(content: str = TEXT, model: str = "openai/gpt-4o-mini", **more: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **more}).encode()


@pytest.fixture
def used() -> Iterator[Any]:
    before = offload.large.calls + offload.huge.calls
    yield lambda: offload.large.calls + offload.huge.calls - before


# -- the child ---------------------------------------------------------------------------------------------------------


def test_child_runs_at_a_lower_priority() -> None:
    child = Child("test")
    try:
        there = asyncio.run(child.run(os.getpriority, os.PRIO_PROCESS, 0))
        assert there == min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)
        if hasattr(os, "SCHED_BATCH"):
            assert asyncio.run(child.run(os.sched_getscheduler, 0)) == os.SCHED_BATCH
    finally:
        child.close()


# -- duplicate keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"model":"a","model":"b"}', "model"),
        ('{"model":"a","messages":[{"role":"user","role":"system","content":"x"}]}', "role"),
        ('{"model":"a","tools":[{"function":{"name":"f","parameters":{"type":"object","type":"string"}}}]}', "type"),
        ('{"model":"a","response_format":{"json_schema":{"schema":{"a":1,"\\u0061":2}}}}', "a"),
        ('{"model":"a","user":"\\u0022","metadata":{"k":1,"k":2}}', "k"),
    ],
)
def test_duplicate_json_key_is_rejected_at_every_level(body: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the key '{name}' twice") as caught:
        bodies.peek(body.encode())
    assert caught.value.param == name
    assert survey(body.encode()).seen is None


@pytest.mark.parametrize(
    "body",
    [
        '{"model":"a","messages":[{"role":"user","content":"{\\"a\\":1,\\"a\\":2}"},{"role":"user","content":"\\u0022"}]}',
        '{"model":"a","user":"\\u00e9\\/\\"","n":1e3,"x":[{"a":1},{"a":1}]}',
    ],
)
def test_equal_keys_of_different_objects_are_allowed(body: str) -> None:
    assert bodies.peek(body.encode()).model == "a"


def test_invalid_text_and_long_numbers_do_not_hide_a_duplicate() -> None:
    odd = b'"user":"\xff \\u0022","x":' + b"1" * 5000
    assert bodies.peek(b'{"model":"a",%b}' % odd).model == "a", "the provider may reject them"
    with pytest.raises(InvalidRequest, match="the key 'k' twice"):
        bodies.peek(b'{"model":"a",%b,"metadata":{"k":1,"k":2}}' % odd)


# -- the gateway -------------------------------------------------------------------------------------------------------


def test_large_list_of_steps_is_read_in_a_child(used: Any) -> None:
    query = chat(model="gpt-4o-mini")
    step = {"provider": "openai", "endpoint": "chat/completions", "query": msgspec.Raw(query)}
    (made,) = asyncio.run(read_steps(msgspec.json.encode([step]), Options(), Settings(), Registry()))
    assert used() == 1
    assert made.body == query and made.surveyed == survey(query)
    moved = at_step(call(b"[]"), made, 0, True)
    assert moved.surveyed is made.surveyed and moved.seen is made.seen, "no layer reads the body again"
    (small,) = asyncio.run(read_steps(msgspec.json.encode([{**step, "query": {"model": "m"}}]), Options(), Settings(),
                                      Registry()))  # fmt: skip
    assert used() == 1 and small.model == "m" and small.surveyed is None


def test_step_headers_are_bounded() -> None:
    step = {"provider": "openai", "endpoint": "x", "query": {}, "headers": {str(i): "x" * 100 for i in range(1000)}}
    with pytest.raises(InvalidRequest, match="headers and config"):
        asyncio.run(read_steps(msgspec.json.encode([step]), Options(), Settings(), Registry()))


CONDITION = {"$and": [{"body.messages.0.content": {"$regex": "needle"}}, {"model": "m"}]}
ROUTE = [
    {"id": "s", "type": "start", "outputs": {"next": {"elementId": "c"}}},
    {"id": "c", "type": "conditional", "properties": {"condition": CONDITION},
     "outputs": {"true": {"elementId": "a"}, "false": {"elementId": "b"}}},
    *({"id": name, "type": "model", "properties": {"provider": "p", "model": name},
       "outputs": {"success": {"elementId": "e"}}} for name in "ab"),
    {"id": "e", "type": "end"},
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), [(f"needle {TEXT}", "a"), (TEXT, "b")])
def test_conditions_on_a_large_body_run_in_a_child(used: Any, text: str, expected: str) -> None:
    asked = call(chat(text), model="m")
    plan = Plan.of("r", Graph.read({"elements": ROUTE}))
    answers = asyncio.run(answers_about_body(asked, plan.conditions))
    assert used() == 1 and answers == {"c": expected == "a"}
    unread = CallFacts(asked.moved(body=b"not read again"))
    chosen = Walk.begin(plan, unread, "seed", answers).next()
    assert chosen is not None and chosen.id == expected
    assert asyncio.run(answers_about_body(call(chat("small")), plan.conditions)) == {} and used() == 1
    assert asyncio.run(answers_about_body(asked, {"c": {"metadata.team": "core"}})) == {} and used() == 1


def test_large_conversation_is_read_in_a_child(used: Any) -> None:
    found = asyncio.run(_continuable(call(chat(stream=True)), "openai-chat"))
    assert used() == 1 and found is not None and found.messages == []
    assert asyncio.run(_continuable(call(chat(n=2)), "openai-chat")) is None


def test_pool_does_not_hash_a_large_body_again() -> None:
    asked = call(chat(), settings={"cache_ttl": 60})
    asked.surveyed = survey(asked.body)
    assert _seed(asked) == _seed(asked.moved(body=asked.body)) == asked.surveyed.canonical.hex()


def test_run_reads_a_body_with_functions_of_bytes() -> None:
    body = chat(model="m")
    assert read_outline(body, "fake/m").model == "fake/m"
    asked = read_question(body, "fake/m")
    assert asked.path == "/v1/chat/completions" and json.loads(asked.body)["model"] == "fake/m"
    named = json.dumps({"model": "m", "input": {"prompt": "x"}, "options": {"queueRequest": True}}).encode()
    assert read_outline(named, "").options == {"queueRequest": True} and read_native(named, "") == b'{"prompt":"x"}'
    assert read_batch(json.dumps({"requests": [{"prompt": "x"}] * 3}).encode(), "m").count == 3
    with pytest.raises(InvalidRequest, match="beside requests"):
        read_batch(b'{"requests":[],"more":1}', "m")


def test_large_answer_of_run_is_rewritten_in_a_child(used: Any) -> None:
    said = {"choices": [{"message": {"content": TEXT}}], "usage": {"total_tokens": 1}}
    asked = WrittenQuestion("chat/completions", b"{}", False)
    reply = asyncio.run(answered(asked, Reply(200, {}, json.dumps(said).encode())))
    assert used() == 1 and isinstance(reply.body, bytes)
    assert json.loads(reply.body)["result"]["response"] == TEXT
    assert asyncio.run(answered(asked, Reply(200, {}, b"[" + b"1," * LARGE + b"1]"))).status == 502


def test_large_socket_message_is_handled_in_a_child(used: Any) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    class Gateway:
        async def answer(self, request: Any) -> Reply:
            assert json.loads(request.body)[0]["query"]["messages"][0]["content"] == TEXT
            return Reply(200, {"content-type": "application/json"}, chat(), ended="complete")

    async def run() -> None:
        socket = GatewaySocket(Gateway(), {"raw_path": b"/v1/a/g"}, send, send)  # type: ignore[arg-type]
        socket._headers = {}
        step = {"eventId": "e", "provider": "p", "endpoint": "x", "query": msgspec.Raw(chat())}
        message = msgspec.json.encode({"type": "universal.create", "request": step})
        await socket._start_request(message.decode())
        await asyncio.gather(*socket._open.values())

    asyncio.run(run())
    assert used() == 2
    assert [json.loads(each["text"])["type"] for each in sent] == ["universal.created", "universal.done"]
    assert json.loads(sent[0]["text"])["response"]["messages"][0]["content"] == TEXT


def test_socket_message_functions() -> None:
    id, body = read_message('{"type":"universal.create","request":{"eventId":"e","provider":"p","query":{"a":1}}}')
    assert id == "e" and json.loads(body) == [{"provider": "p", "query": {"a": 1}}]
    shown = json.loads(shown_message("universal.stream", {"eventId": "e"}, b"\xff", {}))
    assert shown["response"] == {"base64": "/w=="}


def test_large_foreign_reply_is_decoded_in_a_child(used: Any) -> None:
    said = {"message": {"content": [{"type": "text", "text": TEXT}]}, "finish_reason": "COMPLETE"}
    incoming = Decoded(Given(200, {}, json.dumps(said).encode()), Chatted("m", "0" * 32))
    made = json.loads(asyncio.run(incoming.whole()))
    assert used() == 1 and made["choices"][0]["message"]["content"] == TEXT


# -- large events of a stream ------------------------------------------------------------------------------------------


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    made = {"id": "x", "model": "m", "object": "chat.completion.chunk", "created": 1, "choices": [choice]}
    return b"data: " + json.dumps(made).encode() + b"\n\n"


STREAM = [chunk("a"), chunk(HUGE_TEXT), chunk("", "stop") + b"data: [DONE]\n\n"]


class Incoming:
    status, kind = 200, "text/event-stream"

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        data = b"".join(STREAM)
        self._parts = [data[at : at + 65_536] for at in range(0, len(data), 65_536)]

    async def read(self, seconds: float) -> bytes:
        return self._parts.pop(0) if self._parts else b""

    def close(self) -> None:
        pass


def pass_through(translator: StreamTranslator | None = None) -> tuple[bytes, Meter]:
    async def run() -> tuple[bytes, Meter]:
        meter = Meter("openai-chat")
        passage = Passage(call(b"{}"), Incoming(), meter, translator, ManualClock())  # type: ignore[arg-type]
        await passage.begin(100.0, lambda *_: None)
        return b"".join([each async for each in passage]), meter

    return asyncio.run(run())


def test_large_event_is_metered_in_a_child(used: Any) -> None:
    said, meter = pass_through()
    assert used() == 1 and said == b"".join(STREAM)
    assert meter.signs.ended and meter.signs.characters == len(HUGE_TEXT) + 1 and meter.broken is None


def test_raw_bytes_are_not_a_large_event() -> None:
    data = b"x" * HUGE
    assert Meter("openai-chat").is_heavy(data) and not RawMeter().is_heavy(data) and RawMeter().push(data) == data


def test_large_event_is_translated_in_a_child(used: Any) -> None:
    said, _ = pass_through(StreamTranslator("openai-chat", "anthropic"))
    whole = StreamTranslator("openai-chat", "anthropic")
    here = b"".join(map(whole.push, STREAM)) + whole.end()
    assert used() >= 2 and HUGE_TEXT.encode() in said
    assert said.count(b"content_block_delta") == here.count(b"content_block_delta") and b"message_stop" in said


class RecordingGuard:
    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def note(self, finding: Finding) -> None:
        self.findings.append(finding)

    async def judge(self, said: str) -> None:
        return None

    def last_words(self, finding: Finding) -> bytes:
        return b"blocked"


SCANNER = Scanner([PatternRule(name="r", find=("email",), action="redact")], "RESPONSE")


class Events:
    def __init__(self, *events: bytes) -> None:
        self._events = list(events)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._events:
            raise StopAsyncIteration
        return self._events.pop(0)

    async def aclose(self) -> None:
        pass


def test_large_event_is_guarded_in_a_child_and_in_pieces(used: Any) -> None:
    """A match across the end of the large event and the next event is found, too."""
    guard = RecordingGuard()

    async def run() -> tuple[bytes, int]:
        events = Events(chunk(f"ada@example.com {TEXT}bob@exa"), chunk("mple.com is it"), b"data: [DONE]\n\n")
        stream = GuardedStream(events, SCANNER, guard)

        async def drain() -> bytes:
            return b"".join([each async for each in stream])

        loop_steps, work = 0, asyncio.ensure_future(drain())
        while not work.done():
            loop_steps += 1
            await asyncio.sleep(0)
        return work.result(), loop_steps

    said, loop_steps = asyncio.run(run())
    assert used() == 2, "one call finds its texts, one redacts them"
    assert loop_steps > len(TEXT) // AT_ONCE
    assert b"example.com" not in said and said.count(b"[email]") == 2 and TEXT[:1000].encode() in said
    assert len(guard.findings) == 2


def test_event_with_too_many_texts_is_scanned_as_one(used: Any) -> None:
    event = b'data: {"x":[' + b'"a",' * (LARGE // 2) + b'"ada@example.com"]}\n\n'

    async def run() -> bytes:
        return b"".join([each async for each in GuardedStream(Events(event), SCANNER, RecordingGuard())])

    assert b"ada@example.com" not in asyncio.run(run()) and used() == 1


def test_window_scans_a_long_text_in_pieces() -> None:
    window, holder = Window(SCANNER), ["x" * AT_ONCE + " ada@example.com " + "y" * AT_ONCE]
    piece = Piece(Text(holder, 0, holder[0], (0,)))
    window.add(piece)
    spans, scans = window.look(last=True), 1
    while window.is_behind:
        spans, scans = spans + window.look(last=True), scans + 1
    assert scans == 3 and [span.end - span.start for span in spans] == [len("ada@example.com")]
    assert piece.is_decided and piece.edit() and "[email]" in holder[0] and "ada" not in holder[0]


def test_splitter_finds_the_same_gaps_in_large_data(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"a\n\nb\r\n\r\nc\r\rd\n\r\ne\n\n\nf", b"\r\n\r\n\r\n", b"\n\r\n\n", b"", b"a\r\r\n\r\n\n"):
        for searched in range(len(data) + 1):
            assert list(splitter._ends(data, searched)) == list(splitter._ends_in_large(data, searched))
    monkeypatch.setattr(splitter, "LARGE", 0)
    assert splitter.Splitter().push(b"data: a\n\ndata: b\r\n\r\nrest") == [b"data: a\n\n", b"data: b\r\n\r\n"]


# -- the router and the engine's server --------------------------------------------------------------------------------


def test_large_call_to_a_foreign_server_is_rewritten_in_a_child(used: Any) -> None:
    asked = RouterCall("POST", "/v1/chat/completions", {}, chat(kv_transfer_params={"x": 1}))
    nothing: Any = None
    trip = Trip(nothing, nothing, asked, 1, 2, None, 9.0, 3, 3, generates=True, accused=False)
    made = asyncio.run(trip.written(VLLM(asked).plain, False))
    assert used() == 1 and "kv_transfer_params" not in json.loads(made.body)
    assert asyncio.run(trip.written(Native(asked, 1, None).plain, False)).body == asked.body
    assert used() == 1, "Emberline workers get the body unchanged"


def test_large_envelope_is_opened_with_a_function_of_bytes() -> None:
    envelope, body = open_envelope(b'{"path":"/v1/chat/completions","body":%b,"seed":7,"handoff":{}}' % chat())
    assert body == chat() and envelope.seed == 7 and bytes(envelope.body) == b""
    there = asyncio.run(offload.run(LARGE, open_envelope, msgspec.json.encode({"path": "p", "body": {"a": 1}})))
    assert there[1] == b'{"a":1}' and there[0].path == "p"


def test_large_responses_request_is_read_in_a_child(used: Any) -> None:
    store = ResponseStore(None)
    responses = StoredResponses(store, lambda x: "")
    body = json.dumps({"model": "m", "input": TEXT}).encode()

    async def run() -> tuple[bytes, bytes]:
        same, memory = await responses.completed(body, "")
        assert same == body and memory is not None
        await memory.keep({"id": "resp_1", "output": [{"role": "assistant", "content": "yes"}]})
        more = json.dumps({"model": "m", "input": TEXT, "previous_response_id": "resp_1"}).encode()
        joined, memory = await responses.completed(more, "")
        assert memory is not None
        return joined, memory._items

    joined, given = asyncio.run(run())
    assert used() == 3
    assert [item["role"] for item in json.loads(joined)["input"]] == ["user", "assistant", "user"]
    assert json.loads(given) == json.loads(joined)["input"]
    store.close()


def test_request_with_too_many_values_is_rejected_in_the_child() -> None:
    schema = {"type": "object", "enum": [{}] * 30_000}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools}
    with pytest.raises(WorkTooLarge, match="without its prompt"):
        parse_large("/v1/chat/completions", json.dumps(body).encode(), {"m": 10**6})
    with pytest.raises(WorkTooLarge, match="has more than"):
        parse_light(json.loads, b"[" + b"1," * 1_000_000 + b"1]")
    assert parse_light(json.loads, b"[1,2]") == [1, 2]
    check_weight({"a": [1, "x"]}, most=20)
    with pytest.raises(WorkTooLarge):
        check_weight([[]] * 6, most=20)
