"""Which steps of a large request run in a child process, or in pieces between which the event loop runs.

`used` counts the calls to children; nothing is timed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import msgspec
import pytest
from gateway_requests import call

from emberline.core.clock import ManualClock
from emberline.core.errors import InvalidRequest, WorkTooLarge
from emberline.core.offload import HUGE_INPUT_BYTES, LARGE_INPUT_BYTES, NICENESS, OffloadProcess, offload
from emberline.core.pickle_cost import check_pickle_cost
from emberline.gateway.core import request_body as bodies
from emberline.gateway.core.body_summary import summarize_body
from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.core.guardrail_finding import GuardrailFinding
from emberline.gateway.core.guardrail_policy import PatternRule
from emberline.gateway.core.options import RequestOptions
from emberline.gateway.core.request import GatewayReply, GatewayRequest
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.dialects import reply_context
from emberline.gateway.dialects.translate import StreamTranslator
from emberline.gateway.guardrails.scanner import PatternScanner
from emberline.gateway.guardrails.stream import GuardedStream
from emberline.gateway.guardrails.text_window import MAX_SCAN_CHARS, TextWindow, WindowPiece
from emberline.gateway.guardrails.texts import JsonText
from emberline.gateway.http.gateway_socket import GatewaySocket, encode_message, read_message
from emberline.gateway.layers.continuation import ContinuationLayer, _continuable_conversation
from emberline.gateway.layers.fallbacks import call_for_step
from emberline.gateway.layers.load_balancing import _affinity_seed
from emberline.gateway.providers.cohere_reply import CohereChatDecoder
from emberline.gateway.providers.registry import ProviderRegistry
from emberline.gateway.routes.facts import RequestAttributes, evaluate_body_conditions
from emberline.gateway.routes.graph import RouteGraph
from emberline.gateway.routes.traversal import CompiledRoute, RouteTraversal
from emberline.gateway.routes.universal import read_steps
from emberline.gateway.run.run_handler import encode_run_input, read_batch, read_outline, read_run_request
from emberline.gateway.run.run_replies import to_run_reply
from emberline.gateway.run.run_request import EncodedRequest
from emberline.gateway.streams.continued_stream import ContinuedStream
from emberline.gateway.streams.meter import RawReplyMeter, StreamMeter
from emberline.gateway.streams.provider_stream import ProviderStream
from emberline.gateway.upstream.reply_decoder import BufferedReply, DecodedReply
from emberline.router.http.routed_request import RoutedRequest
from emberline.router.native import NativeDialect
from emberline.router.upstream_request import UpstreamRequest as RouterCall
from emberline.router.vllm import VLLMDialect
from emberline.wire import event_splitter
from emberline.worker.cluster_handler import parse_forwarded_request
from emberline.worker.protocols import parse_large_body, parse_with_result_limit
from emberline.worker.response_store import ResponseStore
from emberline.worker.stored_responses import StoredResponses

TEXT = "word " * (LARGE_INPUT_BYTES // 4)
HUGE_TEXT = "word " * (HUGE_INPUT_BYTES // 4)


def chat(content: str = TEXT, model: str = "openai/gpt-4o-mini", **more: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **more}).encode()


@pytest.fixture
def used() -> Iterator[Any]:
    before = offload.large.calls + offload.huge.calls
    yield lambda: offload.large.calls + offload.huge.calls - before


# -- the child ---------------------------------------------------------------------------------------------------------


def test_child_runs_at_a_lower_priority() -> None:
    child = OffloadProcess("test")
    try:
        remote_value = asyncio.run(child.run(os.getpriority, os.PRIO_PROCESS, 0))
        assert remote_value == min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)
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
        bodies.read_body_fields(body.encode())
    assert caught.value.param == name
    assert summarize_body(body.encode()).body_fields is None


@pytest.mark.parametrize(
    "body",
    [
        '{"model":"a","messages":[{"role":"user","content":"{\\"a\\":1,\\"a\\":2}"},{"role":"user","content":"\\u0022"}]}',
        '{"model":"a","user":"\\u00e9\\/\\"","n":1e3,"x":[{"a":1},{"a":1}]}',
    ],
)
def test_equal_keys_of_different_objects_are_allowed(body: str) -> None:
    assert bodies.read_body_fields(body.encode()).model == "a"


def test_invalid_text_and_long_numbers_do_not_hide_a_duplicate() -> None:
    odd = b'"user":"\xff \\u0022","x":' + b"1" * 5000
    assert bodies.read_body_fields(b'{"model":"a",%b}' % odd).model == "a", "the provider may reject them"
    with pytest.raises(InvalidRequest, match="the key 'k' twice"):
        bodies.read_body_fields(b'{"model":"a",%b,"metadata":{"k":1,"k":2}}' % odd)


# -- the gateway -------------------------------------------------------------------------------------------------------


def test_large_list_of_steps_is_read_in_a_child(used: Any) -> None:
    query = chat(model="gpt-4o-mini")
    step = {"provider": "openai", "endpoint": "chat/completions", "query": msgspec.Raw(query)}
    (first_step,) = asyncio.run(
        read_steps(msgspec.json.encode([step]), RequestOptions(), GatewaySettings(), ProviderRegistry())
    )
    assert used() == 1
    assert first_step.body == query and first_step.body_summary == summarize_body(query)
    moved = call_for_step(call(b"[]"), first_step, 0, True)
    assert moved.body_summary is first_step.body_summary and moved.body_fields is first_step.body_fields, (
        "no layer reads the body again"
    )
    body = msgspec.json.encode([{**step, "query": {"model": "m"}}])
    (small,) = asyncio.run(read_steps(body, RequestOptions(), GatewaySettings(), ProviderRegistry()))
    assert used() == 1 and small.model == "m" and small.body_summary is None


def test_step_headers_are_bounded() -> None:
    step = {"provider": "openai", "endpoint": "x", "query": {}, "headers": {str(i): "x" * 100 for i in range(1000)}}
    with pytest.raises(InvalidRequest, match="headers and config"):
        asyncio.run(read_steps(msgspec.json.encode([step]), RequestOptions(), GatewaySettings(), ProviderRegistry()))


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
    request = call(chat(text), model="m")
    plan = CompiledRoute.compile("r", RouteGraph.parse({"elements": ROUTE}))
    answers = asyncio.run(evaluate_body_conditions(request, plan.conditions))
    assert used() == 1 and answers == {"c": expected == "a"}
    unread = RequestAttributes(request.with_changes(body=b"not read again"))
    chosen = RouteTraversal.start(plan, unread, "seed", answers).next_action()
    assert chosen is not None and chosen.id == expected
    assert asyncio.run(evaluate_body_conditions(call(chat("small")), plan.conditions)) == {} and used() == 1
    assert asyncio.run(evaluate_body_conditions(request, {"c": {"metadata.team": "core"}})) == {} and used() == 1


def test_large_conversation_is_read_in_a_child(used: Any) -> None:
    found = asyncio.run(_continuable_conversation(call(chat(stream=True)), "openai-chat"))
    assert used() == 1 and found is not None and found.messages == []
    assert asyncio.run(_continuable_conversation(call(chat(n=2)), "openai-chat")) is None


def test_stream_that_may_be_continued_reads_a_large_body_in_children(
    used: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_context, "decode", None)  # in this process; children import it anew

    async def reply_with_stream(request: GatewayRequest) -> GatewayReply:
        async def events() -> AsyncIterator[bytes]:
            yield b""

        return GatewayReply(200, {}, events())

    async def run() -> None:
        layer = ContinuationLayer(reply_with_stream, cast("ProviderRegistry", None))
        request = call(chat(stream=True), settings={"continuation": True}, stream=True)
        reply = await layer.wrap(reply_with_stream)(request)
        assert isinstance(reply.body, ContinuedStream)

    asyncio.run(run())
    assert used() == 2


def test_pool_does_not_hash_a_large_body_again() -> None:
    request = call(chat(), settings={"cache_ttl": 60})
    request.body_summary = summarize_body(request.body)
    assert (
        _affinity_seed(request)
        == _affinity_seed(request.with_changes(body=request.body))
        == request.body_summary.canonical_digest.hex()
    )


def test_run_reads_a_body_with_functions_of_bytes() -> None:
    body = chat(model="m")
    assert read_outline(body, "fake/m").model == "fake/m"
    request = read_run_request(body, "fake/m")
    assert request.path == "/v1/chat/completions" and json.loads(request.body)["model"] == "fake/m"
    named = json.dumps({"model": "m", "input": {"prompt": "x"}, "options": {"queueRequest": True}}).encode()
    assert (
        read_outline(named, "").options == {"queueRequest": True} and encode_run_input(named, "") == b'{"prompt":"x"}'
    )
    assert read_batch(json.dumps({"requests": [{"prompt": "x"}] * 3}).encode(), "m").count == 3
    with pytest.raises(InvalidRequest, match="unknown field 'more' in a batch"):
        read_batch(b'{"requests":[],"more":1}', "m")


def test_large_answer_of_run_is_rewritten_in_a_child(used: Any) -> None:
    output = {"choices": [{"message": {"content": TEXT}}], "usage": {"total_tokens": 1}}
    request = EncodedRequest("chat/completions", b"{}", False)
    reply = asyncio.run(to_run_reply(request, GatewayReply(200, {}, json.dumps(output).encode())))
    assert used() == 1 and isinstance(reply.body, bytes)
    assert json.loads(reply.body)["result"]["response"] == TEXT
    assert (
        asyncio.run(to_run_reply(request, GatewayReply(200, {}, b"[" + b"1," * LARGE_INPUT_BYTES + b"1]"))).status
        == 502
    )


def test_large_socket_message_is_handled_in_a_child(used: Any) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    class Gateway:
        async def answer(self, request: Any) -> GatewayReply:
            assert json.loads(request.body)[0]["query"]["messages"][0]["content"] == TEXT
            return GatewayReply(200, {"content-type": "application/json"}, chat(), ended="complete")

    async def run() -> None:
        socket = GatewaySocket(Gateway(), {"raw_path": b"/v1/a/g"}, send, send, send)  # type: ignore[arg-type]
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
    shown = json.loads(encode_message("universal.stream", {"eventId": "e"}, b"\xff", {}))
    assert shown["response"] == {"base64": "/w=="}


def test_large_foreign_reply_is_decoded_in_a_child(used: Any) -> None:
    output = {"message": {"content": [{"type": "text", "text": TEXT}]}, "finish_reason": "COMPLETE"}
    incoming = DecodedReply(BufferedReply(200, {}, json.dumps(output).encode()), CohereChatDecoder("m", "0" * 32))
    reply = json.loads(asyncio.run(incoming.read_all()))
    assert used() == 1 and reply["choices"][0]["message"]["content"] == TEXT


# -- large events of a stream ------------------------------------------------------------------------------------------


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    event = {"id": "x", "model": "m", "object": "chat.completion.chunk", "created": 1, "choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


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


def pass_through(translator: StreamTranslator | None = None) -> tuple[bytes, StreamMeter]:
    async def run() -> tuple[bytes, StreamMeter]:
        meter = StreamMeter("openai-chat")
        passage = ProviderStream(call(b"{}"), Incoming(), meter, translator, ManualClock())  # type: ignore[arg-type]
        await passage.wait_for_content(100.0, lambda *_: None)
        return b"".join([each async for each in passage]), meter

    return asyncio.run(run())


def test_large_event_is_metered_in_a_child(used: Any) -> None:
    output, meter = pass_through()
    assert used() == 1 and output == b"".join(STREAM)
    assert meter.state.has_ended and meter.state.content_characters == len(HUGE_TEXT) + 1 and meter.broken is None


def test_raw_bytes_are_not_a_large_event() -> None:
    data = b"x" * HUGE_INPUT_BYTES
    assert (
        StreamMeter("openai-chat").needs_offload(data)
        and not RawReplyMeter().needs_offload(data)
        and RawReplyMeter().push(data) == data
    )


def test_large_event_is_translated_in_a_child(used: Any) -> None:
    output, _ = pass_through(StreamTranslator("openai-chat", "anthropic"))
    whole = StreamTranslator("openai-chat", "anthropic")
    local_output = b"".join(map(whole.push, STREAM)) + whole.end()
    assert used() >= 2 and HUGE_TEXT.encode() in output
    assert (
        output.count(b"content_block_delta") == local_output.count(b"content_block_delta") and b"message_stop" in output
    )


class RecordingGuard:
    def __init__(self) -> None:
        self.findings: list[GuardrailFinding] = []

    def record_finding(self, finding: GuardrailFinding) -> None:
        self.findings.append(finding)

    async def judge_reply(self, text: str) -> None:
        return None

    def end_with_error_event(self, finding: GuardrailFinding) -> bytes:
        return b"blocked"


SCANNER = PatternScanner([PatternRule(name="r", find=("email",), action="redact")], "RESPONSE")


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

    output, loop_steps = asyncio.run(run())
    assert used() == 2, "one call finds its texts, one redacts them"
    assert loop_steps > len(TEXT) // MAX_SCAN_CHARS
    assert b"example.com" not in output and output.count(b"[email]") == 2 and TEXT[:1000].encode() in output
    assert len(guard.findings) == 2


def test_event_with_too_many_texts_is_scanned_as_one(used: Any) -> None:
    event = b'data: {"x":[' + b'"a",' * (LARGE_INPUT_BYTES // 2) + b'"ada@example.com"]}\n\n'

    async def run() -> bytes:
        return b"".join([each async for each in GuardedStream(Events(event), SCANNER, RecordingGuard())])

    assert b"ada@example.com" not in asyncio.run(run()) and used() == 1


def test_window_scans_a_long_text_in_pieces() -> None:
    window, holder = TextWindow(SCANNER), ["x" * MAX_SCAN_CHARS + " ada@example.com " + "y" * MAX_SCAN_CHARS]
    piece = WindowPiece(JsonText(holder, 0, holder[0], (0,)))
    window.add_piece(piece)
    spans, scans = window.scan(is_last=True), 1
    while window.has_unscanned_text:
        spans, scans = spans + window.scan(is_last=True), scans + 1
    assert scans == 3 and [span.end - span.start for span in spans] == [len("ada@example.com")]
    assert piece.can_be_released and piece.apply_redactions() and "[email]" in holder[0] and "ada" not in holder[0]


def test_splitter_finds_the_same_gaps_in_large_data(monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"a\n\nb\r\n\r\nc\r\rd\n\r\ne\n\n\nf", b"\r\n\r\n\r\n", b"\n\r\n\n", b"", b"a\r\r\n\r\n\n"):
        for searched in range(len(data) + 1):
            assert list(event_splitter._find_event_ends(data, searched)) == list(
                event_splitter._find_event_ends_in_large_data(data, searched)
            )
    monkeypatch.setattr(event_splitter, "LARGE_CHUNK_BYTES", 0)
    assert event_splitter.EventSplitter(UpstreamBroken).push(b"data: a\n\ndata: b\r\n\r\nrest") == [
        b"data: a\n\n",
        b"data: b\r\n\r\n",
    ]


# -- the router and the engine's server --------------------------------------------------------------------------------


def test_large_call_to_a_foreign_server_is_rewritten_in_a_child(used: Any) -> None:
    request = RouterCall("POST", "/v1/chat/completions", {}, chat(kv_transfer_params={"x": 1}))
    nothing: Any = None
    routed_request = RoutedRequest(
        nothing, nothing, request, 1, 2, None, 9.0, 3, 3, is_generation=True, is_known_suspect=False
    )
    built = asyncio.run(routed_request.run_dialect_method(VLLMDialect(request).build_plain_request, False))
    assert used() == 1 and "kv_transfer_params" not in json.loads(built.body)
    assert (
        asyncio.run(routed_request.run_dialect_method(NativeDialect(request, 1, None).build_plain_request, False)).body
        == request.body
    )
    assert used() == 1, "Emberline workers get the body unchanged"


def test_large_envelope_is_opened_with_a_function_of_bytes() -> None:
    envelope, body = parse_forwarded_request(
        b'{"path":"/v1/chat/completions","body":%b,"seed":7,"handoff":{}}' % chat()
    )
    assert body == chat() and envelope.seed == 7 and bytes(envelope.body) == b""
    remote_value = asyncio.run(
        offload.run(LARGE_INPUT_BYTES, parse_forwarded_request, msgspec.json.encode({"path": "p", "body": {"a": 1}}))
    )
    assert remote_value[1] == b'{"a":1}' and remote_value[0].path == "p"


def test_large_responses_request_is_read_in_a_child(used: Any) -> None:
    store = ResponseStore(None)
    responses = StoredResponses(store, lambda x: "")
    body = json.dumps({"model": "m", "input": TEXT}).encode()

    async def run() -> tuple[bytes, bytes]:
        same, memory = await responses.expand_request(body, "")
        assert same == body and memory is not None
        await memory.save({"id": "resp_1", "output": [{"role": "assistant", "content": "yes"}]})
        more = json.dumps({"model": "m", "input": TEXT, "previous_response_id": "resp_1"}).encode()
        joined, memory = await responses.expand_request(more, "")
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
        parse_large_body("/v1/chat/completions", json.dumps(body).encode(), {"m": 10**6})
    with pytest.raises(WorkTooLarge, match="contains more than"):
        parse_with_result_limit(json.loads, b"[" + b"1," * 1_000_000 + b"1]")
    assert parse_with_result_limit(json.loads, b"[1,2]") == [1, 2]
    check_pickle_cost({"a": [1, "x"]}, max_cost=20)
    with pytest.raises(WorkTooLarge):
        check_pickle_cost([[]] * 6, max_cost=20)
