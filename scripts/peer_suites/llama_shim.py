"""pytest plugin: llama.cpp's ServerProcess becomes `emberline serve`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import openai
from serving import serving, set_aside

sys.path.insert(0, str(Path.cwd()))
import utils

CHAT_MODELS = ("ggml-org/test-model-stories260K", "ggml-org/models")
EMBEDDER = "bert-bge-small/ggml-model-f16.gguf"
# Start options of llama-server without a counterpart here, by attribute of ServerProcess.
FOREIGN_OPTIONS = [
    "model_draft",
    "slot_save_path",
    "server_reranking",
    "models_dir",
    "models_preset",
    "lora_files",
    "enable_ctx_shift",
    "spec_type",
    "chat_template",
    "chat_template_file",
    "mmproj_url",
    "media_path",
    "sleep_idle_seconds",
    "cache_ram",
    "log_path",
    "ui_mcp_proxy",
    "gcp_compat",
    "server_tools",
    "server_tools_runtime",
    "mcp_servers_config",
    "mcp_servers_json",
    "model_url",
    "pooling",
]


_served: list[str] = []


def _start(self: Any, timeout_seconds: int = 60) -> None:
    for name in FOREIGN_OPTIONS:
        if getattr(self, name):
            set_aside(f"start option {name}")
    embeds = self.model_hf_file == EMBEDDER
    if not embeds and self.model_hf_repo not in CHAT_MODELS:
        set_aside(f"another model: {self.model_hf_repo}")
    name = "smollm2" if embeds else self.model_alias or "smollm2"
    _served.append("minilm" if embeds else name)
    if embeds:
        serving.start("smollm2", embedder="minilm")
    else:
        # Prompts of these tests are made for a context of 512 tokens in another tokenizer's.
        serving.start(name, context=self.n_ctx, api_key=self.api_key)
    self.server_port = serving.port


# Endpoints in shapes of llama.cpp's own, which Emberline does not serve.
OWN_ENDPOINTS = [
    "/completion",
    "/completions",
    "/infill",
    "/props",
    "/slots",
    "/lora-adapters",
    "/apply-template",
    "/rerank",
    "/predict",
    "/tools",
    "/cors-proxy",
    "/v1/stream",
    "/chat/completions/input_tokens",
    "/models/load",
    "/models/unload",
]
# llama.cpp answers these with and without /v1.
TWO_PATHS = ("/chat/completions", "/models", "/embeddings", "/responses")


def _path(path: str) -> str:
    bare = path.partition("?")[0]
    if any(bare == own or (own == "/slots" and bare.startswith("/slots/")) for own in OWN_ENDPOINTS):
        set_aside(f"llama.cpp's own endpoint {bare}")
    return f"/v1{path}" if bare in TWO_PATHS else path


def _with_served_name(body: Any) -> Any:
    """llama-server serves its one model whatever name a request has. A request without one keeps none."""
    return {**body, "model": _served[-1]} if isinstance(body, dict) and "model" in body else body


def _on_our_path(method_of: Any) -> Any:
    def call(self: Any, method: str, path: str, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        return method_of(self, method, _path(path), _with_served_name(data), *args, **kwargs)

    return call


def _post(self: openai.OpenAI, path: str, *, body: Any = None, **kwargs: Any) -> Any:
    versioned = str(self.base_url).rstrip("/").endswith("/v1")
    return _openai_post(self, path if versioned else _path(path), body=_with_served_name(body), **kwargs)


_openai_post = openai.OpenAI.post
openai.OpenAI.post = _post  # type: ignore[method-assign,assignment]
utils.ServerProcess.make_request = _on_our_path(utils.ServerProcess.make_request)
utils.ServerProcess.make_stream_request = _on_our_path(utils.ServerProcess.make_stream_request)
utils.ServerProcess.start = _start
utils.ServerProcess.stop = lambda self: None
utils.ServerPreset.load_all = staticmethod(lambda: None)
os.environ.pop("DEBUG_EXTERNAL", None)
