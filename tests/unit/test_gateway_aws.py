"""AWS: published examples of signatures and event streams, and Bedrock's requests and replies."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from blocked_executor import BlockedExecutor

from emberline.core.errors import InvalidRequest
from emberline.core.offload import LARGE_INPUT_BYTES
from emberline.gateway.core.errors import UpstreamBroken
from emberline.gateway.providers.aws_bedrock import Bedrock, _parse_key
from emberline.gateway.providers.bedrock_reply import ConverseReplyDecoder, InvokeReplyDecoder
from emberline.gateway.providers.converse import render_converse_request
from emberline.gateway.providers.sigv4 import AwsCredentials, _canonical_path, derive_signing_key, sign_headers
from emberline.gateway.streams.aws_eventstream import EventStreamParser, encode_message
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.gateway.upstream.reply_decoder import BufferedReply

# Examples from AWS's test suite of Signature Version 4 and from the IAM user guide.
EXAMPLE = AwsCredentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
NOW = 1440938160.0  # 2015-08-30T12:36:00Z
HOST = "https://example.amazonaws.com"
AWS = '{"accessKeyId": "AKIAEXAMPLE", "secretAccessKey": "a/secret"}'
FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "signature"),
    [
        ("GET", "/", {}, b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        ("POST", "/", {}, b"", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
        ("POST", "/", FORM, b"Param1=value1", "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"),
        ("GET", "/\u1234", {}, b"", "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"),
        ("GET", "/?Param2=value2&Param1=value1", {}, b"",
         "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"),
        ("GET", "/", {"my-header1": " value1", "my-header2": ' "a   b   c"'}, b"",
         "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736"),
        ("GET", "/example/..", {}, b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        ("GET", "/./", {}, b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    ],
)  # fmt: skip
def test_published_signatures(method: str, path: str, headers: dict[str, str], body: bytes, signature: str) -> None:
    output = sign_headers(method, HOST + path, headers, body, EXAMPLE, region="us-east-1", service="service", now=NOW)
    assert output["authorization"].endswith(f"Signature={signature}")
    assert output["x-amz-date"] == "20150830T123600Z"


def test_signing_key_of_iam_guide() -> None:
    key = derive_signing_key("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "20150830", "us-east-1", "iam")
    assert key.hex() == "c4afb1cc5771d871763a393e44b703571b55cc28424d1a5e86da6ed3c154a4b9"
    headers = {"content-type": "application/x-www-form-urlencoded; charset=utf-8"}
    url = "https://iam.amazonaws.com/?Action=ListUsers&Version=2010-05-08"
    output = sign_headers("GET", url, headers, b"", EXAMPLE, region="us-east-1", service="iam", now=NOW)
    assert output["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/iam/aws4_request, "
        "SignedHeaders=content-type;host;x-amz-date, "
        "Signature=5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"
    )


def test_path_is_encoded_twice() -> None:
    plain, sent = (
        sign_headers("POST", f"{HOST}/model/a{colon}0/converse", {}, b"", EXAMPLE, region="r", service="s", now=NOW)
        for colon in (":", "%3A")
    )
    assert plain["authorization"] != sent["authorization"]
    assert _canonical_path("/model/a%3A0/converse") == "/model/a%253A0/converse"


@pytest.mark.parametrize(
    ("url", "key", "name", "sent"),
    [
        ("https://bedrock-mantle.us-east-1.api.aws/anthropic/v1/messages", AWS, "authorization",
         "/us-east-1/bedrock-mantle/aws4_request"),
        ("https://bedrock-runtime.eu-west-1.amazonaws.com/model/m/invoke", AWS, "authorization",
         "/eu-west-1/bedrock/aws4_request"),
        ("https://bedrock-mantle.us-east-1.api.aws/anthropic/v1/messages", "ABSKkey", "x-api-key", "ABSKkey"),
        ("https://bedrock-runtime.us-east-1.amazonaws.com/model/m/invoke", "ABSK", "authorization", "Bearer ABSK"),
    ],
)  # fmt: skip
def test_bedrock_credentials(url: str, key: str, name: str, sent: str) -> None:
    class Sender:
        async def send(self, out: ProviderRequest, seconds: float) -> BufferedReply:
            assert sent in out.headers[name] and "a/secret" not in str(out.headers)
            assert name == "authorization" or "authorization" not in out.headers
            return BufferedReply(200, {}, b"{}")

    sender: Any = Sender()
    asyncio.run(Bedrock().send(ProviderRequest("POST", url, {"authorization": f"Bearer {key}"}, b"{}"), sender, 1, NOW))


def test_large_bodies_are_signed_in_threads_of_their_own() -> None:
    class Sender:
        async def send(self, out: ProviderRequest, seconds: float) -> BufferedReply:
            assert out.headers["authorization"].startswith("AWS4-HMAC-SHA256")
            return BufferedReply(200, {}, b"{}")

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(BlockedExecutor())
        sender: Any = Sender()
        headers = {"authorization": "Bearer AKIAIOSFODNN7EXAMPLE:a/secret+1"}
        url = "https://bedrock-runtime.us-east-1.amazonaws.com/model/m/converse"
        await Bedrock().send(ProviderRequest("POST", url, headers, bytes(LARGE_INPUT_BYTES)), sender, 1, NOW)

    asyncio.run(run())


def test_session_token_is_signed() -> None:
    session = AwsCredentials("ASIA", "secret", "its-token")
    output = sign_headers("GET", HOST, {}, b"", session, region="r", service="s", now=NOW)
    assert output["x-amz-security-token"] == "its-token" and "x-amz-security-token" in output["authorization"]


def test_key_formats() -> None:
    given = _parse_key('{"accessKeyId": "AKIA", "secretAccessKey": "s", "region": "eu-west-1"}')
    assert given is not None and given.region == "eu-west-1" and given.session_token == ""
    plain = _parse_key("AKIAIOSFODNN7EXAMPLE:a/secret+1:token")
    assert plain is not None and (plain.secret_access_key, plain.session_token) == ("a/secret+1", "token")
    assert _parse_key("ABSKQmVkcm9ja0FQSUtleS1") is None and _parse_key("") is None
    with pytest.raises(InvalidRequest, match="accessKeyId"):
        _parse_key("{}")


# -- event streams -----------------------------------------------------------------------------------------------------


def test_published_messages() -> None:
    empty = bytes.fromhex("000000100000000005c248eb7d98c8ff")
    assert EventStreamParser().push(empty) == [({}, b"")]
    assert encode_message({}, b"") == empty
    # A payload without headers: {'foo':'bar'}
    payload = bytes.fromhex("0000001d00000000fd528c5a7b27666f6f273a27626172277dc3653936")
    assert EventStreamParser().push(payload) == [({}, b"{'foo':'bar'}")]


def test_event_stream_split_anywhere() -> None:
    data = encode_message({":event-type": "a", ":message-type": "event"}, b"one") + encode_message(
        {":event-type": "b"}, b""
    )
    for size in range(1, len(data)):
        stream, found = EventStreamParser(), []
        for at in range(0, len(data), size):
            found += stream.push(data[at : at + size])
        stream.end()
        assert [(each.event_type, each.payload) for each in found] == [("a", b"one"), ("b", b"")]


def test_damaged_message_raises() -> None:
    data = encode_message({":event-type": "a"}, b"payload")
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(UpstreamBroken):
            EventStreamParser().push(bytes(damaged))
    stream = EventStreamParser()
    assert stream.push(data[:-1]) == []
    with pytest.raises(UpstreamBroken, match="within"):
        stream.end()


def event_message(kind: str, payload: Any) -> bytes:
    return encode_message({":event-type": kind, ":message-type": "event"}, json.dumps(payload).encode())


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(part.partition(b"data: ")[2]) for part in data.split(b"\n\n") if part]


def test_invoke_stream_is_unwrapped() -> None:
    payload = b'{"type":"message_stop"}'
    output = InvokeReplyDecoder().push(
        event_message("chunk", {"bytes": base64.b64encode(payload).decode(), "p": "abc"})
    )
    assert output == b"event: message_stop\ndata: " + payload + b"\n\n"
    with pytest.raises(UpstreamBroken):
        InvokeReplyDecoder().push(event_message("chunk", {"bytes": "*"}))
    headers = {":message-type": "exception", ":exception-type": "throttlingException"}
    errors = events(InvokeReplyDecoder().push(encode_message(headers, b'{"message":"slowly"}')))
    assert errors == [{"type": "error", "error": {"type": "rate_limit_error", "message": "slowly"}}]


def test_converse_stream() -> None:
    decoder = ConverseReplyDecoder("m")
    tool = {"toolUse": {"toolUseId": "t", "name": "f"}}
    output = b"".join(
        decoder.push(event_message(kind, payload))
        for kind, payload in [
            ("messageStart", {"role": "assistant"}),
            ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"reasoningContent": {"text": "hm"}}}),
            ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"reasoningContent": {"signature": "s"}}}),
            ("contentBlockStop", {"contentBlockIndex": 0}),
            ("contentBlockStart", {"contentBlockIndex": 1, "start": tool}),
            ("contentBlockDelta", {"contentBlockIndex": 1, "delta": {"toolUse": {"input": "{}"}}}),
            ("contentBlockStop", {"contentBlockIndex": 1}),
            ("messageStop", {"stopReason": "tool_use"}),
        ]
    )
    assert [each["type"] for each in events(output)] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop"]  # fmt: skip
    usage = {"inputTokens": 3, "outputTokens": 5, "cacheReadInputTokens": 7}
    last = events(decoder.push(event_message("metadata", {"usage": usage})))
    assert [each["type"] for each in last] == ["message_delta", "message_stop"]
    assert last[0]["delta"]["stop_reason"] == "tool_use" and last[0]["usage"]["cache_read_input_tokens"] == 7
    assert decoder.end() == b""


def test_converse_stream_without_usage_ends() -> None:
    decoder = ConverseReplyDecoder("m")
    decoder.push(event_message("messageStop", {"stopReason": "guardrail_intervened"}))
    assert events(decoder.end())[0]["delta"]["stop_reason"] == "refusal"
    assert ConverseReplyDecoder("m").end() == b"", "a cut stream gets no end event"


# -- requests ----------------------------------------------------------------------------------------------------------


def test_converse_request() -> None:
    request = {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.5,
        "stop_sequences": ["x"],
        "top_k": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": "no", "is_error": True},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}},
                    {"type": "odd"},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
    }
    reported: dict[str, str] = {}
    body = render_converse_request(request, reported.__setitem__)
    assert reported.keys() == {"top_k", "messages[].content[].odd"}
    assert body["inferenceConfig"] == {"maxTokens": 9, "temperature": 0.5, "stopSequences": ["x"]}
    assert body["system"] == [{"text": "s"}, {"cachePoint": {"type": "default"}}]
    result = {"toolUseId": "t", "content": [{"text": "no"}], "status": "error"}
    assert body["messages"][2]["content"] == [
        {"toolResult": result},
        {"image": {"format": "png", "source": {"bytes": "aa"}}},
    ]
    assert body["messages"][1]["content"] == [{"toolUse": {"toolUseId": "t", "name": "f", "input": {"a": 1}}}]
    spec = {"name": "f", "description": "d", "inputSchema": {"json": {"type": "object"}}}
    assert body["toolConfig"] == {"tools": [{"toolSpec": spec}], "toolChoice": {"tool": {"name": "f"}}}


def test_converse_rejects_image_url() -> None:
    picture = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(InvalidRequest, match="does not accept an image"):
        render_converse_request({"messages": [{"role": "user", "content": [picture]}]}, lambda field, why: None)
