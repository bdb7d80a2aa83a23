"""Virtual keys and callers without a key reach a provider's inference endpoints, and nothing else of its account."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from local_gateway import LocalGateway
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

ADMIN = {"authorization": "Bearer a-key-of-the-tests"}
BASE = "/v1/default/default"
ALLOWED = {"model": "gpt-small", "messages": [{"role": "user", "content": "hi"}]}
OPERATOR_KEYS = ("sk-operator", "engine-operator")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    def providers(urls: dict[str, str]) -> dict[str, Any]:
        keyed = {"base_url": urls["fake"], "key": "sk-operator"}
        versioned = {"base_url": urls["fake"] + "/v1", "key": "sk-operator"}
        slugs = ("anthropic", "google-ai-studio", "cohere", "elevenlabs", "fal", "replicate", "deepgram", "baseten")
        return {
            "openai": versioned,
            "groq": versioned,
            "openrouter": versioned,
            "mistral": versioned,
            **dict.fromkeys(slugs, keyed),
            "azure-openai": keyed,
            "google-vertex-ai": keyed,
            "workers-ai": keyed,
            "huggingface": versioned,
            "ollama": {"base_url": urls["fake"]},
            "custom-mine": {"base_url": urls["fake"], "key": "sk-operator"},
            "custom-header": {"base_url": urls["fake"], "headers": {"x-secret": "sk-operator"}},
        }

    with LocalGateway(tmp_path_factory.mktemp("reach"), ["fake"], providers, default_provider="openai") as made:
        yield made


@pytest.fixture(scope="module")
def keys(gateway: LocalGateway) -> dict[str, dict[str, str]]:
    def create(**spec: Any) -> dict[str, str]:
        status, _, body = gateway.post("/admin/accounts/default/keys", {"name": "k", **spec}, ADMIN)
        assert status == 201, body
        return {"cf-aig-authorization": f"Bearer {json.loads(body)['secret']}"}

    return {
        "limited": create(allowed_models=["gpt-small"]),
        "unlimited": create(),
        "limited token": create(kind="token", allowed_models=["gpt-small"]),
        "token": create(kind="token"),
        "none": {},
    }


@pytest.fixture(autouse=True)
def no_requests(gateway: LocalGateway) -> None:
    gateway.reset()


# Every trial names the allowed model in its body. (method, path below the gateway, headers)
TRIALS: list[tuple[str, str, dict[str, str]]] = [
    # storage and administration of the operator's account
    *(("GET", f"openai/{path}", {}) for path in ("files", "responses/resp_1", "batches", "fine_tuning/jobs", "models")),
    *(("GET", f"openai/v1/{path}", {}) for path in ("files/f/content", "organization/admin_api_keys", "assistants")),
    *(("POST", f"openai/{path}", {}) for path in ("files", "batches", "fine_tuning/jobs", "vector_stores", "uploads")),
    *(("POST", f"openai/v1/{path}", {}) for path in ("organization/admin_api_keys", "responses/resp_1/cancel")),
    ("POST", "openai/realtime/client_secrets", {}),
    ("POST", "openai/realtime/calls", {}),
    ("POST", "openai/conversations", {}),
    ("DELETE", "openai/responses/resp_1", {}),
    ("DELETE", "openai/models/ft:gpt-small", {}),
    ("POST", "openai/chat/completions/chatcmpl-1", {}),
    ("GET", "openai/chat/completions", {}),
    # methods
    *((method, "openai/chat/completions", {}) for method in ("PUT", "PATCH", "DELETE", "post", "Post", "HEAD")),
    ("POST", "openai/files?_method=GET", {}),
    ("POST", "openai/chat/completions?_method=DELETE", {}),
    *(
        ("POST", f"openai/chat/completions?{q}=DELETE", {})
        for q in ("%5Fmethod", "a=1;_method", "_METHOD", "_method[]")
    ),
    ("POST", "openai/chat/completions?$httpMethod=GET", {}),
    # other spellings of paths
    *(("POST", f"openai/{path}", {}) for path in ("Files", "FILES", "chat//completions", "chat/completions/files")),
    *(("POST", f"openai/{path}", {}) for path in ("f%69les", "%66iles", "files%2f..%2fchat", "files%3Fa=chat")),
    *(("POST", f"openai/{path}", {}) for path in ("chat/completions%2F..%2Ffiles", "chat/completions/../files")),
    *(
        ("POST", f"openai/{path}", {})
        for path in ("chat/completions;x=1", "chat/completions%20", "chat/completions%00")
    ),
    *(("POST", f"openai/{path}", {}) for path in ("v1/v1/files", "/files", "v1//files", "./files", "v1/./files")),
    *(("POST", f"openai/{path}", {}) for path in ("chat/completions%23", "chat%2Fcompletions", "chat\\completions")),
    ("POST", "OpenAI/files", {}),
    ("POST", "openai/chat/Completions", {}),
    # other providers
    ("POST", "anthropic/v1/messages/batches", {}),
    ("POST", "anthropic/v1/files", {}),
    ("GET", "anthropic/v1/organizations/api_keys", {}),
    ("POST", "google-ai-studio/v1beta/files", {}),
    ("POST", "google-ai-studio/upload/v1beta/files", {}),
    ("POST", "google-ai-studio/v1beta/cachedContents", {}),
    ("POST", "google-ai-studio/v1beta/tunedModels/gpt-small:generateContent", {}),
    ("POST", "google-ai-studio/v1beta/models/gpt-small:batchGenerateContent", {}),
    ("POST", "google-ai-studio/v1beta/models/gpt-small%3Fx:generateContent", {}),
    ("GET", "google-ai-studio/v1beta/files", {}),
    ("POST", "google-vertex-ai/v1/projects/p/locations/r/customJobs", {}),
    ("POST", "google-vertex-ai/v1/projects/p/locations/r/endpoints/1:predict", {}),
    ("POST", "azure-openai/res/gpt-small/files", {}),
    ("POST", "azure-openai/res/gpt-small/chat/completions/x", {}),
    ("POST", "cohere/v1/datasets", {}),
    ("POST", "elevenlabs/v1/voices/add", {}),
    ("GET", "elevenlabs/v1/history", {}),
    ("GET", "deepgram/v1/projects", {}),
    ("POST", "replicate/models", {}),
    ("GET", "replicate/predictions", {}),
    ("POST", "baseten/v1/secrets", {}),
    ("POST", "groq/files", {}),
    ("POST", "mistral/v1/fine_tuning/jobs", {}),
    ("POST", "workers-ai/v1/finetunes", {}),
    ("POST", "ollama/api/pull", {}),
    ("DELETE", "ollama/api/delete", {}),
    ("POST", "custom-mine/v1/load_lora_adapter", {}),
    ("POST", "custom-mine/v1/files", {}),
    ("GET", "custom-mine/metrics", {}),
    ("POST", "custom-header/v1/files", {}),
]


@pytest.mark.parametrize("holder", ["limited", "unlimited", "limited token", "none"])
def test_no_way_to_other_endpoints(gateway: LocalGateway, keys: dict[str, dict[str, str]], holder: str) -> None:
    reached = []
    for method, path, headers in TRIALS:
        sent = {**keys[holder], **headers}
        status, _, body = gateway.post(f"{BASE}/{path}", ALLOWED, sent, method)
        if status < 400 or gateway.fakes["fake"].count:
            reached.append((method, path, status, body[:80]))
            gateway.reset()
    assert reached == []


@pytest.mark.parametrize("holder", ["limited", "unlimited", "limited token", "none"])
def test_no_way_in_lists_of_steps(gateway: LocalGateway, keys: dict[str, dict[str, str]], holder: str) -> None:
    """Also not as a second step, or by the query of the request itself."""
    good = {"provider": "openai", "endpoint": "chat/completions", "query": ALLOWED}
    reached = []
    for method, path, _ in TRIALS:
        slug, _, endpoint = path.partition("/")
        bad = {"provider": slug, "endpoint": endpoint, "query": ALLOWED}
        if method == "POST" and endpoint != "/files":  # a step has no method; the slash is removed, see below
            for steps in ([bad], [good, bad]):
                status, _, body = gateway.post(BASE, steps, keys[holder])
                if status < 400 or gateway.fakes["fake"].count:
                    reached.append((path, len(steps), status, body[:80]))
                    gateway.reset()
    assert reached == []
    assert gateway.post(BASE, [{**good, "endpoint": "/files"}], keys[holder])[0] == 403
    assert gateway.post(f"{BASE}?_method=DELETE", [good], keys[holder])[0] == 403
    assert gateway.post(BASE, [{**good, "provider": "compat", "endpoint": "files"}], keys[holder])[0] == 400
    assert gateway.fakes["fake"].count == 0


def test_headers_that_override_method_or_path_are_not_forwarded(
    gateway: LocalGateway, keys: dict[str, dict[str, str]]
) -> None:
    headers = {"x-http-method-override": "DELETE", "x-http-method": "GET", "x-method-override": "PUT"}
    headers |= {"x-original-url": "/v1/files", "x-rewrite-url": "/v1/files"}
    for path, body in ((f"{BASE}/openai/chat/completions", ALLOWED), ("/v1/chat/completions", ALLOWED)):
        assert gateway.post(path, body, {**keys["limited"], **headers})[0] == 200
        assert not headers.keys() & gateway.fakes["fake"].requests[-1].headers.keys()


@pytest.mark.parametrize("holder", ["limited", "unlimited", "none"])
def test_files_and_batches_need_a_token(gateway: LocalGateway, keys: dict[str, dict[str, str]], holder: str) -> None:
    trials = [("GET", "files"), ("POST", "files"), ("GET", "files/file-1"), ("DELETE", "files/file-1"),
              ("GET", "files/file-1/content"), ("POST", "batches"), ("GET", "batches"), ("GET", "batches/b"),
              ("POST", "batches/b/cancel")]  # fmt: skip
    prefixes = ("/v1", "/client/v4/accounts/default/ai/v1", "/accounts/default/ai/v1", f"{BASE}/compat")
    for method, path in trials:
        for prefix in prefixes:
            status, _, body = gateway.post(
                f"{prefix}/{path}", {**ALLOWED, "model": "openai/gpt-small"}, keys[holder], method
            )
            assert status == 403, (method, prefix, path, status, body)
    assert gateway.fakes["fake"].count == 0


@pytest.mark.parametrize("holder", ["limited", "unlimited", "none"])
def test_unified_paths_take_no_method_override(
    gateway: LocalGateway, keys: dict[str, dict[str, str]], holder: str
) -> None:
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/moderations", f"{BASE}/compat/chat/completions"):
        for query in ("_method=DELETE", "a=1;%5Fmethod=GET"):
            body = {**ALLOWED, "model": "openai/gpt-small"}
            assert gateway.post(f"{path}?{query}", body, keys[holder])[0] == 403, (path, query)
    assert gateway.fakes["fake"].count == 0


def test_run_endpoint_reaches_no_other_path(gateway: LocalGateway, keys: dict[str, dict[str, str]]) -> None:
    for account in ("/client/v4/accounts/default", "/accounts/default"):
        for model in ("v1/finetunes", "workers-ai/v1/finetunes", "openai/files", "workers-ai/..%2f..%2ffinetunes"):
            for path, body in (
                (f"{account}/ai/run/{model}", {"prompt": "hi", "model": "gpt-small"}),
                (f"{account}/ai/run", {"model": model, "input": {"prompt": "hi", "model": "gpt-small"}}),
            ):
                status, _, reply = gateway.post(path, body, keys["limited"])
                assert status in (400, 403, 404), (path, model, status, reply)
    assert gateway.fakes["fake"].count == 0


@pytest.mark.parametrize("holder", ["limited", "unlimited", "none"])
@pytest.mark.parametrize(
    "path",
    [
        "openai/realtime?call_id=rtc_1&model=gpt-small",
        "openai/responses?model=gpt-small",
        "openai/realtime/client_secrets?model=gpt-small",
        "elevenlabs/v1/convai/conversation?model=gpt-small",
        "google-ai-studio/ws/other.Service?model=gpt-small",
        "custom-mine/v1/events?model=gpt-small",
    ],
)
def test_no_other_websockets(gateway: LocalGateway, keys: dict[str, dict[str, str]], path: str, holder: str) -> None:
    with (
        pytest.raises(InvalidStatus) as refused,
        connect(gateway.url.replace("http", "ws") + f"{BASE}/{path}", additional_headers=keys[holder], open_timeout=20),
    ):
        pass
    assert refused.value.response.status_code == 403 and gateway.fakes["fake"].count == 0


@pytest.mark.parametrize("holder", ["unlimited", "none", "token"])
@pytest.mark.parametrize(
    "path",
    [
        "openai/chat/completions", "openai/v1/responses", "openai/embeddings", "openai/audio/speech",
        "openai/images/generations", "openai/moderations", "anthropic/v1/messages?beta=true",
        "anthropic/v1/messages/count_tokens", "google-ai-studio/v1beta/models/m:generateContent",
        "google-ai-studio/v1beta/models/m:countTokens", "google-ai-studio/v1beta/openai/chat/completions",
        "azure-openai/res/dep/chat/completions?api-version=x", "cohere/v2/chat", "cohere/v2/rerank",
        "elevenlabs/v1/text-to-speech/voice?output_format=mp3", "fal/fal-ai/fast-sdxl", "groq/chat/completions",
        "replicate/models/meta/llama/predictions", "workers-ai/@cf/meta/llama", "huggingface/org/model",
        "mistral/v1/fim/completions", "ollama/api/chat", "custom-mine/v1/chat/completions", "custom-mine/rerank",
        "custom-header/v1/completions", "deepgram/v1/listen?model=nova",
    ],
)  # fmt: skip
def test_inference_endpoints_are_reached(
    gateway: LocalGateway, keys: dict[str, dict[str, str]], path: str, holder: str
) -> None:
    status, _, body = gateway.post(f"{BASE}/{path}", ALLOWED, keys[holder])
    assert (status < 400 or b"Cloudflare account" in body) and b"not_allowed" not in body, body
    sent = gateway.fakes["fake"].requests
    assert not sent or any(key in json.dumps(sent[-1].headers) for key in OPERATOR_KEYS) or "ollama" in path


def test_model_of_an_inference_endpoint_is_checked(gateway: LocalGateway, keys: dict[str, dict[str, str]]) -> None:
    """A field that the provider does not read as the model allows nothing."""
    for path in (
        "google-ai-studio/v1beta/models/gpt-large:generateContent",
        "azure-openai/res/gpt-large/chat/completions",
        "elevenlabs/v1/text-to-speech/voice",
        "replicate/predictions",
        "fal/gpt-large",
        "ollama/api/generate",
    ):
        body = {**ALLOWED, "version": "x", **({"model": "gpt-large"} if "ollama" in path else {})}
        assert gateway.post(f"{BASE}/{path}", body, keys["limited"])[0] == 403, path
    assert gateway.fakes["fake"].count == 0
    for path in ("openai/chat/completions", "google-ai-studio/v1beta/models/gpt-small:generateContent"):
        assert gateway.post(f"{BASE}/{path}", ALLOWED, keys["limited"])[0] == 200, path


def test_further_models_of_openrouter_are_checked(gateway: LocalGateway, keys: dict[str, dict[str, str]]) -> None:
    headers = keys["limited"]
    for models, status in ((["gpt-large"], 403), (["gpt-small", "gpt-large"], 403), (["gpt-small"], 200)):
        body = {**ALLOWED, "models": models}
        step = {"provider": "openrouter", "endpoint": "v1/chat/completions", "query": body}
        assert gateway.post(f"{BASE}/openrouter/v1/chat/completions", body, headers)[0] == status
        assert gateway.post(BASE, [step], headers)[0] == status
        unified = {**body, "model": "openrouter/gpt-small"}
        assert gateway.post("/v1/chat/completions", unified, headers)[0] == status


def test_tokens_and_own_provider_keys_reach_every_path(gateway: LocalGateway, keys: dict[str, dict[str, str]]) -> None:
    own = {"authorization": "Bearer sk-mine"}
    for headers, sent in ((keys["token"], "Bearer sk-operator"), (own, "Bearer sk-mine")):
        assert gateway.post(f"{BASE}/openai/vector_stores", ALLOWED, headers)[0] == 200
        assert gateway.fakes["fake"].requests[-1].headers["authorization"] == sent
    gateway.reset()
    trials = [("openai", {**own, "cf-aig-byok-alias": "default"}), ("custom-mine", own), ("custom-header", own)]
    for slug, headers in [*trials, ("openai", {**own, **keys["unlimited"]}), ("ollama", own)]:
        assert gateway.post(f"{BASE}/{slug}/v1/files", ALLOWED, headers)[0] == 403, (slug, headers)
    assert gateway.fakes["fake"].count == 0
