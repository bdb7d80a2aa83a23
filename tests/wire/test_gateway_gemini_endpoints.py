"""Counting tokens in three wire formats, and Gemini's embeddings and list of models, for several providers.

The requests are those that google-genai 3.3, anthropic and openai send.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from local_gateway import LocalGateway

from emberline.gateway.fakes.provider import ReceivedRequest

KEY = "a-key-of-the-tests"
GEMINI = {"x-goog-api-key": KEY, "x-goog-api-client": "google-genai-sdk/3.3.0 gl-python/3.11.7"}
TOOL = {"name": "look", "description": "d", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    def providers(urls: dict[str, str]) -> dict[str, Any]:
        url = urls["fake"]
        return {
            "openai": {"base_url": f"{url}/v1", "key": "k"},
            "anthropic": {"base_url": url, "key": "k"},
            "google-ai-studio": {"base_url": url, "key": "k"},
            "emberline": {"base_url": url},
            "groq": {"base_url": f"{url}/v1", "key": "k"},
            "cohere": {"base_url": url, "key": "k"},
        }

    with LocalGateway(tmp_path_factory.mktemp("gemini"), ["fake"], providers, authentication=True) as made:
        yield made


def last(gateway: LocalGateway) -> ReceivedRequest:
    return gateway.fakes["fake"].requests[-1]


COUNTS = [
    # model, count, path at the provider
    ("openai/gpt-5", 11, "/v1/responses/input_tokens"),
    ("anthropic/claude-sonnet-4-5", 12, "/v1/messages/count_tokens"),
    ("emberline/smollm2", 12, "/v1/messages/count_tokens"),
    ("google-ai-studio/gemini-2.5-flash", 13, "/v1beta/models/gemini-2.5-flash:countTokens"),
]


@pytest.mark.parametrize(("model", "count", "path"), COUNTS)
def test_tokens_are_counted_in_every_format(gateway: LocalGateway, model: str, count: int, path: str) -> None:
    for version in ("v1", "v1beta"):
        body = {"contents": [{"parts": [{"text": "hi there"}], "role": "user"}]}
        status, _, reply = gateway.post(f"/{version}/models/{model}:countTokens", body, GEMINI)
        assert (status, json.loads(reply)) == (200, {"totalTokens": count})
        assert (
            last(gateway).path == path and b"hi there" in last(gateway).body and b"max_tokens" not in last(gateway).body
        )
        assert last(gateway).json.get("model") in (None, model.partition("/")[2])
    client = anthropic.Anthropic(base_url=gateway.url, api_key=KEY, max_retries=0)
    messages: Any = [{"role": "user", "content": "hi there"}]
    counted = client.messages.count_tokens(model=model, messages=messages, system="be brief", tools=[TOOL])  # type: ignore[list-item]
    assert counted.input_tokens == count
    assert last(gateway).path == path and b"be brief" in last(gateway).body and b"look" in last(gateway).body
    openai_client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0)
    number = openai_client.responses.input_tokens.count(model=model, input="hi there", instructions="be brief")
    assert number.input_tokens == count and number.object == "response.input_tokens"
    assert last(gateway).path == path and b"be brief" in last(gateway).body


def test_provider_that_cannot_count(gateway: LocalGateway) -> None:
    body = {"contents": [{"parts": [{"text": "hi"}]}]}
    status, _, reply = gateway.post("/v1beta/models/groq/m:countTokens", body, GEMINI)
    assert status == 400 and json.loads(reply)["error"]["status"] == "INVALID_ARGUMENT" and b"groq/m" in reply
    client = anthropic.Anthropic(base_url=gateway.url, api_key=KEY, max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match="tokens cannot be counted for groq/m"):
        client.messages.count_tokens(model="groq/m", messages=[{"role": "user", "content": "hi"}])


def embed_request(model: str, *texts: str, **fields: Any) -> dict[str, Any]:
    contents = [{"parts": [{"text": text}], "role": "user"} for text in texts]
    return {"requests": [{"content": content, "model": f"models/{model}", **fields} for content in contents]}


def test_gemini_embeddings(gateway: LocalGateway) -> None:
    model = "google-ai-studio/gemini-embedding-001"
    for version in ("v1", "v1beta"):
        path = f"/{version}/models/{model}:batchEmbedContents"
        status, _, reply = gateway.post(path, embed_request(model, "a", "b", taskType="RETRIEVAL_QUERY"), GEMINI)
        assert status == 200 and len(json.loads(reply)["embeddings"]) == 2
        assert last(gateway).path == "/v1beta/models/gemini-embedding-001:batchEmbedContents"
        assert [each["model"] for each in last(gateway).json["requests"]] == ["models/gemini-embedding-001"] * 2
        assert last(gateway).json["requests"][0]["taskType"] == "RETRIEVAL_QUERY"


@pytest.mark.parametrize("model", ["openai/text-embedding-3-small", "emberline/minilm", "cohere/embed-v4"])
def test_embeddings_of_other_providers(gateway: LocalGateway, model: str) -> None:
    path = f"/v1/models/{model}:batchEmbedContents"
    body = embed_request(model, "a", outputDimensionality=2, taskType="RETRIEVAL_QUERY")
    status, headers, reply = gateway.post(path, body, GEMINI)
    assert status == 200 and json.loads(reply)["embeddings"] == [{"values": [0.25, -0.5]}], reply
    assert "taskType" in headers["x-emberline-changed"]
    assert gateway.record(headers["cf-aig-log-id"]).usage.input > 0
    assert last(gateway).json["model"] == model.partition("/")[2]
    single = {"content": {"parts": [{"text": "a"}, {"text": "b"}]}}
    status, _, reply = gateway.post(f"/v1beta/models/{model}:embedContent", single, GEMINI)
    assert status == 200 and json.loads(reply)["embedding"] == {"values": [0.25, -0.5]}
    assert (last(gateway).json.get("input") or last(gateway).json["texts"]) == ["a\nb"]


@pytest.mark.parametrize(
    "body",
    [{}, {"requests": []}, {"requests": ["x"]}, {"requests": [{"content": {"parts": [{"inlineData": {}}]}}]},
     {"requests": [{"content": {"parts": [{"text": "a"}]}, "outputDimensionality": 1},
                   {"content": {"parts": [{"text": "a"}]}}]}],
)  # fmt: skip
def test_malformed_embedding_requests(gateway: LocalGateway, body: dict[str, Any]) -> None:
    status, _, reply = gateway.post("/v1beta/models/openai/m:batchEmbedContents", body, GEMINI)
    assert status == 400 and json.loads(reply)["error"]["status"] == "INVALID_ARGUMENT"


def test_models_are_listed_in_the_clients_format(gateway: LocalGateway) -> None:
    for path, headers in (
        ("/v1beta/models", {"x-goog-api-key": KEY}),
        ("/v1/models?pageSize=50", GEMINI),
        (f"/v1beta/models?key={KEY}", {}),
    ):
        status, _, reply = gateway.post(path, b"", headers, "GET")
        models = {each["name"]: each for each in json.loads(reply)["models"]}
        assert status == 200 and "generateContent" in str(models["models/openai/gpt-5"]), path
    status, _, reply = gateway.post("/v1/models/openai/gpt-5", b"", GEMINI, "GET")
    assert json.loads(reply)["name"] == "models/openai/gpt-5"
    status, _, reply = gateway.post("/v1/models/openai/none", b"", GEMINI, "GET")
    assert status == 404 and json.loads(reply)["error"]["status"] == "NOT_FOUND"
    assert gateway.post("/v1beta/models", b"", {}, "GET")[0] == 401
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY)
    assert "openai/gpt-5" in [model.id for model in client.models.list()]
