"""pytest plugin: vLLM's RemoteOpenAIServer becomes a client of `emberline serve`."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from serving import option, serving, set_aside
from stubs import set_module, stub_packages

API_KEY = "token-abc123"
# A test that starts its server with one of these is about a part of vLLM that has no counterpart.
FOREIGN_OPTIONS = ("--chat-template", "--middleware", "--root-path", "--tokenizer-mode", "--lora-modules", "--uds")


class RemoteOpenAIServer:
    DUMMY_API_KEY = API_KEY

    def __init__(self, model: str, vllm_serve_args: Any = (), **_: Any) -> None:
        arguments = [str(each) for each in vllm_serve_args]
        for name in FOREIGN_OPTIONS:
            if name != "--lora-modules" and option(arguments, name) is not None:
                set_aside(f"start option {name}")
        context = option(arguments, "--max-model-len", "--max_model_len")
        served = option(arguments, "--served-model-name") or model
        api_key = option(arguments, "--api-key")
        serving.start(served, context=int(context) if context else None, api_key=api_key)
        self.url_root = serving.url
        self.host, self.port, self.uds = "127.0.0.1", serving.port, None

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(part.strip("/") for part in parts)

    def get_client(self, **kwargs: Any) -> openai.OpenAI:
        return openai.OpenAI(**_client(self.url_for("v1"), kwargs))

    def get_async_client(self, **kwargs: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**_client(self.url_for("v1"), kwargs))

    def get_client_anthropic(self, **kwargs: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**_client(self.url_root, kwargs))

    def get_async_client_anthropic(self, **kwargs: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**_client(self.url_root, kwargs))


def _client(base_url: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"timeout": 600, "max_retries": 0, "base_url": base_url, "api_key": API_KEY} | kwargs


def _tokenizer(*_: Any, **__: Any) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(os.environ["SMOLLM2_TOKENIZER"])


class _Platform:
    """Answers no to every question about accelerators."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: False


def _install() -> None:
    stub_packages("vllm", *([] if importlib.util.find_spec("torch") else ["torch"]))
    import vllm.platforms
    import vllm.tokenizers
    import vllm.transformers_utils.repo_utils
    import vllm.utils.argparse_utils  # noqa: F401

    set_module("vllm.tokenizers", get_tokenizer=_tokenizer)
    set_module("vllm.platforms", current_platform=_Platform())
    hub = types.SimpleNamespace(snapshot_download=lambda *args, **kwargs: "none")
    set_module("vllm.transformers_utils.repo_utils", hf_api=lambda: hub)
    utils = types.ModuleType("tests.utils")
    skip = pytest.mark.skip(reason="needs several GPUs or float8")
    utils.__dict__.update(
        RemoteOpenAIServer=RemoteOpenAIServer,
        VLLM_PATH=Path.cwd(),
        ROCM_EXTRA_ARGS=[],
        ROCM_ENV_OVERRIDES={},
        multi_gpu_only=lambda **_: skip,
        requires_fp8=skip,
    )
    sys.modules["tests.utils"] = utils


_install()
