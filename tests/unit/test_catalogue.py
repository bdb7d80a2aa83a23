"""The catalogue of short names: its entries are plausible, names resolve, typing errors get suggestions, and the
tables in docs/models.md are those of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emberline.core.errors import ModelError
from emberline.hub import huggingface
from emberline.hub.catalogue import (
    CatalogueEntry,
    find_source,
    load_catalogue,
    render_catalogue_table,
    render_memory_table,
    suggest_names,
)
from emberline.hub.source import ALIASES, parse_repository, resolve_model

MODELS_PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("entry", load_catalogue().values(), ids=lambda entry: entry.name)
def test_entries_are_plausible(entry: CatalogueEntry) -> None:
    assert entry.name == entry.name.lower() and entry.name not in ALIASES and ":" not in entry.name
    for source in filter(None, (entry.gguf, entry.safetensors)):
        parse_repository(source, source)
    assert entry.licence and entry.context >= 1024
    gigaparameters = entry.parameters / 1e9
    if entry.gguf:  # 4 to 9 bits for each parameter
        assert 0.5 <= entry.gguf_gb / gigaparameters <= 1.15
    assert 0.5 <= entry.full_gb / gigaparameters <= 2.6


def test_short_names_stand_for_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []

    def record(repo: str, *args: object, gguf_choice: str | None, allow_download: bool) -> Path:
        seen.append((repo, gguf_choice))
        return tmp_path

    monkeypatch.setattr(huggingface, "download_snapshot", record)
    for name in ("qwen3-0.6b", "Qwen3-0.6B:latest", "qwen3-0.6b:safetensors"):
        resolve_model(name, tmp_path)
    assert seen == [("Qwen/Qwen3-0.6B-GGUF", "Q8_0")] * 2 + [("Qwen/Qwen3-0.6B", None)]
    assert find_source("qwen3.5-0.8b") == find_source("qwen3.5-0.8b:safetensors") == "hf:Qwen/Qwen3.5-0.8B"


def test_path_goes_before_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-0.6b").mkdir()
    with pytest.raises(ModelError, match="is not a model directory"):
        resolve_model("qwen3-0.6b", tmp_path)


def test_misspelt_names_get_suggestions(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("qwen3-06b", tmp_path)
    assert "did you mean qwen3-0.6b" in str(caught.value.hint)
    assert suggest_names("smolm2", ALIASES)[0] == "smollm2"
    with pytest.raises(ModelError) as caught:
        resolve_model("/no/such/model", tmp_path)
    assert "did you mean" not in str(caught.value.hint)


@pytest.mark.parametrize("table", [render_catalogue_table, render_memory_table], ids=["names", "memory"])
def test_page_has_the_tables_of_the_catalogue(table: Callable[[], Iterator[str]]) -> None:
    assert "\n".join(table()) in MODELS_PAGE.read_text()
