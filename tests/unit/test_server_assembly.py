"""Parts of a server that are loaded beside its engine."""

from __future__ import annotations

import pytest

from emberline.core.config import DEFAULT_EMBEDDER, ServerConfig
from emberline.core.errors import DownloadError
from emberline.worker import assembly


def test_server_starts_without_network_except_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str) -> None:
        raise DownloadError(f"{name} cannot be downloaded")

    monkeypatch.setattr(assembly, "resolve_model", resolve)
    assert assembly.preload_resources(ServerConfig(embedder=None), {}).embedding_model is None
    assert assembly.preload_resources(ServerConfig(embedder=DEFAULT_EMBEDDER), {}).embedding_model is None
    with pytest.raises(DownloadError):
        assembly.preload_resources(ServerConfig(embedder="hf:org/requested"), {})
