"""What providers say in their own ways: errors, streams cut anywhere, credentials; and where they are asked."""

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
from emberline.gateway.book import read_gateways
from emberline.gateway.costs.usage import Usage
from emberline.gateway.dialects.translate import StreamTranslator
from emberline.gateway.errors import Broken, Refused
from emberline.gateway.fakes.foreign import FakeCohere, FakeConversed, FakeInvoked, FakePredicted
from emberline.gateway.providers.base import near
from emberline.gateway.providers.bedrock_reply import Conversed, Unwrapped
from emberline.gateway.providers.cohere_reply import Chatted
from emberline.gateway.providers.google_token import Account, GoogleTokens
from emberline.gateway.providers.perplexity import Ending
from emberline.gateway.providers.registry import KNOWN, Registry
from emberline.gateway.providers.replicate_reply import Predicted
from emberline.gateway.refusal import refused
from emberline.gateway.settings import ProviderSettings, Settings
from emberline.gateway.streams.eventmeter import EventStreamMeter
from emberline.gateway.streams.meter import Meter, check_whole
from emberline.gateway.upstream.decoder import Decoder, Given
from emberline.gateway.upstream.outgoing import Outgoing

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
def test_errors_are_understood(status: int, body: Any, kind: str) -> None:
    error = refused("p", status, {}, json.dumps(body).encode(), "openai-chat")
    assert error.kind == kind and "no reason" not in str(error)
    codes = {"context": "context_length_exceeded", "filtered": "content_filter"}
    assert error.code == codes.get(kind, "upstream_refused")


def test_google_says_how_long_to_wait() -> None:
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"}
    body = json.dumps({"error": {"code": 429, "message": "quota", "details": [info]}}).encode()
    assert refused("p", 429, {}, body, "gemini").retry_after == 34.5
    assert refused("p", 429, {"retry-after": "2"}, body, "gemini").retry_after == 2


FAKES: list[tuple[Any, Any, str]] = [
    (lambda: FakeCohere("raw", "/v2/chat", {"stream": True}, 4), lambda: Chatted("m", ID), "openai-chat"),
    (lambda: FakeInvoked("/invoke-with-response-stream", {}, 4), Unwrapped, "anthropic"),
    (lambda: FakeConversed("/converse-stream", {}, 4), lambda: Conversed("m"), "anthropic"),
    (lambda: FakePredicted("/streams/4", "h", {}, 4), lambda: Predicted("m", ID), "openai-chat"),
]


def measured(decoder: Decoder, dialect: Any, data: bytes, size: int) -> Meter:
    meter = Meter(dialect)
    for at in range(0, len(data), size):
        meter.push(decoder.push(data[at : at + size]))
    meter.push(decoder.end())
    meter.end()
    return meter


@pytest.mark.parametrize(("fake", "decoder", "dialect"), FAKES)
def test_streams_may_be_cut_anywhere(fake: Any, decoder: Any, dialect: str) -> None:
    data = b"".join(event for event, _ in fake().events())
    for size in (1, 7, 50, len(data)):
        meter = measured(decoder(), dialect, data, size)
        assert meter.broken is None and meter.signs.ended and meter.signs.characters == 4 * 6
        told, estimated = meter.usage(b"")
        assert estimated is isinstance(decoder(), Predicted), "who streams predictions counts nothing"
        assert estimated or told == Usage(11, output=4)


@pytest.mark.parametrize(("fake", "decoder", "dialect"), FAKES)
def test_what_ends_early_is_broken(fake: Any, decoder: Any, dialect: str) -> None:
    events = [event for event, _ in fake().events()]
    whole = b"".join(events)
    for at in (len(b"".join(events[:-1])), len(whole) - 3, len(events[0]) + 2):
        assert is_broken(decoder(), dialect, whole[:at])
    if not isinstance(decoder(), Predicted):  # whose words are plain text
        assert is_broken(decoder(), dialect, events[0] + b'data: {"a": \n\n' + whole)


def is_broken(decoder: Decoder, dialect: str, data: bytes) -> bool:
    try:
        return measured(decoder, dialect, data, 64).broken is not None
    except Broken:
        return True


def test_every_event_of_perplexity_may_be_its_last() -> None:
    events = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}\n\n'
    last = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    for data, said in ((events, b""), (events + last, b"data: [DONE]\n\n"), (events + last + b"data: [DONE]\n\n", b"")):
        ending = Ending()
        assert b"".join(ending.push(data[at : at + 9]) for at in range(0, len(data), 9)) == data
        assert ending.end() == said


def test_azure_begins_with_its_filters() -> None:
    data = (
        b'data: {"choices":[],"prompt_filter_results":[{"prompt_index":0}],"model":"","id":"","object":""}\n\n'
        b'data: {"id":"c","model":"gpt","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
        b'data: {"id":"c","model":"gpt","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    made = StreamTranslator("openai-chat", "anthropic")
    assert b'"hi"' in made.push(data) + made.end()


def test_aws_streams_pass_and_are_measured() -> None:
    for fake in (FakeConversed("/converse-stream", {}, 4), FakeInvoked("/invoke-with-response-stream", {}, 4)):
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
        assert "modelStreamErrorException" in failed.signs.failed


def test_usage_of_replies_that_nobody_knows() -> None:
    for body in (
        {"result": {"response": "x", "usage": {"prompt_tokens": 3, "completion_tokens": 5}}, "success": True},
        {"usage": {"inputTokens": 3, "outputTokens": 5}},
        {"text": "x", "meta": {"billed_units": {"input_tokens": 3, "output_tokens": 5}}},
    ):
        assert check_whole("raw", json.dumps(body).encode()) == (Usage(3, output=5), "")
    assert check_whole("raw", b'"usage"') == (None, "") and check_whole("raw", b'{"usage":') == (None, "")


# -- credentials -------------------------------------------------------------------------------------------------------


class Sender:
    """Upstream, as far as tokens need it."""

    def __init__(self, *replies: tuple[int, Any]) -> None:
        self.replies = list(replies)
        self.asked: list[Outgoing] = []

    async def send(self, out: Outgoing, seconds: float) -> Given:
        self.asked.append(out)
        await asyncio.sleep(0)
        status, body = self.replies[min(len(self.asked), len(self.replies)) - 1]
        return Given(status, {}, json.dumps(body).encode())


@pytest.fixture(scope="module")
def account() -> Account:
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Account(private_key=pem.decode(), client_email="me", project_id="p", region="r")


def test_one_wish_for_many(account: Account) -> None:
    tokens = GoogleTokens("https://x")
    sender: Any = Sender((200, {"access_token": "one", "expires_in": 3600}), (200, {"access_token": "two"}))

    async def work() -> None:
        got = await asyncio.gather(*(tokens.token(account, sender, 5, 1000.0) for _ in range(9)))
        assert set(got) == {"one"} and len(sender.asked) == 1
        assert await tokens.token(account, sender, 5, 1000.0 + 3400) == "one"
        assert await tokens.token(account, sender, 5, 1000.0 + 3500) == "two", "it is replaced before its end"

    asyncio.run(work())


def test_users_have_tokens_to_get_tokens_with() -> None:
    user = Account.read('{"type":"authorized_user","client_id":"c","client_secret":"s","refresh_token":"r"}')
    sender: Any = Sender((200, {"access_token": "one"}))
    assert user is not None and asyncio.run(GoogleTokens("").token(user, sender, 5, 0.0)) == "one"
    assert sender.asked[0].body == b"grant_type=refresh_token&refresh_token=r&client_id=c&client_secret=s"


def test_keys_that_are_none() -> None:
    numbers = rsa.generate_private_key(65537, 2048).private_numbers()
    crooked = rsa.RSAPrivateNumbers(
        numbers.p, numbers.q, numbers.d ^ 2, numbers.dmp1 ^ 2, numbers.dmq1, numbers.iqmp, numbers.public_numbers
    ).private_key(unsafe_skip_rsa_key_validation=True)
    pem = crooked.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    sender: Any = Sender((200, {"access_token": "one"}))
    for key in (pem.decode(), "", "no", pem.decode()[:300]):
        with pytest.raises(InvalidRequest, match="private_key"):
            asyncio.run(GoogleTokens("").token(Account(private_key=key), sender, 5, 0.0))
    assert not sender.asked


def test_a_tenants_server_must_be_public(account: Account) -> None:
    sender: Any = Sender((200, {"access_token": "one"}))
    inside = msgspec.structs.replace(account, token_uri="http://10.0.0.1/token")
    asyncio.run(GoogleTokens("http://10.0.0.1", public=True).token(inside, sender, 5, 0.0))
    assert sender.asked[0].public, "so that the address is looked at"


def test_no_token(account: Account) -> None:
    refuses: Any = Sender((400, {"error": "invalid_grant"}))
    with pytest.raises(Refused, match="invalid_grant") as caught:
        asyncio.run(GoogleTokens("").token(account, refuses, 5, 0.0))
    assert caught.value.kind == "access"
    mumbles: Any = Sender((200, {}))
    with pytest.raises(Broken):
        asyncio.run(GoogleTokens("").token(account, mumbles, 5, 0.0))


def test_whom_to_believe() -> None:
    assert near("https://oauth2.googleapis.com/token", "", "googleapis.com")
    assert near("http://127.0.0.1:9/x", "http://127.0.0.1:9/y", "googleapis.com")
    for bad in ("http://oauth2.googleapis.com/", "https://googleapis.com.evil.example/", "https://a@googleapis.com/",
                "https://evilgoogleapis.com/", "http://169.254.169.254/"):  # fmt: skip
        assert not near(bad, "https://base", "googleapis.com")


def test_a_key_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "adc.json"
    file.write_text('{"type": "authorized_user"}\n')
    table = {"providers": {"google-vertex-ai": {"key_file": str(file)}}}
    [settings] = read_gateways({"gateways": {"default": table}}, "http://e").values()
    assert settings.providers["google-vertex-ai"].key == '{"type": "authorized_user"}'
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_gateways(
            {"gateways": {"default": {"providers": {"groq": {"key_file": str(tmp_path / "no")}}}}}, "http://e"
        )


# -- the addresses that they really have -------------------------------------------------------------------------------


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
def test_addresses(slug: str, endpoint: str, url: str) -> None:
    assert Registry().find(slug, Settings()).url(endpoint, "") == url


@pytest.mark.parametrize(
    ("slug", "endpoint"),
    [
        ("azure-openai", "a.b/dep/chat/completions"),
        ("aws-bedrock", "s3/us-east-1/x"),
        ("aws-bedrock", "bedrock-runtime/evil.example#/x"),
        ("aws-bedrock", "model/m/invoke"),
    ],
)
def test_no_addresses(slug: str, endpoint: str) -> None:
    with pytest.raises(InvalidRequest):
        Registry().find(slug, Settings()).url(endpoint, "")


def test_who_is_told_what_to_speak_speaks_no_more() -> None:
    def made(slug: str, *speaks: str, **more: Any) -> Any:
        return Registry().find(slug, Settings(providers={slug: ProviderSettings(speaks=speaks or None, **more)}))

    assert not made("openai", "openai-chat").speaks("openai-responses") and made("openai").speaks("openai-responses")
    with pytest.raises(InvalidRequest, match="gemini"):
        made("openai", "gemini")
    assert made("ollama", base_url="http://h/v1").url("v1/chat/completions", "") == "http://h/v1/chat/completions"


@pytest.mark.parametrize(("slug", "base_url"), [("openai", None), ("mine", "http://h/v1"), ("ollama", "http://h/v1")])
@pytest.mark.parametrize("endpoint", ["chat/completions", "v1/chat/completions"])
def test_the_version_may_be_in_the_path_or_not(slug: str, base_url: str | None, endpoint: str) -> None:
    """Where it is asked at one place all the same, it is the same that is said there."""
    provider = Registry().find(slug, Settings(providers={slug: ProviderSettings(base_url=base_url)}))
    assert provider.url(endpoint, "").count("/v1/chat/completions") == 1 and "/v1/v1" not in provider.url(endpoint, "")
    assert provider.dialect_of(endpoint) == "openai-chat"


def test_slugs() -> None:
    assert all(slug == provider.slug for slug, provider in KNOWN.items()) and len(KNOWN) == 26
