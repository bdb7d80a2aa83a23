"""A repository of the Hugging Face hub in the cache: huggingface_hub downloads, resumes and checks. Never pickles."""

from __future__ import annotations

from pathlib import Path

from emberline.core.errors import DownloadError, ModelError

ALLOWED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
# Other frameworks' and duplicate weights live in folders; a sentence embedder's modules have theirs too, by number.
IGNORED = ["*/*.safetensors", "*/*.txt", "*/*.model", "*/*.jinja", "[!0-9]*/*.json", "*/*/*", ".*", "consolidated*",
           "*.onnx.json"]  # fmt: skip


def snapshot(
    repo: str, revision: str | None, cache: Path, progress: bool, endpoint: str | None = None, *, fetch: bool = True
) -> Path | None:
    """None: it is not in the cache, and nothing was to be fetched."""
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
        raise ModelError(f"hf:{repo} needs the package huggingface_hub", hint="pip install huggingface_hub") from e

    class Shown(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": not progress})  # type: ignore[no-untyped-call]

    name = f"hf:{repo}" + (f"@{revision}" if revision else "")
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache,
            endpoint=endpoint,
            allow_patterns=ALLOWED,
            ignore_patterns=IGNORED,
            tqdm_class=Shown,
            local_files_only=not fetch,
        )
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as e:
        raise ModelError(f"the hub has no {name} that you may read", hint="check the name, or set HF_TOKEN") from e
    except LocalEntryNotFoundError as e:
        if not fetch:
            return None
        raise DownloadError(
            f"cannot reach the hub for {name}, and it is not in {cache}", hint="check the network"
        ) from e
    except Exception as e:  # the library's own transport errors are many
        raise DownloadError(f"cannot download {name}: {type(e).__name__}: {e}", hint="run it again: it resumes") from e
    if not list(Path(folder).glob("*.safetensors")):
        if not fetch:
            return None  # what was begun is not there
        raise ModelError(f"{name} holds no *.safetensors", hint="pickled weights are never loaded")
    return Path(folder)
