"""OpenAI's endpoints for media, files, batches, stored responses and conversations, with its Python client."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from local_gateway import LocalGateway

from emberline.gateway.fakes.openai_account import SPEECH

ADMIN_KEY = "a-key-of-the-tests"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


def open_gateway(home: Path, **settings: Any) -> LocalGateway:
    def providers(urls: dict[str, str]) -> dict[str, Any]:
        return {
            "openai": {"base_url": urls["openai"] + "/v1", "key": "sk-operator"},
            "groq": {"base_url": urls["groq"] + "/v1", "key": "gsk-operator"},
            "cohere": {"base_url": urls["groq"], "key": "co-operator"},
            "anthropic": {"base_url": urls["groq"], "key": "an-operator"},
            "emberline": {"base_url": urls["groq"]},
        }

    process = {"max_body": 1 << 20}
    settings = {"authentication": True, "default_provider": "openai", **settings}
    return LocalGateway(home, ["openai", "groq"], providers, process, **settings)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGateway]:
    with open_gateway(tmp_path_factory.mktemp("openai")) as made:
        yield made


def new_key(gateway: LocalGateway, **spec: Any) -> str:
    status, _, body = gateway.post("/admin/accounts/default/keys", {"name": "k", **spec}, ADMIN)
    assert status == 201
    return json.loads(body)["secret"]


@pytest.fixture(scope="module")
def alice(gateway: LocalGateway) -> openai.OpenAI:
    return client_of(gateway, new_key(gateway))


@pytest.fixture(scope="module")
def bob(gateway: LocalGateway) -> openai.OpenAI:
    return client_of(gateway, new_key(gateway))


@pytest.fixture(scope="module")
def operator(gateway: LocalGateway) -> openai.OpenAI:
    return client_of(gateway, ADMIN_KEY)


def client_of(gateway: LocalGateway, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


def test_speech(gateway: LocalGateway, alice: openai.OpenAI) -> None:
    spoken = alice.audio.speech.create(model="openai/tts-1", voice="alloy", input="hi")
    assert spoken.content == SPEECH
    sent = gateway.fakes["openai"].requests[-1]
    assert sent.path == "/v1/audio/speech" and sent.json["model"] == "tts-1"
    assert sent.headers["authorization"] == "Bearer sk-operator"


@pytest.mark.parametrize("size", [3, 300_000])
def test_transcription_of_a_form(gateway: LocalGateway, alice: openai.OpenAI, size: int) -> None:
    """The form arrives unchanged, but for the provider's name before the model."""
    sound = bytes(range(1, 10)) * (size // 9) or b"\r\n\0"
    for provider in ("openai", "groq"):
        text = alice.audio.transcriptions.create(model=f"{provider}/whisper-1", file=("a.wav", io.BytesIO(sound)))
        assert text.text == f"whisper-1 heard {len(sound)} bytes"
        sent = gateway.fakes[provider].requests[-1]
        assert sent.path == "/v1/audio/transcriptions" and sound in sent.body and b"openai/whisper" not in sent.body
        assert sent.headers["content-length"] == str(len(sent.body))
    assert alice.audio.translations.create(model="openai/whisper-1", file=("a.wav", sound)).text


def test_images(gateway: LocalGateway, alice: openai.OpenAI) -> None:
    assert alice.images.generate(model="openai/gpt-image-1", prompt="a fox").data
    assert gateway.fakes["openai"].requests[-1].json == {"model": "gpt-image-1", "prompt": "a fox"}
    assert alice.images.generate(prompt="a fox").data, "a request without a model goes to the default provider"
    assert alice.images.edit(model="openai/gpt-image-1", image=b"png", prompt="a fox").data
    assert b"openai/gpt" not in gateway.fakes["openai"].requests[-1].body
    assert alice.images.create_variation(image=b"png").data


def test_moderations_and_rerank(gateway: LocalGateway, alice: openai.OpenAI) -> None:
    assert alice.moderations.create(input="hi").id == "modr_1"
    assert alice.moderations.create(input="hi", model="openai/omni-moderation-latest").model == "omni-moderation-latest"
    headers = {"authorization": f"Bearer {alice.api_key}"}
    body = {"model": "cohere/rerank-v3.5", "query": "q", "documents": ["a", "b"]}
    status, _, reply = gateway.post("/v1/rerank", body, headers)
    assert status == 200 and len(json.loads(reply)["results"]) == 2
    sent = gateway.fakes["groq"].requests[-1]
    assert sent.path == "/v2/rerank" and sent.json["model"] == "rerank-v3.5"


def test_endpoint_that_the_provider_lacks(gateway: LocalGateway, alice: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="provider 'anthropic' has no endpoint 'audio/speech'"):
        alice.audio.speech.create(model="anthropic/claude-sonnet-4-5", voice="alloy", input="hi")
    with pytest.raises(openai.BadRequestError, match="provider 'emberline' has no endpoint 'audio/transcriptions'"):
        alice.audio.transcriptions.create(model="emberline/smollm2", file=("a.wav", b"x"))
    with pytest.raises(openai.NotFoundError, match="no unified endpoint"):
        alice.post("/fine_tuning/jobs", cast_to=object, body={"model": "gpt-5"})


def test_files_and_batches(gateway: LocalGateway, operator: openai.OpenAI, alice: openai.OpenAI) -> None:
    created = operator.files.create(file=("in.jsonl", b'{"custom_id": "1"}'), purpose="batch")
    assert created.bytes == 18 and operator.files.retrieve(created.id).purpose == "batch"
    assert operator.files.content(created.id).content == b'{"custom_id": "1"}'
    assert [each.id for each in operator.files.list()] == [created.id]
    batch = operator.batches.create(input_file_id=created.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert operator.batches.cancel(batch.id).status == operator.batches.retrieve(batch.id).status == "cancelled"
    assert operator.files.delete(created.id).deleted
    elsewhere = operator.with_options(default_headers={"x-emberline-provider": "groq"})
    assert elsewhere.files.create(file=("f", b"x"), purpose="batch").bytes == 1
    assert "x-emberline-provider" not in gateway.fakes["groq"].requests[-1].headers
    with pytest.raises(openai.BadRequestError, match="no endpoint 'files'"):
        operator.with_options(default_headers={"x-emberline-provider": "cohere"}).files.list()
    with pytest.raises(openai.PermissionDeniedError):
        alice.files.list()


def test_limits_of_forms(gateway: LocalGateway, alice: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        alice.audio.transcriptions.create(model="openai/whisper-1", file=("a.wav", bytes(2 << 20)))
    assert refused.value.status_code == 413, "the gateway of the tests takes 1 MiB"
    small = client_of(gateway, new_key(gateway, allowed_models=["whisper-1"]))
    assert small.audio.transcriptions.create(model="openai/whisper-1", file=("a.wav", b"x")).text
    with pytest.raises(openai.PermissionDeniedError):
        small.audio.transcriptions.create(model="openai/whisper-2", file=("a.wav", b"x"))


# -- stored responses and conversations ----------------------------------------------------------------------------


def test_response_is_read_continued_and_deleted(gateway: LocalGateway, alice: openai.OpenAI) -> None:
    first = alice.responses.create(model="openai/gpt-5", input="hi", metadata={"a": "b"})
    assert first.id.startswith("resp_") and "fake" not in first.id
    assert alice.responses.retrieve(first.id).output_text == first.output_text
    second = alice.responses.create(model="openai/gpt-5", input="more", previous_response_id=first.id)
    sent = gateway.fakes["openai"].requests[-1].json
    assert sent["previous_response_id"].startswith("resp_fake") and second.previous_response_id == first.id
    assert alice.responses.retrieve(second.id).previous_response_id == first.id
    assert list(alice.responses.input_items.list(first.id)) == []
    assert alice.responses.cancel(second.id).id == second.id
    alice.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(first.id)


def test_streamed_response_has_one_id(alice: openai.OpenAI) -> None:
    ids = {
        event.response.id
        for event in alice.responses.create(model="openai/gpt-5", input="hi", stream=True)
        if event.type in ("response.created", "response.in_progress", "response.completed")
    }
    assert len(ids) == 1 and alice.responses.retrieve(ids.pop()).status == "completed"


def test_engine_as_provider(gateway: LocalGateway, alice: openai.OpenAI) -> None:
    made = alice.responses.create(model="emberline/smollm2", input="hi")
    assert alice.responses.retrieve(made.id).id == made.id
    assert gateway.fakes["groq"].requests[-1].path.startswith("/v1/responses/resp_fake")
    with pytest.raises(openai.BadRequestError, match="previous_response_id names an object of provider 'emberline'"):
        alice.responses.create(model="openai/gpt-5", input="more", previous_response_id=made.id)


def test_conversations(gateway: LocalGateway, alice: openai.OpenAI, bob: openai.OpenAI) -> None:
    made = alice.conversations.create(items=[{"type": "message", "role": "user", "content": "hi"}])
    assert alice.conversations.retrieve(made.id).id == made.id
    more: Any = [{"type": "message", "role": "user", "content": "more"}]
    alice.conversations.items.create(made.id, items=more)
    items = list(alice.conversations.items.list(made.id))
    assert [item.id for item in items] == ["msg_0", "msg_1"], "ids of items stay"
    reply = alice.responses.create(model="openai/gpt-5", input="and?", conversation=made.id)
    assert reply.conversation is not None and reply.conversation.id == made.id
    assert gateway.fakes["openai"].requests[-1].json["conversation"].startswith("conv_fake")
    for refused in (
        lambda: bob.conversations.retrieve(made.id),
        lambda: bob.conversations.items.list(made.id),
        lambda: bob.conversations.delete(made.id),
        lambda: bob.responses.create(model="openai/gpt-5", input="and?", conversation=made.id),
        lambda: bob.responses.create(model="openai/gpt-5", input="and?", conversation={"id": made.id}),
    ):
        with pytest.raises(openai.NotFoundError):
            refused()
    assert alice.conversations.delete(made.id).deleted


def test_ids_of_other_callers_do_not_exist(
    gateway: LocalGateway, alice: openai.OpenAI, bob: openai.OpenAI, operator: openai.OpenAI
) -> None:
    made = alice.responses.create(model="openai/gpt-5", input="hi")
    own = bob.responses.create(model="openai/gpt-5", input="hi")
    raw = list(gateway.fakes["openai"].account.objects)[-2]
    count = gateway.fakes["openai"].count
    tag = own.id[5:27] + made.id[27:]  # the code of another id before this one
    for id in (made.id, raw, made.id[:-1], made.id + "A", f"resp_{tag}", made.id.replace("resp_", "conv_"), "resp_"):
        for client in (bob, operator):
            for refused in (
                lambda id=id, client=client: client.responses.retrieve(id),
                lambda id=id, client=client: client.responses.delete(id),
                lambda id=id, client=client: client.responses.cancel(id),
                lambda id=id, client=client: client.responses.input_items.list(id),
                lambda id=id, client=client: client.responses.create(
                    model="openai/gpt-5", input="x", previous_response_id=id
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    refused()
    # A provider's own path is no way around, and neither is an escaped field name.
    headers = {"cf-aig-authorization": f"Bearer {bob.api_key}"}
    for field in ("previous_response_id", "previous\\u005fresponse_id", "conversation"):
        body = f'{{"model": "gpt-5", "input": "x", "{field}": "{raw}"}}'.encode()
        twice = body[:-1] + b', "previous_response_id": null, "conversation": null}'
        path = "/v1/default/default/openai/v1/responses/input_tokens"
        assert gateway.post(path, twice, headers)[0] in (400, 404)
        for path in ("/v1/default/default/openai/responses", "/v1/default/default/openai/v1/responses/input_tokens"):
            assert gateway.post(path, body, headers)[0] == 404, (field, path)
        step = b'[{"provider": "openai", "endpoint": "responses", "query": %b}]' % body
        assert gateway.post("/v1/default/default", step, headers)[0] == 404
    assert gateway.fakes["openai"].count == count, "no request was sent"
    assert alice.responses.retrieve(made.id).id == made.id


def test_caller_gets_no_id_for_a_text(gateway: LocalGateway, alice: openai.OpenAI, bob: openai.OpenAI) -> None:
    """A provider's id in metadata or in the model's output does not become an id of the caller."""
    alice.responses.create(model="openai/gpt-5", input="hi")
    raw = list(gateway.fakes["openai"].account.objects)[-1]
    gateway.fakes["openai"].text = raw
    try:
        echo = bob.responses.create(model="openai/gpt-5", input="say it", metadata={"id": raw, "response": raw})
        assert echo.output_text == raw and echo.metadata == {"id": raw, "response": raw}
        streamed = list(bob.responses.create(model="openai/gpt-5", input="say it", metadata={"id": raw}, stream=True))
        assert streamed[-1].response.output_text == raw
    finally:
        gateway.fakes["openai"].text = ""


def test_background_needs_a_token(gateway: LocalGateway, alice: openai.OpenAI, operator: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="background"):
        alice.responses.create(model="openai/gpt-5", input="hi", background=True)
    assert operator.responses.create(model="openai/gpt-5", input="hi", background=True).id


def test_reading_a_response_costs_nothing(gateway: LocalGateway, alice: openai.OpenAI) -> None:
    made = alice.responses.create(model="openai/gpt-5", input="hi")
    read = alice.responses.with_raw_response.retrieve(made.id)
    record = gateway.record(read.headers["cf-aig-log-id"])
    assert (record.usage is None or record.usage.total == 0) and record.micros == 0


def test_budgets_do_not_stop_requests_without_a_model(tmp_path: Path) -> None:
    budgets = [{"name": "team", "limit": 1000, "per": "day"}]
    with open_gateway(tmp_path, budgets=budgets, prices={"openai/gpt-5": {"input": 1, "output": 1}}) as gateway:
        client = client_of(gateway, new_key(gateway))
        made = client.responses.create(model="openai/gpt-5", input="hi", max_output_tokens=8)
        assert client.responses.retrieve(made.id).id == made.id
        assert client.conversations.create().id


def test_provider_header_names_no_pool(gateway: LocalGateway, alice: openai.OpenAI) -> None:
    for name in ("pool", "dynamic", "compat", "nowhere"):
        for path in ("/v1/files", "/v1/moderations", "/v1/conversations"):
            headers = {"authorization": f"Bearer {alice.api_key}", "x-emberline-provider": name}
            status, _, body = gateway.post(path, {"input": "hi"}, headers)
            assert status == 404 and b"is unknown or disabled" in body, (name, path, body)


def test_ids_survive_a_restart(tmp_path: Path) -> None:
    with open_gateway(tmp_path) as gateway:
        key = new_key(gateway)
        made = client_of(gateway, key).responses.create(model="openai/gpt-5", input="hi")
        objects = gateway.fakes["openai"].account.objects
    with open_gateway(tmp_path) as gateway:
        gateway.fakes["openai"].account.objects.update(objects)
        assert client_of(gateway, key).responses.retrieve(made.id).id == made.id


@pytest.mark.parametrize("action", ["redact", "block"])
def test_guardrails_check_stored_responses(tmp_path: Path, action: str) -> None:
    """The provider has stored the unchecked text."""
    guardrails = {"patterns": [{"name": "people", "find": ["email"], "on": "reply", "action": action}]}
    with open_gateway(tmp_path, guardrails=guardrails) as gateway:
        client = client_of(gateway, ADMIN_KEY)
        made = client.responses.create(model="openai/gpt-5", input="hi")
        gateway.fakes["openai"].account.objects[list(gateway.fakes["openai"].account.objects)[-1]]["output"] = [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "ask ada@example.com"}],
            }
        ]
        status, _, body = gateway.post(f"/v1/responses/{made.id}", b"", ADMIN, "GET")
        assert b"ada@example.com" not in body and status == (200 if action == "redact" else 400)
