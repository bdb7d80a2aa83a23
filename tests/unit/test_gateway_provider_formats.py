"""Providers' own formats: errors, streams, credentials and URLs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.errors import ProviderErrorReply, UpstreamBroken
from emberline.gateway.core.settings import GatewaySettings, ProviderSettings
from emberline.gateway.dialects.translate import StreamTranslator
from emberline.gateway.error_replies import read_provider_error
from emberline.gateway.fakes.foreign_dialects import (
    FakeBedrockConverseReply,
    FakeBedrockInvokeReply,
    FakeCohereReply,
    FakeReplicateReply,
)
from emberline.gateway.providers.base import is_trusted_url
from emberline.gateway.providers.bedrock_reply import ConverseReplyDecoder, InvokeReplyDecoder
from emberline.gateway.providers.cohere_reply import CohereChatDecoder
from emberline.gateway.providers.google_token import GoogleCredentials, GoogleTokenCache
from emberline.gateway.providers.perplexity import PerplexityStreamDecoder
from emberline.gateway.providers.registry import PROVIDERS_BY_SLUG, ProviderRegistry
from emberline.gateway.providers.replicate_reply import ReplicateReplyDecoder
from emberline.gateway.settings_store import read_configured_gateways
from emberline.gateway.streams.aws_eventstream_meter import EventStreamMeter
from emberline.gateway.streams.meter import StreamMeter, check_reply
from emberline.gateway.upstream.provider_request import ProviderRequest
from emberline.gateway.upstream.reply_decoder import BufferedReply, ReplyDecoder
from emberline.wire.usage import Usage

ID = "0190a0b0c0d0" + "0" * 20


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (413, {"error": {"message": "Request too large for model `m` on tokens per minute (TPM)"}}, "context"),
        (400, {"code": "x", "error": "This model's maximum prompt length is 131072 but..."}, "context"),
        (400, {"message": "Input is too long for requested model."}, "context"),
        (400, {"error": {"message": "The input token count (9) exceeds the maximum number of tokens allowed (8)."}},
         "context"),
        (422, {"error": "`inputs` tokens + `max_new_tokens` must be <= 4096", "error_type": "validation"}, "context"),
        (400, {"message": "too many tokens: size limit exceeded by 5 tokens."}, "context"),
        (400, {"error": {"code": "content_filter", "message": "m", "innererror": {"code": "ResponsibleAIPolicy"}}},
         "filtered"),
        (403, {"error": {"code": 403, "message": "moderation", "metadata": {"flagged_input": "x"}}}, "filtered"),
        (403, {"error": "Content violates usage guidelines."}, "filtered"),
        (403, {"message": "You are not authorized"}, "access"),
        (402, {"error": {"message": "Insufficient Balance"}}, "access"),
        (424, {"message": "the model failed"}, "server"),
        (429, {"errors": [{"code": 3040, "message": "Capacity temporarily exceeded"}], "success": False}, "busy"),
        (422, {"detail": [{"msg": "Extra inputs are not permitted"}]}, "request"),
    ],
)  # fmt: skip
def test_provider_errors_are_classified(status: int, body: Any, kind: str) -> None:
    error = read_provider_error("p", status, {}, json.dumps(body).encode(), "openai-chat")
    assert error.reason == kind and "no reason" not in str(error)
    codes = {"context": "context_length_exceeded", "filtered": "content_filter"}
    assert error.code == codes.get(kind, "upstream_refused")


def test_google_retry_delay() -> None:
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"}
    body = json.dumps({"error": {"code": 429, "message": "quota", "details": [info]}}).encode()
    assert read_provider_error("p", 429, {}, body, "gemini").retry_after == 34.5
    assert read_provider_error("p", 429, {"retry-after": "2"}, body, "gemini").retry_after == 2


FAKES: list[tuple[Any, Any, str]] = [
    (
        lambda: FakeCohereReply("raw", "/v2/chat", {"stream": True}, 4),
        lambda: CohereChatDecoder("m", ID),
        "openai-chat",
    ),
    (lambda: FakeBedrockInvokeReply("/invoke-with-response-stream", {}, 4), InvokeReplyDecoder, "anthropic"),
    (lambda: FakeBedrockConverseReply("/converse-stream", {}, 4), lambda: ConverseReplyDecoder("m"), "anthropic"),
    (lambda: FakeReplicateReply("/streams/4", "h", {}, 4), lambda: ReplicateReplyDecoder("m", ID), "openai-chat"),
]


def meter_stream(decoder: ReplyDecoder, dialect: Any, data: bytes, size: int) -> StreamMeter:
    meter = StreamMeter(dialect)
    for at in range(0, len(data), size):
        meter.push(decoder.push(data[at : at + size]))
    meter.push(decoder.end())
    meter.end()
    return meter


@pytest.mark.parametrize(("fake", "decoder", "dialect"), FAKES)
def test_decoders_are_independent_of_chunk_boundaries(fake: Any, decoder: Any, dialect: str) -> None:
    data = b"".join(event for event, _ in fake().events())
    for size in (1, 7, 50, len(data)):
        meter = meter_stream(decoder(), dialect, data, size)
        assert meter.broken is None and meter.state.has_ended and meter.state.content_characters == 4 * 6
        usage, estimated = meter.usage(b"")
        assert estimated is isinstance(decoder(), ReplicateReplyDecoder), "Replicate's streams have no usage"
        assert estimated or usage == Usage(11, output=4)


@pytest.mark.parametrize(("fake", "decoder", "dialect"), FAKES)
def test_incomplete_provider_stream_is_broken(fake: Any, decoder: Any, dialect: str) -> None:
    events = [event for event, _ in fake().events()]
    whole = b"".join(events)
    for at in (len(b"".join(events[:-1])), len(whole) - 3, len(events[0]) + 2):
        assert is_broken(decoder(), dialect, whole[:at])
    if not isinstance(decoder(), ReplicateReplyDecoder):  # Replicate's events are plain text
        assert is_broken(decoder(), dialect, events[0] + b'data: {"a": \n\n' + whole)


def is_broken(decoder: ReplyDecoder, dialect: str, data: bytes) -> bool:
    try:
        return meter_stream(decoder, dialect, data, 64).broken is not None
    except UpstreamBroken:
        return True


def test_perplexity_stream_gets_done() -> None:
    events = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n'
    last = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    for data, added in (
        (events, b""),
        (events + last, b"data: [DONE]\n\n"),
        (events + last + b"data: [DONE]\n\n", b""),
    ):
        decoder = PerplexityStreamDecoder()
        assert b"".join(decoder.push(data[at : at + 9]) for at in range(0, len(data), 9)) == data
        assert decoder.end() == added


def test_azure_filter_results_before_content() -> None:
    data = (
        b'data: {"choices":[],"prompt_filter_results":[{"prompt_index":0}],"model":"","id":"","object":""}\n\n'
        b'data: {"id":"c","model":"gpt","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
        b'data: {"id":"c","model":"gpt","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    translator = StreamTranslator("openai-chat", "anthropic")
    assert b'"hi"' in translator.push(data) + translator.end()


def test_aws_streams_are_metered() -> None:
    for fake in (
        FakeBedrockConverseReply("/converse-stream", {}, 4),
        FakeBedrockInvokeReply("/invoke-with-response-stream", {}, 4),
    ):
        data = b"".join(event for event, _ in fake.events())
        meter = EventStreamMeter()
        assert b"".join(meter.push(data[at : at + 33]) for at in range(0, len(data), 33)) == data
        meter.end()
        assert meter.broken is None and meter.usage(b"") == (Usage(11, output=4), False)
        cut = EventStreamMeter()
        cut.push(data[:-1])
        cut.end()
        assert cut.broken is not None
        failed = EventStreamMeter()
        failed.push(fake.error_event())
        assert "modelStreamErrorException" in failed.state.error


def test_usage_of_unknown_formats() -> None:
    for body in (
        {"result": {"response": "x", "usage": {"prompt_tokens": 3, "completion_tokens": 5}}, "success": True},
        {"usage": {"inputTokens": 3, "outputTokens": 5}},
        {"text": "x", "meta": {"billed_units": {"input_tokens": 3, "output_tokens": 5}}},
    ):
        assert check_reply("raw", json.dumps(body).encode()) == (Usage(3, output=5), "")
    assert check_reply("raw", b'"usage"') == (None, "") and check_reply("raw", b'{"usage":') == (None, "")


# -- credentials -------------------------------------------------------------------------------------------------------


class FakeUpstream:
    """An upstream client that returns the given replies in turn."""

    def __init__(self, *replies: tuple[int, Any]) -> None:
        self.replies = list(replies)
        self.asked: list[ProviderRequest] = []

    async def send(self, out: ProviderRequest, seconds: float) -> BufferedReply:
        self.asked.append(out)
        await asyncio.sleep(0)
        status, body = self.replies[min(len(self.asked), len(self.replies)) - 1]
        return BufferedReply(status, {}, json.dumps(body).encode())


@pytest.fixture(scope="module")
def credentials() -> GoogleCredentials:
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return GoogleCredentials(private_key=pem.decode(), client_email="me", project_id="p", region="r")


def test_concurrent_requests_share_one_token(credentials: GoogleCredentials) -> None:
    tokens = GoogleTokenCache("https://x")
    sender: Any = FakeUpstream((200, {"access_token": "one", "expires_in": 3600}), (200, {"access_token": "two"}))

    async def work() -> None:
        got = await asyncio.gather(*(tokens.get_token(credentials, sender, 5, 1000.0) for _ in range(9)))
        assert set(got) == {"one"} and len(sender.asked) == 1
        assert await tokens.get_token(credentials, sender, 5, 1000.0 + 3400) == "one"
        assert await tokens.get_token(credentials, sender, 5, 1000.0 + 3500) == "two", (
            "a token is replaced before it expires"
        )

    asyncio.run(work())


def test_user_credentials_use_refresh_token() -> None:
    user = GoogleCredentials.parse('{"type":"authorized_user","client_id":"c","client_secret":"s","refresh_token":"r"}')
    sender: Any = FakeUpstream((200, {"access_token": "one"}))
    assert user is not None and asyncio.run(GoogleTokenCache("").get_token(user, sender, 5, 0.0)) == "one"
    assert sender.asked[0].body == b"grant_type=refresh_token&refresh_token=r&client_id=c&client_secret=s"


def test_invalid_private_keys_are_rejected() -> None:
    numbers = rsa.generate_private_key(65537, 2048).private_numbers()
    crooked = rsa.RSAPrivateNumbers(
        numbers.p, numbers.q, numbers.d ^ 2, numbers.dmp1 ^ 2, numbers.dmq1, numbers.iqmp, numbers.public_numbers
    ).private_key(unsafe_skip_rsa_key_validation=True)
    pem = crooked.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    sender: Any = FakeUpstream((200, {"access_token": "one"}))
    for key in (pem.decode(), "", "no", pem.decode()[:300]):
        with pytest.raises(InvalidRequest, match="private_key"):
            asyncio.run(GoogleTokenCache("").get_token(GoogleCredentials(private_key=key), sender, 5, 0.0))
    assert not sender.asked


def test_token_server_of_tenant_must_be_public(credentials: GoogleCredentials) -> None:
    sender: Any = FakeUpstream((200, {"access_token": "one"}))
    inside = msgspec.structs.replace(credentials, token_uri="http://10.0.0.1/token")
    asyncio.run(GoogleTokenCache("http://10.0.0.1", public_only=True).get_token(inside, sender, 5, 0.0))
    assert sender.asked[0].public_only, "the address is checked"


def test_failed_token_requests(credentials: GoogleCredentials) -> None:
    refuses: Any = FakeUpstream((400, {"error": "invalid_grant"}))
    with pytest.raises(ProviderErrorReply, match="invalid_grant") as caught:
        asyncio.run(GoogleTokenCache("").get_token(credentials, refuses, 5, 0.0))
    assert caught.value.reason == "access"
    mumbles: Any = FakeUpstream((200, {}))
    with pytest.raises(UpstreamBroken):
        asyncio.run(GoogleTokenCache("").get_token(credentials, mumbles, 5, 0.0))


def test_trusted_urls() -> None:
    assert is_trusted_url("https://oauth2.googleapis.com/token", "", "googleapis.com")
    assert is_trusted_url("http://127.0.0.1:9/x", "http://127.0.0.1:9/y", "googleapis.com")
    for bad in ("http://oauth2.googleapis.com/", "https://googleapis.com.evil.example/", "https://a@googleapis.com/",
                "https://evilgoogleapis.com/", "http://169.254.169.254/"):  # fmt: skip
        assert not is_trusted_url(bad, "https://base", "googleapis.com")


def test_key_from_file(tmp_path: Path) -> None:
    file = tmp_path / "adc.json"
    file.write_text('{"type": "authorized_user"}\n')
    table = {"providers": {"google-vertex-ai": {"key_file": str(file)}}}
    [settings] = read_configured_gateways({"gateways": {"default": table}}, ProviderSettings()).values()
    assert settings.providers["google-vertex-ai"].key == '{"type": "authorized_user"}'
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_configured_gateways(
            {"gateways": {"default": {"providers": {"groq": {"key_file": str(tmp_path / "no")}}}}}, ProviderSettings()
        )


# -- real URLs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slug", "endpoint", "url"),
    [
        ("openai", "chat/completions", "https://api.openai.com/v1/chat/completions"),
        ("anthropic", "v1/messages", "https://api.anthropic.com/v1/messages"),
        ("groq", "chat/completions", "https://api.groq.com/openai/v1/chat/completions"),
        ("mistral", "v1/chat/completions", "https://api.mistral.ai/v1/chat/completions"),
        ("deepseek", "chat/completions", "https://api.deepseek.com/chat/completions"),
        ("perplexity-ai", "chat/completions", "https://api.perplexity.ai/chat/completions"),
        ("grok", "v1/chat/completions", "https://api.x.ai/v1/chat/completions"),
        ("grok", "chat/completions", "https://api.x.ai/v1/chat/completions"),
        ("openrouter", "v1/chat/completions", "https://openrouter.ai/api/v1/chat/completions"),
        ("cerebras", "chat/completions", "https://api.cerebras.ai/v1/chat/completions"),
        ("cohere", "v2/chat", "https://api.cohere.com/v2/chat"),
        ("replicate", "predictions", "https://api.replicate.com/v1/predictions"),
        ("huggingface", "bigcode/starcoder", "https://router.huggingface.co/hf-inference/models/bigcode/starcoder"),
        ("azure-openai", "res/dep/chat/completions",
         "https://res.openai.azure.com/openai/deployments/dep/chat/completions?api-version=2024-10-21"),
        ("google-ai-studio", "v1/models/m:generateContent",
         "https://generativelanguage.googleapis.com/v1/models/m:generateContent"),
        ("google-vertex-ai", "v1/projects/p/locations/us-east4/publishers/google/models/m:generateContent",
         "https://us-east4-aiplatform.googleapis.com/v1/projects/p/locations/us-east4/publishers/google/models/"
         "m:generateContent"),
        ("google-vertex-ai", "v1/projects/p/locations/global/publishers/google/models/m:generateContent",
         "https://aiplatform.googleapis.com/v1/projects/p/locations/global/publishers/google/models/m:generateContent"),
        ("aws-bedrock", "bedrock-runtime/eu-west-1/model/m/invoke",
         "https://bedrock-runtime.eu-west-1.amazonaws.com/model/m/invoke"),
        ("aws-bedrock", "bedrock-mantle/us-east-1/anthropic/v1/messages",
         "https://bedrock-mantle.us-east-1.api.aws/anthropic/v1/messages"),
        ("workers-ai", "@cf/m", "https://api.cloudflare.com/client/v4/accounts/{account}/ai/run/@cf/m"),
        ("ollama", "v1/chat/completions", "http://127.0.0.1:11434/v1/chat/completions"),
    ],
)  # fmt: skip
def test_provider_urls(slug: str, endpoint: str, url: str) -> None:
    assert ProviderRegistry().find_provider(slug, GatewaySettings()).build_url(endpoint, "") == url


@pytest.mark.parametrize(
    ("slug", "endpoint"),
    [
        ("azure-openai", "a.b/dep/chat/completions"),
        ("aws-bedrock", "s3/us-east-1/x"),
        ("aws-bedrock", "bedrock-runtime/evil.example#/x"),
        ("aws-bedrock", "model/m/invoke"),
    ],
)
def test_invalid_paths_are_rejected(slug: str, endpoint: str) -> None:
    with pytest.raises(InvalidRequest):
        ProviderRegistry().find_provider(slug, GatewaySettings()).build_url(endpoint, "")


def test_speaks_setting_restricts_wire_formats() -> None:
    def find_provider(slug: str, *speaks: str, **more: Any) -> Any:
        return ProviderRegistry().find_provider(
            slug, GatewaySettings(providers={slug: ProviderSettings(speaks=speaks or None, **more)})
        )

    assert not find_provider("openai", "openai-chat").supports("openai-responses") and find_provider("openai").supports(
        "openai-responses"
    )
    with pytest.raises(InvalidRequest, match="gemini"):
        find_provider("openai", "gemini")
    assert (
        find_provider("ollama", base_url="http://h/v1").build_url("v1/chat/completions", "")
        == "http://h/v1/chat/completions"
    )


@pytest.mark.parametrize(("slug", "base_url"), [("openai", None), ("mine", "http://h/v1"), ("ollama", "http://h/v1")])
@pytest.mark.parametrize("endpoint", ["chat/completions", "v1/chat/completions"])
def test_version_in_path_is_optional(slug: str, base_url: str | None, endpoint: str) -> None:
    """Both spellings lead to the same URL and wire format."""
    provider = ProviderRegistry().find_provider(
        slug, GatewaySettings(providers={slug: ProviderSettings(base_url=base_url)})
    )
    assert provider.build_url(endpoint, "").count("/v1/chat/completions") == 1 and "/v1/v1" not in provider.build_url(
        endpoint, ""
    )
    assert provider.dialect_at(endpoint) == "openai-chat"


def test_provider_slugs() -> None:
    assert all(slug == provider.slug for slug, provider in PROVIDERS_BY_SLUG.items()) and len(PROVIDERS_BY_SLUG) == 26
