"""The models in the cache: what is listed, what is removed with a model, and that a model in use stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_server import serve_repository, serving

from emberline.cli.__main__ import main
from emberline.core.errors import EmberlineError, ModelError
from emberline.hub.builtin_models import KNOWN_MODELS
from emberline.hub.cached_models import (
    ModelInUse,
    ModelNotInCache,
    list_cached_models,
    remove_model,
)
from emberline.hub.huggingface import download_snapshot
from emberline.hub.model_lock import hold_model
from emberline.hub.pull import checkpoint_path, gguf_path

SAFETENSORS = {"config.json": b"{}", "model.safetensors": b"x" * 100, "tokenizer.json": b"{}"}
GGUFS = {"m-Q4_0.gguf": b"y" * 40, "m-Q8_0.gguf": b"z" * 80}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("EMBERLINE_CACHE", str(tmp_path))
    return tmp_path


def pull(cache: Path, files: dict[str, bytes], choice: str | None = None) -> Path:
    with serving() as site:
        serve_repository(site, files)
        found = download_snapshot("org/name", None, cache / "hf", False, site.url, gguf_choice=choice)
    assert found is not None
    return found


def make_index(cache: Path, gguf: Path) -> Path:
    """Make the folder that serving a GGUF file makes."""
    index = cache / "checkpoints" / f"{gguf.stem}-index"
    index.mkdir(parents=True)
    (index / "gguf.json").write_text(json.dumps({"files": [{"path": str(gguf), "bytes": 1}], "tensors": {}}))
    return index


def names(cache: Path) -> list[str]:
    return [model.name for model in list_cached_models(cache)]


def test_safetensors_model_is_listed_and_removed(cache: Path) -> None:
    assert names(cache) == []
    pull(cache, SAFETENSORS)
    (model,) = list_cached_models(cache)
    assert model.name == "hf:org/name" and model.num_bytes >= 100
    assert remove_model("hf:org/name", cache).name == "hf:org/name"
    assert names(cache) == [] and not list((cache / "hf").glob("models--*"))


def test_each_gguf_model_is_removed_by_itself(cache: Path) -> None:
    small, large = (pull(cache, GGUFS, label) for label in ("Q4_0", "Q8_0"))
    indexes = [make_index(cache, file) for file in (small, large)]
    assert names(cache) == ["hf:org/name/m-Q4_0.gguf", "hf:org/name/m-Q8_0.gguf"]
    blob = small.resolve()
    remove_model("hf:org/name:Q4_0", cache)
    assert names(cache) == ["hf:org/name/m-Q8_0.gguf"]
    assert not blob.exists() and large.resolve().exists()
    assert [index.exists() for index in indexes] == [False, True]
    remove_model(names(cache)[0], cache)
    assert names(cache) == [] and not list((cache / "hf").glob("models--*"))


def test_builtin_model_is_removed_with_its_file(cache: Path) -> None:
    file, checkpoint = gguf_path("smollm2", cache), checkpoint_path("smollm2", cache)
    for path in (file, checkpoint / "config.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    assert KNOWN_MODELS["smollm2"].is_gguf and names(cache) == ["smollm2"]
    remove_model("smollm2", cache)
    assert not file.exists() and not checkpoint.exists() and names(cache) == []


@pytest.mark.parametrize("as_gguf", [False, True])
def test_model_in_use_is_not_removed(cache: Path, as_gguf: bool) -> None:
    found = pull(cache, GGUFS if as_gguf else SAFETENSORS, "Q4_0" if as_gguf else None)
    served = make_index(cache, found) if as_gguf else found
    name = "hf:org/name:Q4_0" if as_gguf else "hf:org/name"
    first, second = hold_model(served), hold_model(served)
    for held in (first, second):
        with pytest.raises(ModelInUse, match="in use by a server"):
            remove_model(name, cache)
        assert served.is_dir() and len(names(cache)) == 1
        held.close()
    remove_model(name, cache)
    assert not served.exists()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc", "../x", "hf:../..", "hf:org/..", "hf:org/name/../x.gguf", "hf:org/name\0", "smol"]
)
def test_only_models_in_the_cache_are_removed(cache: Path, name: str) -> None:
    folder = pull(cache, SAFETENSORS)
    (cache / "x").write_text("kept")
    with pytest.raises(ModelError):
        remove_model(name, cache)
    assert folder.is_dir() and (cache / "x").exists()


def test_missing_model_is_not_found(cache: Path) -> None:
    for name in ("hf:org/name", "hf:org/name:Q4_0", "qwen3-0.6b", "smollm2"):
        with pytest.raises(ModelNotInCache, match="in the cache"):
            remove_model(name, cache)
    assert issubclass(ModelNotInCache, EmberlineError)


def test_commands_list_and_remove(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert "emberline pull NAME" in capsys.readouterr().out
    pull(cache, SAFETENSORS)
    assert main(["list", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "hf:org/name" in shown and "qwen3-0.6b" in shown and "Apache-2.0" in shown
    assert main(["rm", "hf:org/name"]) == 0
    assert "Removed hf:org/name" in capsys.readouterr().out
    assert main(["rm", "hf:org/name"]) == 1
    assert "not in the cache" in capsys.readouterr().err
