"""Stored responses and token counts of the real engine, through a gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from local_gateway import LocalGateway

ADMIN = {"authorization": "Bearer a-key-of-the-tests"}


def test_responses_of_the_engine(running: Any, tmp_path: Path) -> None:
    with LocalGateway(tmp_path, (), lambda _: {"emberline": {"base_url": running.url}}) as gateway:

        def new_client() -> openai.OpenAI:
            _, _, body = gateway.post("/admin/accounts/default/keys", {"name": "k"}, ADMIN)
            return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=json.loads(body)["secret"], max_retries=0)

        alice, bob = new_client(), new_client()
        first = alice.responses.create(model="smollm2", input="My name is Ada.", max_output_tokens=8, temperature=0)
        second = alice.responses.create(
            model="smollm2", input="What is my name?", previous_response_id=first.id, max_output_tokens=8
        )
        assert second.previous_response_id == first.id and second.usage is not None and first.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens + 8
        assert alice.responses.retrieve(first.id).output_text == first.output_text
        assert len(list(alice.responses.input_items.list(second.id))) == 3
        for refused in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                refused(first.id)
        events = list(
            alice.responses.create(
                model="smollm2", input="hi", previous_response_id=second.id, max_output_tokens=8, stream=True
            )
        )
        assert alice.responses.retrieve(events[-1].response.id).previous_response_id == second.id  # type: ignore[union-attr]
        alice.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            alice.responses.retrieve(first.id)
        messages: Any = [{"role": "user", "content": "What is my name?"}]
        claude = anthropic.Anthropic(base_url=gateway.url, api_key=alice.api_key, max_retries=0)
        count = claude.messages.count_tokens(model="smollm2", messages=messages).input_tokens
        assert alice.responses.input_tokens.count(model="smollm2", input="What is my name?").input_tokens == count > 5
