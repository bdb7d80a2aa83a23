"""Downloads repositories of the Hugging Face hub into the cache with huggingface_hub.

Pickled weights are never downloaded.
"""

from __future__ import annotations

from pathlib import Path

from emberline.core.errors import DownloadError, ModelError

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
    show_progress: bool,
    endpoint: str | None = None,
    *,
    allow_download: bool = True,
) -> Path | None:
    """Return the directory of a repository in the cache. The repository is downloaded if necessary.

    With `allow_download` False nothing is downloaded; return None if the repository is not in the cache.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
        from huggingface_hub.utils.tqdm import tqdm
    except ImportError as e:
        hint = "run pip install huggingface_hub"
        raise ModelError(f"model hf:{repo} needs the package huggingface_hub, which is not installed", hint=hint) from e

    class OptionalProgressBar(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": not show_progress})  # type: ignore[no-untyped-call]

    name = f"hf:{repo}" + (f"@{revision}" if revision else "")
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache,
            endpoint=endpoint,
            allow_patterns=ALLOWED_PATTERNS,
            ignore_patterns=IGNORED_PATTERNS,
            tqdm_class=OptionalProgressBar,
            local_files_only=not allow_download,
        )
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as e:
        hint = "check the name and revision; for a private or gated model, set HF_TOKEN"
        raise ModelError(f"the Hugging Face hub has no model {name} that you may read", hint=hint) from e
    except LocalEntryNotFoundError as e:
        if not allow_download:
            return None
        raise DownloadError(
            f"cannot reach the Hugging Face hub for {name}, which is not in the cache {cache}", hint="check the network"
        ) from e
    except Exception as e:  # the library raises many kinds of transport errors
        hint = "run the command again: the download resumes"
        raise DownloadError(f"cannot download {name}: {type(e).__name__}: {e}", hint=hint) from e
    if not list(Path(folder).glob("*.safetensors")):
        if not allow_download:
            return None  # an interrupted download
        hint = "use a model with safetensors weights; pickled weights are not loaded"
        raise ModelError(f"{name} has no *.safetensors file", hint=hint)
    return Path(folder)
