"""The models in the cache: lists them, and removes one that no process uses.

A process that serves a model holds a lock on its directory (`hub/model_lock.py`). Only models in the cache can be
removed, by the name with which they were pulled. Directories and files of the user are never touched.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from emberline.core.errors import ModelError, ModelFileError
from emberline.core.jsonfile import read_object_if_exists
from emberline.hub.builtin_models import KNOWN_MODELS
from emberline.hub.catalogue import find_source
from emberline.hub.gguf_names import choose_gguf_files, group_gguf_files
from emberline.hub.gguf_tensors import INDEX_FILE
from emberline.hub.model_lock import locked_for_removal
from emberline.hub.pull import checkpoint_path, gguf_path
from emberline.hub.source import ALIASES, parse_repository

REPOSITORY_PREFIX = "models--"  # of the folders of huggingface_hub


class ModelNotInCache(ModelError):
    status = 404
    code = "model_not_found"
    default_hint = "emberline list shows the models in the cache"


class ModelInUse(ModelError):
    status = 409
    code = "model_in_use"
    default_hint = "unload it, or stop the server that serves it"


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str  # as resolve_model takes it
    num_bytes: int  # on disk
    changed_at: float  # Unix time
    paths: tuple[Path, ...]  # files and folders that are deleted with the model


# -- listing ----------------------------------------------------------------------------------------------------------


def list_cached_models(cache: Path) -> list[CachedModel]:
    """Return the models in the cache: the built-in ones, then those of the hub by name."""
    builtin = [model for name in ALIASES if (model := _find_builtin(name, cache)) is not None]
    folders = sorted((cache / "hf").glob(f"{REPOSITORY_PREFIX}*--*"))
    return [*builtin, *(model for folder in folders for model in _list_repository(folder))]


def _find_builtin(name: str, cache: Path) -> CachedModel | None:
    paths = [path for path in (checkpoint_path(name, cache),) if path.is_dir()]
    if KNOWN_MODELS[name].is_gguf and (file := gguf_path(name, cache)).is_file():
        paths.append(file.parent)
    return _make_model(name, paths) if paths else None


def _list_repository(folder: Path) -> Iterator[CachedModel]:
    """Yield the models of a repository: one with all files, or one for each GGUF model."""
    repository = folder.name.removeprefix(REPOSITORY_PREFIX).replace("--", "/", 1)
    links = _find_links(folder)
    if not links:
        return
    if any(path.endswith(".safetensors") for path in links):
        yield _make_model(f"hf:{repository}", [folder])
        return
    for first, files in group_gguf_files(links).items():
        yield _make_model(f"hf:{repository}/{first}", [file for path in files for file in links[path]])


def _find_links(folder: Path) -> dict[str, list[Path]]:
    """Return the files of all revisions of a repository, by their path in it."""
    links: dict[str, list[Path]] = defaultdict(list)
    for revision in (folder / "snapshots").glob("*"):
        for path in sorted(revision.rglob("*")):
            if path.is_file():
                links[path.relative_to(revision).as_posix()].append(path)
    return links


def _make_model(name: str, paths: Sequence[Path]) -> CachedModel:
    files = {file.resolve() for path in paths for file in ([path] if path.is_file() else path.rglob("*"))}
    stats = [file.stat() for file in files if file.is_file()]
    changed_at = max((stat.st_mtime for stat in stats), default=0.0)
    return CachedModel(name, sum(stat.st_size for stat in stats), changed_at, tuple(paths))


# -- removal ----------------------------------------------------------------------------------------------------------


def remove_model(name: str, cache: Path) -> CachedModel:
    """Delete a model from the cache, and return what was deleted.

    `name`: as in `emberline pull`, but no path. Raises ModelNotInCache, or ModelInUse if a process serves the model.
    """
    model = find_cached_model(name, cache)
    indexes = list(_find_indexes(model, cache))
    with ExitStack() as locks:
        for folder in (*indexes, *_list_served_folders(model)):
            try:
                locks.enter_context(locked_for_removal(folder))
            except BlockingIOError:
                raise ModelInUse(f"model {name} is in use by a server", param="model") from None
        for path in (*model.paths, *indexes):
            _delete(path)
    _delete_empty_repository(model, cache)
    return model


def find_cached_model(name: str, cache: Path) -> CachedModel:
    """Return the model with this name. Raises ModelNotInCache, or ModelError for a name that is not valid."""
    if name in ALIASES:
        found = _find_builtin(name, cache)
    else:
        source = name if name.startswith("hf:") else find_source(name)
        found = _find_hub_model(source.removeprefix("hf:").partition("@")[0], cache) if source is not None else None
    if found is None:
        raise ModelNotInCache(f"model {name[:200]!r} is not in the cache", param="model")
    return found


def _find_hub_model(address: str, cache: Path) -> CachedModel | None:
    repository, choice = parse_repository(address, address)
    folder = cache / "hf" / (REPOSITORY_PREFIX + repository.replace("/", "--"))
    if not folder.is_dir():
        return None
    links = _find_links(folder)
    if choice is None:
        return _make_model(f"hf:{repository}", [folder])
    try:
        files = choose_gguf_files(links, choice, f"hf:{repository}")
    except ModelError:
        return None
    return _make_model(f"hf:{address}", [link for path in files for link in links[path]])


def _list_served_folders(model: CachedModel) -> Iterator[Path]:
    """Yield the folders that a process holds if it serves this model without an index."""
    for path in model.paths:
        if path.is_dir():
            yield path
            yield from (revision for revision in (path / "snapshots").glob("*") if revision.is_dir())


def _find_indexes(model: CachedModel, cache: Path) -> Iterator[Path]:
    """Yield the folders in the cache that were made from the model's files: GGUF indexes and added tokenizers."""
    for folder in sorted((cache / "checkpoints").glob("*")):
        if folder.is_dir() and folder not in model.paths and _is_made_from(folder, model.paths):
            yield folder


def _is_made_from(folder: Path, paths: Iterable[Path]) -> bool:
    try:
        listed = read_object_if_exists(folder / INDEX_FILE).get("files", [])
        sources = [Path(file["path"]) for file in listed]
    except (ModelFileError, KeyError, TypeError, AttributeError):
        sources = []
    sources += [file.readlink() for file in folder.iterdir() if file.is_symlink()]
    owned = [each for path in paths for each in (path, path.resolve())]
    return any(source.is_relative_to(path) for source in sources for path in owned)


def _delete(path: Path) -> None:
    """Delete a folder, or a file. If the file is a link to a blob of the hub's cache, the blob too."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
    blob = path.resolve()
    path.unlink(missing_ok=True)
    if blob != path and blob.parent.name == "blobs":
        blob.unlink(missing_ok=True)


def _delete_empty_repository(model: CachedModel, cache: Path) -> None:
    """Delete the folder of a repository of which no weights are left."""
    for path in model.paths:
        folder = next((each for each in path.parents if each.parent == cache / "hf"), None)
        if folder is not None and folder.is_dir() and not any(name.endswith(".gguf") for name in _find_links(folder)):
            shutil.rmtree(folder)
