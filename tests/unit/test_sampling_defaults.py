"""Sampling defaults from a checkpoint's generation_config.json, in requests and in the model list."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import WorkerHarness

from emberline.core.config import ServerConfig
from emberline.core.errors import InvalidRequest
from emberline.worker.catalog import ModelCatalog
from emberline.worker.sampling_defaults import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_MAX_TOKENS_OF_REASONING,
    load_sampling_defaults,
    with_default_max_tokens,
)

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "max_new_tokens": 7}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
MEANT = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 7}


def write(folder: Path, config: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def test_settings_get_sampling_param_names(tmp_path: Path) -> None:
    assert load_sampling_defaults(write(tmp_path, QWEN)) == MEANT
    assert load_sampling_defaults(tmp_path, "none") == {}


def test_generation_config_from_another_directory(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path / "model", str(write(tmp_path, QWEN))) == MEANT
    with pytest.raises(InvalidRequest) as caught:
        load_sampling_defaults(tmp_path, str(tmp_path / "nothing"))
    assert caught.value.param == "generation_config"


def test_invalid_values_are_skipped(tmp_path: Path) -> None:
    config = {"temperature": -1, "top_k": True, "top_p": "a", "min_p": None, "repetition_penalty": 1.1}
    assert load_sampling_defaults(write(tmp_path, config)) == {"repetition_penalty": 1.1}


def test_answers_have_a_limit_unless_the_operator_turns_it_off() -> None:
    assert with_default_max_tokens({}, None, reasons=False) == {"max_tokens": DEFAULT_MAX_TOKENS}
    assert with_default_max_tokens({}, None, reasons=True) == {"max_tokens": DEFAULT_MAX_TOKENS_OF_REASONING}
    assert with_default_max_tokens(MEANT, None, reasons=True) == MEANT  # the checkpoint's own limit
    assert with_default_max_tokens(MEANT, 50, reasons=True) == {**MEANT, "max_tokens": 50}
    assert "max_tokens" not in with_default_max_tokens(MEANT, 0, reasons=False)
    with pytest.raises(InvalidRequest, match="default_max_tokens is -1"):
        ServerConfig(default_max_tokens=-1)


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/chat/completions", CHAT, 7),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 9}, 9),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 9}, 9),
        ("/v1/chat/completions", {**CHAT, "n_predict": -1}, None),
        ("/v1/chat/completions", {**CHAT, "min_tokens": 7}, 7),
        ("/v1/chat/completions", {**CHAT, "min_tokens": 50}, 50),
        ("/v1/completions", {"model": "m", "prompt": "a", "min_tokens": 50}, 50),
        ("/v1/responses", {"model": "m", "input": "a"}, 7),
        ("/v1/responses", {"model": "m", "input": "a", "max_output_tokens": 20}, 20),
        ("/v1/messages", {**CHAT, "max_tokens": 9}, 9),
        ("/v1/completions", {"model": "m", "prompt": "a"}, 16),
    ],
)
def test_default_limit_applies_where_the_request_sets_none(path: str, body: dict[str, Any], limit: int | None) -> None:
    worker = make_worker()
    worker.post(path, body)
    assert worker.engine.submissions[0].params.max_tokens == limit


def make_worker() -> WorkerHarness:
    worker = WorkerHarness(lambda before, index: before + "abc")
    (model,) = worker.catalog
    catalog = ModelCatalog([replace(model, sampling_defaults=MEANT)])
    worker.app._catalog = worker.app._handler._catalog = catalog
    return worker


def sampled(path: str, **fields: Any) -> tuple[float, int, float, int | None]:
    worker = make_worker()
    assert worker.post(path, fields).status == 200
    params = worker.engine.submissions[0].params
    return params.temperature, params.top_k, params.top_p, params.max_tokens


def test_defaults_fill_only_unset_fields() -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    assert sampled("/v1/chat/completions", **chat) == (0.6, 20, 0.95, 7)
    assert sampled("/v1/chat/completions", **chat, temperature=0, max_tokens=3) == (0.0, 20, 0.95, 3)
    assert sampled("/v1/chat/completions", **chat, temperature=1, top_k=-1, top_p=1.0) == (1.0, 0, 1.0, 7)
    assert sampled("/v1/chat/completions", **chat, top_p=0) == (0.0, 20, 1.0, 7)
    assert sampled("/v1/messages", **chat, max_tokens=5) == (0.6, 20, 0.95, 5)
    assert sampled("/v1/responses", input="hi", top_k=3) == (0.6, 3, 0.95, 7)
    assert sampled("/v1/completions", prompt="hi") == (0.6, 20, 0.95, 16)  # OpenAI's default length


def test_response_repeats_default_settings() -> None:
    reply = make_worker().post("/v1/responses", {"input": "hi"}).json
    assert (reply["temperature"], reply["top_p"]) == (0.6, 0.95)


def test_model_list_has_default_settings() -> None:
    assert make_worker().app.served_models()[0].sampling_defaults == MEANT
