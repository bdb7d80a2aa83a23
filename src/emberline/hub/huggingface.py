"""Downloads repositories of the Hugging Face hub into the cache with huggingface_hub.

Pickled weights are never downloaded.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from emberline.core.errors import DownloadError, ModelError
from emberline.hub.download import DISK_FULL_ERRNOS
from emberline.hub.gguf_names import choose_gguf_files
from emberline.hub.progress import ShowProgress

ALLOWED_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
# Weights of other frameworks and duplicates are in folders; so are the modules of sentence embedders, with a number.
IGNORED_PATTERNS = [
    "*/*.safetensors", "*/*.txt", "*/*.model", "*/*.jinja", "[!0-9]*/*.json", "*/*/*", ".*", "consolidated*",
    "*.onnx.json",
]  # fmt: skip


def download_snapshot(
    repo: str,
    revision: str | None,
    cache: Path,
    show_progress: ShowProgress,
    endpoint: str | None = None,
    *,
    gguf_choice: str | None = None,
    allow_download: bool = True,
) -> Path | None:
    """Return a repository's directory in the cache, or the first file of its GGUF model. It is downloaded if necessary.

    `gguf_choice`: a GGUF file of the repository, or a label such as Q4_K_M; None: the safetensors files, or the only
    GGUF model of a repository without them. With `allow_download` False nothing is downloaded; return None if the model
    is not in the cache. Raise ModelError if the repository has no such model, or several.
    """
    hub = _HubRepository(repo, revision, cache, show_progress, endpoint)
    if not allow_download:
        return _find_in_cache(hub, gguf_choice)
    if gguf_choice is None:
        folder = hub.download(ALLOWED_PATTERNS, IGNORED_PATTERNS)
        if any(folder.glob("*.safetensors")):
            return folder
    files = hub.list_files()
    if gguf_choice is None and not any(file.endswith(".gguf") for file in files):
        hint = "use a model with safetensors or GGUF weights; pickled weights are not loaded"
        raise ModelError(f"{hub} has no *.safetensors file and no *.gguf file", hint=hint)
    chosen = choose_gguf_files(files, gguf_choice, str(hub))
    folder = hub.download([glob.escape(file) for file in chosen])
    missing = [file for file in chosen if not (folder / file).is_file()]
    if missing:
        raise DownloadError(f"{missing[0]} of {hub} was not downloaded", hint="run the command again")
    return folder / chosen[0]


def _find_in_cache(hub: _HubRepository, gguf_choice: str | None) -> Path | None:
    if gguf_choice is None:
        folder = hub.find_cached(ALLOWED_PATTERNS, IGNORED_PATTERNS)
        if folder is not None and any(folder.glob("*.safetensors")):
            return folder
    folder = hub.find_cached([])
    if folder is None:
        return None
    files = _list_folder(folder)
    try:
        return folder / choose_gguf_files(files, gguf_choice, str(hub))[0]
    except ModelError:
        if gguf_choice is None and any(file.endswith(".gguf") for file in files):
            raise  # several models are in the cache
        return None


def _list_folder(folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


class _HubRepository:
    """A repository of the hub at a revision, and its copy in the cache."""

    def __init__(
        self, repo: str, revision: str | None, cache: Path, show_progress: ShowProgress, endpoint: str | None
    ) -> None:
        self.repo, self.revision, self.cache = repo, revision, cache
        self.show_progress, self.endpoint = show_progress, endpoint

    def __str__(self) -> str:
        return f"hf:{self.repo}" + (f"@{self.revision}" if self.revision else "")

    def download(self, allowed: Sequence[str], ignored: Sequence[str] | None = None) -> Path:
        """Download the files that match the patterns, and return the repository's directory in the cache."""
        with self._typed_errors():
            return self._call_snapshot_download(allowed, ignored, only_cached=False)

    def find_cached(self, allowed: Sequence[str], ignored: Sequence[str] | None = None) -> Path | None:
        """Return the directory in the cache, or None if it lacks a file that matches the patterns."""
        with self._typed_errors():
            from huggingface_hub.errors import LocalEntryNotFoundError

            try:
                return self._call_snapshot_download(allowed, ignored, only_cached=True)
            except LocalEntryNotFoundError:
                return None

    def list_files(self) -> list[str]:
        """Return the paths of all files of the repository, or of those in the cache if the hub does not answer."""
        with self._typed_errors():
            from huggingface_hub import HfApi
            from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

            try:
                info = HfApi(endpoint=self.endpoint).model_info(self.repo, revision=self.revision or "main")
                return [file.rfilename for file in info.siblings or ()]
            except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError):
                raise
            except Exception:
                folder = self.find_cached([])
                if folder is None:
                    raise
                return _list_folder(folder)

    def _call_snapshot_download(
        self, allowed: Sequence[str], ignored: Sequence[str] | None, *, only_cached: bool
    ) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import tqdm

        shown = self.show_progress

        class OptionalProgressBar(tqdm):
            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **{**kwargs, "disable": shown is not True})  # type: ignore[no-untyped-call]
                # Of the library's bars, this one counts the bytes of all files that are written.
                self._counts_bytes = str(kwargs.get("desc", "")).startswith("Reconstructing")
                self._num_bytes = 0

            def update(self, n: float | None = 1) -> bool:
                if self._counts_bytes and not isinstance(shown, bool):
                    self._num_bytes += int(n or 0)
                    shown(self._num_bytes, int(self.total or 0))
                return bool(super().update(n))

        return Path(
            snapshot_download(
                self.repo,
                revision=self.revision,
                cache_dir=self.cache,
                endpoint=self.endpoint,
                allow_patterns=list(allowed),
                ignore_patterns=None if ignored is None else list(ignored),
                tqdm_class=OptionalProgressBar,
                local_files_only=only_cached,
            )
        )

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Raise errors of huggingface_hub as ModelError or DownloadError."""
        try:
            from huggingface_hub.errors import (
                HFValidationError,
                LocalEntryNotFoundError,
                RepositoryNotFoundError,
                RevisionNotFoundError,
            )
        except ImportError as e:
            message = f"model {self} needs the package huggingface_hub, which is not installed"
            raise ModelError(message, hint="run pip install huggingface_hub") from e
        try:
            yield
        except ModelError:
            raise
        except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as e:
            hint = "check the name and revision; for a private or gated model, set HF_TOKEN"
            raise ModelError(f"the Hugging Face hub has no model {self} that you may read", hint=hint) from e
        except LocalEntryNotFoundError as e:
            raise DownloadError(
                f"cannot reach the Hugging Face hub for {self}, which is not in the cache {self.cache}",
                hint="check the network",
            ) from e
        except OSError as e:
            if e.errno not in DISK_FULL_ERRNOS:
                raise self._make_download_error(e) from e
            hint = "free disk space, or set EMBERLINE_CACHE to another directory; then run it again: it resumes"
            raise ModelError(f"cannot write {self} to {self.cache}: {e.strerror}", hint=hint) from e
        except Exception as e:  # the library raises many kinds of transport errors
            raise self._make_download_error(e) from e

    def _make_download_error(self, error: Exception) -> DownloadError:
        hint = "run the command again: the download resumes"
        return DownloadError(f"cannot download {self}: {type(error).__name__}: {error}", hint=hint)
