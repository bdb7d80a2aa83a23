"""GGUF models that are split into parts, and the choice of one model from a repository of GGUF files."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import ggufs
import numpy as np
import pytest
from hub_server import Page, Site, serve_repository, serving
from safetensors.numpy import load_file

from emberline.core.errors import DownloadError, ModelError, ModelFileError
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.gguf_model import GGUFModel
from emberline.hub.gguf_names import choose_gguf_files
from emberline.hub.huggingface import download_snapshot
from emberline.hub.source import resolve_model

PARTS = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Return a directory with a model in three parts."""
    folder = tmp_path / "split"
    folder.mkdir()
    ggufs.write(folder / "m.gguf", tensors_per_part=8)
    assert sorted(file.name for file in folder.iterdir()) == PARTS
    return folder


def test_any_part_or_the_directory_gives_the_whole_model(split: Path, tmp_path: Path) -> None:
    values = ggufs.write(tmp_path / "whole.gguf")
    whole = resolve_model(str(tmp_path / "whole.gguf"), tmp_path / "cache")
    found = {resolve_model(str(path), tmp_path / "cache") for path in [split, *(split / part for part in PARTS)]}
    assert len(found) == 1
    (folder,) = found
    assert Checkpoint.open(folder).config == Checkpoint.open(whole).config
    assert {info.file.name for info in Checkpoint.open(folder).tensors.values()} == set(PARTS)
    converted = [resolve_model(str(path), tmp_path / "cache", as_safetensors=True) for path in (split, whole)]
    first, second = ((directory / "model.safetensors").read_bytes() for directory in converted)
    assert first == second
    loaded = load_file(converted[0] / "model.safetensors")
    assert np.array_equal(loaded["model.layers.1.mlp.down_proj.weight"], values["blk.1.ffn_down.weight"])


def test_a_changed_part_is_converted_again(split: Path, tmp_path: Path) -> None:
    first = resolve_model(str(split), tmp_path / "cache")
    ggufs.write(split / "m.gguf", values=ggufs.tensors("llama", np.random.default_rng(8)), tensors_per_part=8)
    assert resolve_model(str(split), tmp_path / "cache") != first


@pytest.mark.parametrize("missing", PARTS)
def test_a_missing_part_is_named(missing: str, split: Path, tmp_path: Path) -> None:
    (split / missing).unlink()
    given = next(part for part in PARTS if part != missing)
    with pytest.raises(ModelFileError, match=f"{missing} is missing: {given} is one of 3 parts"):
        resolve_model(str(split / given), tmp_path / "cache")
    with pytest.raises(ModelError, match=f"but not {missing}"):
        resolve_model(str(split), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def replace_integer(path: Path, key: str, old: int, new: int) -> None:
    """Change a 16-bit or 32-bit value of the file's metadata."""
    data, name = path.read_bytes(), struct.pack("<Q", len(key)) + key.encode()
    at = data.index(name) + len(name)
    (kind,) = struct.unpack_from("<I", data, at)
    code = {2: "<H", 5: "<i"}[kind]
    assert struct.unpack_from(code, data, at + 4) == (old,)
    path.write_bytes(data[: at + 4] + struct.pack(code, new) + data[at + 4 + struct.calcsize(code) :])


@pytest.mark.parametrize(
    ("key", "old", "new"), [("split.no", 1, 2), ("split.count", 3, 4), ("split.tensors.count", 21, 20)]
)
def test_a_part_with_other_numbers_is_refused(key: str, old: int, new: int, split: Path) -> None:
    replace_integer(split / PARTS[1], key, old, new)
    with pytest.raises(ModelFileError, match=rf"{PARTS[1]} is not part 2 of 3 .*{key} is {new}, not {old}"):
        GGUFModel(split / PARTS[0])


def test_parts_with_too_few_tensors_are_refused(split: Path) -> None:
    for part in PARTS:
        replace_integer(split / part, "split.tensors.count", 21, 22)
    with pytest.raises(ModelFileError, match=r"have 21 tensors, but split\.tensors\.count is 22"):
        GGUFModel(split / PARTS[0])


def test_a_part_of_another_model_is_refused(split: Path) -> None:
    shutil.copy(split / PARTS[0], split / PARTS[1])
    replace_integer(split / PARTS[1], "split.no", 0, 1)
    with pytest.raises(ModelFileError, match=rf"tensor '.*' is in both .*{PARTS[0]} and .*{PARTS[1]}"):
        GGUFModel(split / PARTS[0])
    other = (split / PARTS[1]).read_bytes().replace(b"smollm", b"refact")
    (split / PARTS[1]).write_bytes(other)
    with pytest.raises(ModelFileError, match=rf"{PARTS[1]} is of another model .*tokenizer.ggml.pre differs"):
        GGUFModel(split / PARTS[0])


def test_names_and_metadata_must_agree(split: Path, tmp_path: Path) -> None:
    (split / PARTS[1]).rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match=r"renamed\.gguf is one of 3 parts"):
        GGUFModel(tmp_path / "renamed.gguf")
    ggufs.write(tmp_path / "whole.gguf")
    for number in (1, 2):
        shutil.copy(tmp_path / "whole.gguf", tmp_path / f"w-0000{number}-of-00002.gguf")
    with pytest.raises(ModelFileError, match=r"split\.no is None, not 0"):
        GGUFModel(tmp_path / "w-00001-of-00002.gguf")
    (tmp_path / "w-00003-of-00002.gguf").touch()
    with pytest.raises(ModelFileError, match="names part 3 of 2"):
        GGUFModel(tmp_path / "w-00003-of-00002.gguf")


REPOSITORY = [
    "README.md",
    "Org-Q4_K_M.gguf",
    "Org-Q4_K_S.gguf",
    "Org-UD-Q4_K_XL.gguf",
    "mmproj-F16.gguf",
    "Org-imatrix.gguf",
    "Q8_0/Org-Q8_0-00001-of-00002.gguf",
    "Q8_0/Org-Q8_0-00002-of-00002.gguf",
    "BF16/Org.BF16-00001-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("choice", "files"),
    [
        ("Q4_K_M", ["Org-Q4_K_M.gguf"]),
        ("q4_k_s", ["Org-Q4_K_S.gguf"]),
        ("UD-Q4_K_XL", ["Org-UD-Q4_K_XL.gguf"]),
        ("Org-Q4_K_S.gguf", ["Org-Q4_K_S.gguf"]),
        ("Q8_0", REPOSITORY[6:8]),
        ("Q8_0/Org-Q8_0-00002-of-00002.gguf", REPOSITORY[6:8]),
    ],
)
def test_choice_of_a_quantisation(choice: str, files: list[str]) -> None:
    assert choose_gguf_files(REPOSITORY, choice, "hf:org/name") == files


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (None, "hf:org/name has several GGUF models: BF16/Org.BF16, Org-Q4_K_M, Org-Q4_K_S, Org-UD-Q4_K_XL, Q8_0/Org"),
        ("Q4_K", "no GGUF model for 'Q4_K'; it has BF16/Org.BF16, Org-Q4_K_M"),
        ("Org", "several GGUF models for 'Org': "),
        ("other.gguf", r"no GGUF model for 'other.gguf'; it has "),
        ("mmproj-F16.gguf", "no GGUF model for 'mmproj-F16.gguf'"),
        ("BF16", r"BF16/Org.BF16-00001-of-00002.gguf, but not BF16/Org.BF16-00002-of-00002.gguf"),
    ],
)
def test_unclear_choices_list_the_models(choice: str | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        choose_gguf_files(REPOSITORY, choice, "hf:org/name")


def test_directory_of_several_models(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf", "mmproj.gguf"):
        ggufs.write(tmp_path / name)
    with pytest.raises(ModelError, match="several GGUF models: a-Q4_0, a-Q8_0"):
        resolve_model(str(tmp_path), tmp_path / "cache")
    (tmp_path / "a-Q4_0.gguf").unlink()
    assert Checkpoint.open(resolve_model(str(tmp_path), tmp_path / "cache")).config["model_type"] == "llama"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving() as site:
        yield site


def fetched(site: Site) -> set[str]:
    return {path.rpartition("/")[2] for method, path, _ in site.seen if method == "GET" and "/resolve/" in path}


def test_hub_repository_of_one_gguf_model(site: Site, tmp_path: Path) -> None:
    ggufs.write(tmp_path / "m-Q8_0.gguf", quant="Q8_0")
    data = (tmp_path / "m-Q8_0.gguf").read_bytes()
    serve_repository(site, {"config.json": b"{}", "m-Q8_0.gguf": data, "mmproj-m.gguf": b""})
    first = download_snapshot("org/name", None, tmp_path / "hf", show_progress=False, endpoint=site.url)
    assert first is not None and first.name == "m-Q8_0.gguf" and first.read_bytes() == data
    assert fetched(site) == {"config.json", "m-Q8_0.gguf"}
    directory = resolve_model("hf:org/name", tmp_path, allow_download=False)
    assert directory.name.startswith("m-Q8_0-")
    assert Checkpoint.open(directory).config["model_type"] == "llama"


def test_hub_split_model_is_fetched_whole(site: Site, split: Path, tmp_path: Path) -> None:
    files = {f"Q4_0/{part.replace('m-', 'm-Q4_0-')}": (split / part).read_bytes() for part in PARTS}
    serve_repository(site, {**files, "m-Q8_0.gguf": b"other", "model.safetensors": b"unwanted"})

    def get(choice: str | None, url: str | None = site.url, allow_download: bool = True) -> Path | None:
        return download_snapshot(
            "org/name", "v1", tmp_path / "hf", False, url, gguf_choice=choice, allow_download=allow_download
        )

    assert get("Q4_0", allow_download=False) is None
    first = get("Q4_0")
    assert first is not None and first.name == "m-Q4_0-00001-of-00003.gguf"
    assert fetched(site) == {name.partition("/")[2] for name in files}
    assert get("Q4_0/m-Q4_0-00003-of-00003.gguf") == first
    assert get("Q4_0", allow_download=False) == first
    assert get("Q8_0", allow_download=False) is None
    with GGUFModel(first) as model:
        assert len(model.tensors) == 21
    with pytest.raises(ModelError, match=r"hf:org/name@v1 has no GGUF model for 'Q2_K'; it has Q4_0/m-Q4_0, m-Q8_0"):
        get("Q2_K")
    resolved = resolve_model("hf:org/name:Q4_0@v1", tmp_path, allow_download=False)
    assert Checkpoint.open(resolved).config["num_hidden_layers"] == ggufs.LAYERS
    site.fallback = lambda path: Page(b"", status=500)
    site.pages.clear()
    assert get("Q4_0") == first, "the cache is used if the hub does not answer"
    (first.parent / "m-Q4_0-00002-of-00003.gguf").unlink()
    assert get("Q4_0", allow_download=False) is None
    with pytest.raises(DownloadError):
        download_snapshot("org/other", None, tmp_path / "hf", False, site.url, gguf_choice="Q4_0")


def test_hub_repository_of_several_gguf_models(site: Site, tmp_path: Path) -> None:
    serve_repository(site, {"m-Q4_0.gguf": b"", "m-Q8_0.gguf": b""})
    with pytest.raises(ModelError, match="hf:org/name has several GGUF models: m-Q4_0, m-Q8_0") as raised:
        download_snapshot("org/name", None, tmp_path, show_progress=False, endpoint=site.url)
    assert "hf:org/name:Q4_K_M" in str(raised.value.hint)
    assert not fetched(site)
