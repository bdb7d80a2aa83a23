"""The catalogue: plausible built-in rows, overriding rows, reloaded files, and no guessed prices."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import pytest

from emberline.core.errors import InvalidRequest
from emberline.gateway.core.cost import Price, compute_cost
from emberline.gateway.costs.catalogue import Catalogue, CatalogueFiles, CatalogueModel
from emberline.wire.usage import Usage

OURS = Catalogue.load()
PROVIDERS = {
    *("openai", "azure-openai", "anthropic", "google-ai-studio", "aws-bedrock", "workers-ai", "groq", "mistral"),
    *("cohere", "deepseek", "perplexity-ai", "grok", "openrouter", "cerebras", "emberline", "ollama"),
}
HEAD = '[acme]\nsource = "https://acme.test/prices"\nas_of = 2026-01-02\n[acme.chat]\n'


def prices(price: Price) -> list[tuple[str, int]]:
    names = ("input", "output", "cached_read", "cache_write", "cache_write_long", "audio", "image")
    return [(name, value) for name in names if (value := getattr(price, name)) is not None]


@pytest.mark.parametrize("model", OURS.models(), ids=lambda model: f"{model.provider}/{model.name}")
def test_every_row_is_plausible(model: CatalogueModel) -> None:
    assert model.kind in ("chat", "embedding")
    assert model.source.startswith("https://") or model.source == "self-hosted"
    assert date(2026, 1, 1) <= model.as_of <= date(2026, 12, 31)
    if model.context is not None and model.max_output is not None:
        assert model.context >= model.max_output
    for price in [model.price, model.price.long.price if model.price and model.price.long else None]:
        if price is None:
            continue
        assert all(0 <= value <= 1_000_000_000 for _, value in prices(price))
        assert (price.cached_read or 0) <= price.input
        assert price.input <= (price.cache_write or price.input) <= (price.cache_write_long or 10**12)
        assert price.output >= price.input or model.kind == "embedding"
    if model.price and model.price.long:
        long = model.price.long
        assert model.context is None or long.above <= model.context
        assert {name for name, _ in prices(long.price)} == {name for name, _ in prices(model.price)}
        for (name, dear), (_, cheap) in zip(prices(long.price), prices(model.price), strict=True):
            assert dear >= cheap, name


def test_catalogue_has_enough_models() -> None:
    priced = [model for model in OURS.models() if model.price is not None]
    assert len(priced) >= 100 and {model.provider for model in OURS.models()} == PROVIDERS


def test_prices_are_exact() -> None:
    model = OURS.model("openai", "gpt-5.4-mini")
    assert model is not None and model.price is not None
    assert (model.price.input, model.price.cached_read, model.price.output) == (750_000, 75_000, 4_500_000)
    assert compute_cost(Usage(input=2422, cached_read=2304, output=4), model.price) == 279
    assert OURS.price("cohere", "command-r7b-12-2024") == Price(37_500, 150_000)


def test_names_are_resolved() -> None:
    def name(provider: str, request: str) -> str | None:
        model = OURS.model(provider, request)
        return model and f"{model.provider}/{model.name}"

    assert name("openai", "gpt-4o-2024-08-06") == "openai/gpt-4o"
    assert name("openai", "gpt-4o-2024-05-13") == "openai/gpt-4o-2024-05-13"
    assert name("anthropic", "claude-sonnet-4-5-20250929") == "anthropic/claude-sonnet-4-5"
    assert name("anthropic", "claude-opus-4-0") == "anthropic/claude-opus-4"
    assert name("google-vertex-ai", "gemini-2.5-pro") == "google-ai-studio/gemini-2.5-pro"
    assert name("google-vertex-ai", "claude-sonnet-4@20250514") is None
    assert name("emberline", "SmolLM2-135M-Instruct") == "emberline/*"
    assert name("openai", "gpt-4o-ultra") is None and name("nobody", "gpt-4o") is None


def test_unknown_prices_are_absent() -> None:
    model = OURS.model("deepseek", "deepseek-v4-flash")
    assert model is not None and model.price is None and model.context == 1_000_000
    assert OURS.price("openai", "unheard-of") is None


def test_user_file_overrides_builtin_rows(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        HEAD + '"rocket" = { input = 1.5, output = 2, context = 10 }\n'
        '[openai]\nsource = "our contract"\nas_of = 2026-02-03\n[openai.chat]\n"gpt-4o" = { input = 2, output = 8 }\n'
    )
    catalogue = Catalogue.load(mine)
    assert catalogue.price("acme", "rocket") == Price(1_500_000, 2_000_000)
    assert catalogue.price("openai", "gpt-4o") == Price(2_000_000, 8_000_000)
    assert catalogue.price("openai", "gpt-4o-mini") == OURS.price("openai", "gpt-4o-mini")


@pytest.mark.parametrize(
    "row",
    [
        '"m" = { output = 1 }',
        '"m" = { input = -1 }',
        '"m" = { input = true }',
        '"m" = { input = "1" }',
        '"m" = { input = 0.0000001 }',
        '"m" = { input = inf }',
        '"m" = { input = nan }',
        '"m" = { inputs = 1 }',
        '"m" = { context = 0 }',
        '"m" = { context = 1.5 }',
        '"m" = { input = 1, long = { input = 2 } }',
        '"m" = { input = 1, long = { above = 5 } }',
        '"m" = 3',
        '"m" = { aliases = "x" }',
        "not toml",
    ],
)
def test_invalid_row_raises_clear_error(tmp_path: Path, row: str) -> None:
    (tmp_path / "bad.toml").write_text(HEAD + row)
    with pytest.raises(InvalidRequest, match="catalogue"):
        Catalogue.load(tmp_path / "bad.toml")


def test_row_needs_source_and_date(tmp_path: Path) -> None:
    for head in ("", 'source = "x"\n', "as_of = 2026-01-01\n"):
        (tmp_path / "bad.toml").write_text(f'[acme]\n{head}[acme.chat]\n"m" = {{ input = 1 }}')
        with pytest.raises(InvalidRequest, match="source"):
            Catalogue.load(tmp_path / "bad.toml")


def test_changed_files_are_reloaded_and_invalid_ones_ignored(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(HEAD + '"m" = { input = 1 }')
    files = CatalogueFiles(mine)
    assert not files.refresh()

    def change(text: str, time: int) -> None:
        mine.write_text(text)
        os.utime(mine, (time, time))

    change(HEAD + '"m" = { input = 2 }', 1000)
    assert files.refresh() and files.current.price("acme", "m") == Price(2_000_000, 0)
    change("broken", 2000)
    with pytest.raises(InvalidRequest):
        files.refresh()
    assert not files.refresh() and files.current.price("acme", "m") == Price(2_000_000, 0)
    change(HEAD + '"m" = { input = 3 }', 3000)
    assert files.refresh() and files.current.price("acme", "m") == Price(3_000_000, 0)
    mine.unlink()
    with pytest.raises(InvalidRequest):
        files.refresh()


def test_lookup_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberline.gateway.costs.catalogue.MAX_CACHED_LOOKUPS", 8)
    found = Catalogue.load()
    known = found.model("openai", "gpt-4o")
    assert known is not None
    for number in range(100):
        assert found.model("nowhere", f"made-up-{number}") is None
        assert found.model("openai", "gpt-4o") is known
    assert len(found._lookups) <= 8
