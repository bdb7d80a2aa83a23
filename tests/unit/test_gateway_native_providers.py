"""Providers on their own paths: URL of the request and header of the key."""

from __future__ import annotations

import pytest
from gateway_requests import call

from emberline.core.errors import InvalidRequest
from emberline.gateway.cache.key import cache_key
from emberline.gateway.core.settings import GatewaySettings
from emberline.gateway.providers.base import Provider, caller_key
from emberline.gateway.providers.registry import PROVIDERS_BY_SLUG, ProviderRegistry

ON = GatewaySettings.parse({})


def provider(slug: str) -> Provider:
    return ProviderRegistry().find_provider(slug, ON)


@pytest.mark.parametrize(
    ("slug", "endpoint", "url", "key"),
    [
        ("elevenlabs", "v1/text-to-speech/v", "https://api.elevenlabs.io/v1/text-to-speech/v", {"xi-api-key": "K"}),
        ("deepgram", "v1/listen", "https://api.deepgram.com/v1/listen", {"authorization": "Token K"}),
        ("cartesia", "tts/bytes", "https://api.cartesia.ai/tts/bytes", {"x-api-key": "K"}),
        ("fal", "fal-ai/fast-sdxl", "https://fal.run/fal-ai/fast-sdxl", {"authorization": "Key K"}),
        ("ideogram", "v1/ideogram-v3/generate", "https://api.ideogram.ai/v1/ideogram-v3/generate", {"api-key": "K"}),
        ("parallel", "v1/tasks/runs", "https://api.parallel.ai/v1/tasks/runs",
         {"x-api-key": "K", "authorization": "Bearer K"}),
        ("parallel", "v1/chat/completions", "https://api.parallel.ai/chat/completions",
         {"x-api-key": "K", "authorization": "Bearer K"}),
        ("baseten", "v1/chat/completions", "https://inference.baseten.co/v1/chat/completions",
         {"authorization": "Bearer K"}),
        ("baseten", "model/abc123", "https://model-abc123.api.baseten.co/environments/production/predict",
         {"authorization": "Bearer K"}),
        ("baseten", "model/abc123/development/predict", "https://model-abc123.api.baseten.co/development/predict",
         {"authorization": "Bearer K"}),
    ],
)  # fmt: skip
def test_native_request_has_provider_url_and_key(slug: str, endpoint: str, url: str, key: dict[str, str]) -> None:
    request = call(
        b"\xff sound", headers={"content-type": "audio/wav"}, provider=slug, dialect="raw", endpoint=endpoint, model=""
    )
    out = provider(slug).build_request(request, "K")
    assert (out.method, out.url, out.body) == ("POST", url, b"\xff sound")
    assert out.headers == {"content-type": "audio/wav", **key}
    # A stored key replaces credentials in all other headers.
    other = request.with_changes(
        headers={"xi-api-key": "x", "x-api-key": "x", "api-key": "x", "authorization": "Bearer x"}
    )
    assert provider(slug).build_request(other, "K").headers == key


def test_caller_key_is_forwarded_and_separates_cache_entries() -> None:
    own = [call({}, headers={"xi-api-key": key}, provider="elevenlabs", dialect="raw") for key in ("one", "two")]
    assert [caller_key(each) for each in own] == ["one", "two"]
    assert provider("elevenlabs").build_request(own[0], None).headers == {"xi-api-key": "one"}
    assert cache_key(own[0]) != cache_key(own[1])


def test_chat_is_translated_only_for_chat_providers() -> None:
    for slug in ("baseten", "parallel"):
        assert provider(slug).supports("openai-chat")
        assert provider(slug).endpoint_for("openai-chat", "m", False) == "chat/completions"
    for slug in ("elevenlabs", "deepgram", "cartesia", "fal", "ideogram"):
        assert not provider(slug).endpoints and slug in PROVIDERS_BY_SLUG
    assert provider("fal").model_from_path("fal-ai/fast-sdxl") == "fal-ai/fast-sdxl"
    assert provider("baseten").model_from_path("model/abc/x") == "abc"


@pytest.mark.parametrize("id", ["", "a.evil.example", "a@b", "a#", "A", "a" * 33])
def test_deployment_cannot_change_the_host(id: str) -> None:
    with pytest.raises(InvalidRequest, match="deployment"):
        provider("baseten").build_url(f"model/{id}", "")
